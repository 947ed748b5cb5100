"""Measures any OpenAI-compatible server under concurrent streaming chats, from outside.

    python -m benchmarks.serve --serve                                     # a server of ours, started and ended here
    python -m benchmarks.serve --base-url http://127.0.0.1:8000/v1 --streams 1,8,32
    python -m benchmarks.serve --base-url ours=http://... --base-url peer=http://... --rounds 3

Time to first text, time between pieces and tokens a second go to out/serve/, with all samples and a plot. Several
servers take turns, level by level, so that a drift of the machine meets all of them. Prompts share no more than a few
words unless --shared-prefix asks for it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from contextlib import ExitStack
from itertools import product
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.load import Done, Server, closed, opened, send
from benchmarks.options import Options, make_parser, read_options
from benchmarks.prompts import Length, Prompts, length
from benchmarks.report import Cell, Level, document, plot, table, write_json
from benchmarks.samples import OK, Run
from benchmarks.target import Unusable, ask_models, check_url, environment, only_model, serving

PROBES = (40, 160)
WARMUP_TOKENS = 8


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; 0 if every request got a whole answer, 1 if not, 2 if nothing could be measured."""
    parser = make_parser((__doc__ or "").partition("\n")[0])
    given = parser.parse_args(arguments)
    try:
        options = read_options(given)
        given.out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            servers, models = find_servers(given, stack)
            around = environment() | {"models": models}
            cells = asyncio.run(measure(servers, options, Console(stderr=True)))
    except Unusable as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    about = {"base_urls": {server.name: server.url for server in servers}, **dataclasses.asdict(options)}
    write_json(given.out / "serve.json", document(cells, environment=around, options=about))
    # Figures cut to fit a narrow terminal would be worth nothing.
    Console(width=max(Console().width, 120)).print(table(cells))
    print(given.out / "serve.json")
    try:
        plot(given.out / "serve.png", cells, f"{around['cpu']}, {around['threads']} threads; {options}")
        print(given.out / "serve.png")
    except ImportError as error:
        print(f"no plot: {error} (pip install matplotlib)")
    return 0 if all({OK} == cell.summary.outcomes.keys() and not cell.summary.lost for cell in cells) else 1


def find_servers(given: argparse.Namespace, stack: ExitStack) -> tuple[list[Server], dict[str, Any]]:
    """Return the servers and what each says of its models; one started here lives as long as `stack`."""
    named = [text.rpartition("=") if "://" in text.rpartition("=")[2] else ("", "", text) for text in given.base_url]
    if given.serve is not None:
        named = [("cellar", "=", stack.enter_context(serving(given.serve, given.out / "server.log")))]
    if len(given.model) not in (0, 1, len(named)):
        raise Unusable(f"--model must be given once or {len(named)} times, not {len(given.model)} times")
    wanted = given.model * len(named) if len(given.model) == 1 else given.model or [None] * len(named)
    servers, models = [], {}
    for (name, _, text), model in zip(named, wanted, strict=True):
        url = check_url(text, given.allow_remote)
        name = name or url.split("/")[2]
        models[name] = ask_models(url, given.api_key)
        servers.append(Server(name, url, model or only_model(url, models[name]), given.api_key))
    if len(models) < len(servers):
        raise Unusable("two servers have the same name: write --base-url NAME=URL")
    return servers, models


async def measure(servers: list[Server], options: Options, console: Console) -> list[Cell]:
    """Return a cell a level and server; rounds and servers take turns."""
    cells = {(level, server): Cell(server.name, level, []) for level in options.levels for server in servers}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    total = options.rounds * len(servers) * sum(options.count(level) for level in options.levels)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:  # no proxy to this machine
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("counting tokens", total=total)
            prompts = {server: make_prompts(options, await probe(client, server, options)) for server in servers}
            for turn, level, server in product(range(options.rounds), options.levels, servers):
                progress.update(bar, description=f"{server.name}, {level}, round {turn + 1}")
                press = Press(client, server, options, prompts[server], level, turn)
                await press.warm_up()
                cells[level, server].runs.append(await press.run(lambda _: progress.advance(bar)))
    return list(cells.values())


async def probe(client: httpx.AsyncClient, server: Server, options: Options) -> Length:
    """Return how many tokens the server makes of words; Unusable if it does not answer."""
    counts = []
    ask = dataclasses.replace(options.ask, max_tokens=1)
    for words in PROBES:
        text = Prompts(words, 0, options.seed).text("probe", words)
        sample = await send(client, server, ask, prompt=text, start=0.0)
        if sample.outcome != OK:
            raise Unusable(f"{server.url} does not answer a chat with {server.model!r}: {sample.outcome}")
        # Without a count, three tokens for two words is near enough for English.
        counts.append((words, sample.prompt_tokens or words * 3 // 2))
    return length(counts[0], counts[1])


def make_prompts(options: Options, counted: Length) -> Prompts:
    """Return prompts of the wanted length for a server that counts so."""
    words = counted.words(options.prompt_tokens)
    shared = round(options.shared_tokens / counted.word)
    return Prompts(words=words, shared=min(shared, words - 1), seed=options.seed)


@dataclasses.dataclass(frozen=True, slots=True)
class Press:
    """One level against one server, once. All servers get the same prompts."""

    client: httpx.AsyncClient
    server: Server
    options: Options
    prompts: Prompts
    level: Level
    turn: int

    async def warm_up(self) -> None:
        """Send one short wave, which is not measured."""
        ask = dataclasses.replace(self.options.ask, max_tokens=min(WARMUP_TOKENS, self.options.ask.max_tokens))
        streams = int(self.level.value) if self.options.closed else 2
        wave = [self.prompts.text("warm-up", self.level, self.turn, number) for number in range(streams)]
        await closed(self.client, self.server, ask, prompts=wave, streams=streams, done=lambda _: None)

    async def run(self, done: Done) -> Run:
        """Send all requests and measure them."""
        ask, count = self.options.ask, self.options.count(self.level)
        texts = [self.prompts.text(self.level, self.turn, number) for number in range(count)]
        if self.options.closed:
            streams = int(self.level.value)
            return await closed(self.client, self.server, ask, prompts=texts, streams=streams, done=done)
        seed = self.options.seed + self.turn
        return await opened(self.client, self.server, ask, prompts=texts, rate=self.level.value, seed=seed, done=done)


if __name__ == "__main__":
    sys.exit(main())
