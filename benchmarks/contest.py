"""What a server and its peer are compared in: each cell asks one server over HTTP and returns figures.

Prompts are random token ids, the same for both servers and new in every turn, so that no cache knows them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from benchmarks.load import Ask, Server, closed, send
from benchmarks.samples import OK, Run, Sample, percentile, summarize, time_a_token

Figures = dict[str, float]
Cell = Callable[["Contestant"], Awaitable[Figures]]

# Ids that every vocabulary has and that no tokenizer of ours gives a meaning.
FIRST_ID, LAST_ID = 300, 1900
RATES = "tokens/s"


class Unsound(Exception):
    """A server did not answer as it must, so its times say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens of prompts and answers.

    depth, decoded    prompt and answer of a lone stream
    long              a prompt whose answer is one token
    asked, answered   prompt and answer of each of many streams
    history, turn     what is shared by two prompts, and what each adds
    """

    depth: int = 512
    decoded: int = 64
    long: int = 2048
    asked: int = 256
    answered: int = 128
    history: int = 2048
    turn: int = 32


SMOKE = Sizes(depth=24, decoded=8, long=48, asked=16, answered=8, history=64, turn=4)


@dataclass(frozen=True, slots=True)
class Contestant:
    """One server in one turn; `seed` is the turn's, so both servers are asked the same."""

    client: httpx.AsyncClient
    server: Server
    sizes: Sizes
    seed: str

    def prompt(self, tokens: int, *key: object) -> list[int]:
        """Return random ids that depend on the turn and the key alone."""
        source = random.Random(f"{self.seed} {key}")
        return [source.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]

    async def ask(self, prompt: list[int], tokens: int) -> Sample:
        """Send one request and return its whole answer."""
        sample = await send(self.client, self.server, greedy(tokens), prompt=prompt, start=0.0)
        return self.check([sample], tokens)[0]

    async def ask_at_once(self, prompts: list[list[int]], tokens: int) -> Run:
        """Send all requests at once and return their whole answers."""
        count = len(prompts)
        run = await closed(
            self.client, self.server, greedy(tokens), prompts=prompts, streams=count, done=lambda _: None
        )
        self.check(run.samples, tokens)
        return run

    def check(self, samples: Sequence[Sample], tokens: int) -> Sequence[Sample]:
        """Return the samples if all are whole and as long as asked for."""
        for sample in samples:
            if sample.outcome != OK or sample.completion_tokens != tokens or not sample.arrivals:
                told = f"{sample.outcome}, {sample.completion_tokens} tokens of {tokens}"
                raise Unsound(f"{self.server.name} at {self.server.url} answered: {told}")
        return samples


def greedy(tokens: int) -> Ask:
    """Return a request for exactly that many of the likeliest tokens."""
    return Ask(max_tokens=tokens, timeout_seconds=1200.0, extra={"ignore_eos": True})


async def alone(one: Contestant) -> Figures:
    """Measure a lone stream: the prompt until its first token, and the tokens behind it."""
    sizes = one.sizes
    sample = await one.ask(one.prompt(sizes.depth, "alone"), sizes.decoded)
    token = time_a_token(sample)
    if token is None:
        raise Unsound(f"{one.server.name} sent its answer in one piece")
    return {
        f"decode behind {sizes.depth}, {RATES}": 1 / token,
        f"prefill {sizes.depth}, {RATES}": sizes.depth / sample.arrivals[0],
    }


async def prefill(one: Contestant) -> Figures:
    """Measure a long prompt until its first token."""
    sample = await one.ask(one.prompt(one.sizes.long, "prefill"), 1)
    return {f"prefill {one.sizes.long}, {RATES}": one.sizes.long / sample.arrivals[0]}


def streams(count: int) -> Cell:
    """Return the cell of so many streams that start at once."""

    async def measure(one: Contestant) -> Figures:
        prompts = [one.prompt(one.sizes.asked, "streams", count, number) for number in range(count)]
        run = await one.ask_at_once(prompts, one.sizes.answered)
        summary = summarize([run])
        first = [sample.arrivals[0] for sample in run.samples]
        gaps = [gap for sample in run.samples for gap in sample.gaps] or [0.0]
        figures = {f"{count} streams, {RATES}": summary.tokens_second}
        for name, values in (("first token", first), ("between tokens", gaps)):
            for share in (0.5, 0.99):
                figures[f"{count} streams, {name} p{share * 100:.0f}, ms"] = 1e3 * (percentile(values, share) or 0.0)
        return figures

    return measure


async def reuse(one: Contestant) -> Figures:
    """Measure the first token of prompts that begin with one seen before: a second turn, a second user.

    The second turn brings an answer that is not the one given, so of the conversation only the first prompt is known.
    """
    history, turn = one.sizes.history, one.sizes.turn
    chat, system = one.prompt(history, "chat"), one.prompt(history, "system")
    cold_turn = await one.ask(chat, turn)
    warm_turn = await one.ask([*chat, *one.prompt(2 * turn, "second turn")], 1)
    cold_user = await one.ask([*system, *one.prompt(turn, "first user")], 1)
    warm_user = await one.ask([*system, *one.prompt(turn, "second user")], 1)
    figures = {}
    for name, cold, warm in (("second turn", cold_turn, warm_turn), ("second user", cold_user, warm_user)):
        figures[f"{name} of {history}, first token, ms"] = 1e3 * warm.arrivals[0]
        figures[f"{name} of {history}, times faster than cold"] = cold.arrivals[0] / warm.arrivals[0]
    return figures


def cells(names: Sequence[str], counts: Sequence[int]) -> dict[str, Cell]:
    """Return the cells of these names, with one for each number of streams."""
    known: dict[str, Cell] = {"alone": alone, "prefill": prefill}
    known |= {f"{count} streams": streams(count) for count in counts}
    known["reuse"] = reuse
    return {name: cell for name, cell in known.items() if name in names or ("streams" in names and " " in name)}
