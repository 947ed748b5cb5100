"""`cellar bench`: finds or starts the servers, measures them, prints tables, writes JSON and plots."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.benchmark import Benchmark, Measured
from bench.client import Server
from bench.launch import cellar
from bench.machine import environment
from bench.options import BenchOptions
from bench.plan import plan_of, request_options
from bench.plots import MISSING, draw
from bench.report import by_scenario, document, table, write_json
from bench.target import BenchError, check_url, find

EXIT_ERRORS, EXIT_UNUSABLE, EXIT_INTERRUPTED = 1, 2, 130
# Narrower tables would cut figures.
MIN_WIDTH = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArguments:
    """Options of `cellar serve`: for a server started here, and the names and keys of others.

    arguments    of the command line, without the address and keys
    environment  of the started server; keys, because other users can read a command line
    names        model names of requests: none, one for all servers or one each
    """

    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Sequence[str] = ()
    api_key: str | None = None
    context: int | None = None


def measured(options: BenchOptions, serving: ServeArguments) -> int:
    """Measure, print, write; 0 if every request got a complete answer, 1 if not, 2 if nothing could be measured."""
    console, results = Console(stderr=True), Console(width=max(Console().width, MIN_WIDTH))
    try:
        return measure(options, serving, console, results)
    except BenchError as error:
        console.print(f"cellar bench: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        console.print("cellar bench: interrupted")
        return EXIT_INTERRUPTED


def measure(options: BenchOptions, serving: ServeArguments, console: Console, results: Console) -> int:
    """The exit status. Raises BenchError if nothing could be measured."""
    plan = plan_of(options)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    session = Benchmark(
        options=request_options(options), kind=options.prompts, seed=seed, rounds=options.rounds, console=console
    )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--out {options.out} cannot be made: {error}") from error
    with ExitStack() as stack:
        servers = servers_of(options, serving, stack, console)
        contexts = [server.context for server in servers]
        smallest = None if None in contexts else min(context for context in contexts if context is not None)
        cells, left_out = plan.cells(smallest)
        around = environment()
        try:
            asyncio.run(session.run(servers, cells))
        finally:
            # Results of an interrupted run are written too.
            if measured := [result for result in session.measured if result.results]:
                about = {**dataclasses.asdict(options), "seed": seed, "out": str(options.out)}
                about_run = {"environment": around, "options": about}
                write_json(
                    options.out / "bench.json", document(measured, servers=servers, left_out=left_out, **about_run)
                )
                show(measured, left_out, results)
                for path in (options.out / "bench.json", *plots(options.out, measured, around, results)):
                    results.print(str(path), highlight=False, soft_wrap=True)
    return 0 if all(result.whole for result in measured) else EXIT_ERRORS


def servers_of(options: BenchOptions, serving: ServeArguments, stack: ExitStack, console: Console) -> list[Server]:
    """The servers to measure; `stack` ends a server that is started here."""
    named = [
        text.rpartition("=") if "://" in text.rpartition("=")[2] else ("", "", text) for text in options.base_url or ()
    ]
    if not named:
        log = options.out / "server.log"
        message = f"starting cellar serve {' '.join(serving.arguments)} (it writes to {log}) ..."
        console.print(message, markup=False, soft_wrap=True)
        named = [("cellar", "=", stack.enter_context(cellar(serving.arguments, log, serving.environment)))]
    if len(serving.names) not in (0, 1, len(named)):
        raise BenchError(
            f"--served-model-name must be given once or {len(named)} times, not {len(serving.names)} times"
        )
    models: list[str | None] = [*serving.names] or [None]
    models = models * len(named) if len(models) == 1 else models
    servers = []
    for (name, _, text), model in zip(named, models, strict=True):
        url = check_url(text, options.allow_remote)
        name = name or url.split("/")[2]
        servers.append(find(name, url, model=model, api_key=serving.api_key, context=serving.context))
    if len({server.name for server in servers}) < len(servers):
        raise BenchError("two servers have the same name: write --base-url NAME=URL")
    return servers


def show(measured: Sequence[Measured], left_out: Sequence[str], console: Console) -> None:
    """Print the tables, the cells that were left out, and the errors of failed requests."""
    for scenario, group in by_scenario(measured):
        console.print(table(scenario, group))
    console.print("Medians of the rounds, lowest and highest in brackets.")
    for text in left_out:
        console.print(f"left out: {text}", markup=False)
    for result in measured:
        for outcome, text in result.problems.items():
            console.print(f"{result.server}, {result.cell.label}: {outcome}: {text}", markup=False, soft_wrap=True)


def plots(out: Path, measured: Sequence[Measured], around: dict[str, Any], console: Console) -> list[Path]:
    """Draw a plot a scenario and return their paths; none without matplotlib."""
    paths = []
    for scenario, group in by_scenario(measured):
        path = out / f"{scenario}.png"
        try:
            draw(path, group, f"{scenario}: {around['cpu']}, {around['threads']} threads")
        except ImportError:
            console.print(MISSING, markup=False)
            break
        paths.append(path)
    return paths
