"""Measures cells against servers, alternating between them, so that a drift of the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from bench.cells import Cell, CellResult
from bench.client import RequestOptions, Server
from bench.options import Kind
from bench.probe import ProbedServer, probe
from bench.samples import OK, outcomes

# A short run with the streams of the cell: the first use of threads and memory is not measured.
WARMUP_PROMPT_TOKENS, WARMUP_ANSWER_TOKENS = 16, 4


@dataclass(slots=True)
class Measured:
    """One cell against one server, round by round."""

    server: str
    cell: Cell
    results: list[CellResult] = field(default_factory=list)

    @property
    def series(self) -> list[str]:
        """The names of the figures, in order of appearance."""
        return list(dict.fromkeys(name for result in self.results for name in result.figures))

    def values(self, name: str) -> list[float]:
        """One value a round; rounds without one are left out."""
        return [result.figures[name] for result in self.results if name in result.figures]

    def median(self, name: str) -> float | None:
        """The median of the rounds."""
        values = self.values(name)
        return median(values) if values else None

    @property
    def outcomes(self) -> dict[str, int]:
        """Requests by outcome."""
        return outcomes([run for result in self.results for run in result.runs])

    @property
    def problems(self) -> dict[str, str]:
        """The first error text of the server by outcome."""
        first: dict[str, str] = {}
        for sample in (sample for result in self.results for run in result.runs for sample in run.samples):
            if sample.outcome != OK:
                first.setdefault(sample.outcome, sample.text)
        return first

    @property
    def whole(self) -> bool:
        """Whether every request got a complete answer."""
        return {OK} == self.outcomes.keys()


@dataclass(slots=True, kw_only=True)
class Benchmark:
    """A benchmark run; results so far survive an interruption.

    watch     called after each cell; may raise to end the run
    measured  one for each cell and server, cell by cell
    """

    options: RequestOptions
    kind: Kind
    seed: int
    rounds: int
    console: Console
    watch: Callable[[Measured], None] = lambda _: None
    measured: list[Measured] = field(default_factory=list)

    async def run(self, servers: Sequence[Server], cells: Sequence[Cell]) -> None:
        """Fill `measured`."""
        began = time.monotonic()
        places = {(number, server): Measured(server.name, cells[number]) for number, server in pairs(cells, servers)}
        self.measured[:] = places.values()
        self.console.print("probing the servers ...")
        probed = {server: await probe(server, self.options, self.kind, self.seed) for server in servers}
        seconds = {(number, server): probed[server].speed.seconds(cells[number].work) for number, server in places}
        self.console.print(self._announcement(servers, cells, sum(seconds.values())), soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            bar = progress.add_task("", total=self.rounds * sum(seconds.values()))
            for round_number, number, server in self._order(servers, cells):
                description = f"{server.name}, {cells[number].label}, round {round_number + 1} of {self.rounds}"
                progress.update(bar, description=description)
                if not self.console.is_terminal:  # no progress bar
                    self.console.print(description)
                place = places[number, server]
                place.results.append(await self._measure(probed[server], cells[number], round_number))
                self.watch(place)
                progress.advance(bar, seconds[number, server])
        self.console.print(f"took {format_duration(time.monotonic() - began)}")

    async def _measure(self, probed: ProbedServer, cell: Cell, round_number: int) -> CellResult:
        generator = probed.generator.for_round(round_number)
        if round_number == 0:
            count = cell.work.streams
            wave = [
                generator.prompts.unshared(WARMUP_PROMPT_TOKENS, "warm-up", cell.label, number)
                for number in range(count)
            ]
            await generator.closed_loop(wave, WARMUP_ANSWER_TOKENS, streams=count)
        return await cell.measure(generator)

    def _order(self, servers: Sequence[Server], cells: Sequence[Cell]) -> list[tuple[int, int, Server]]:
        """Rounds, cells and servers; the first server alternates from round to round."""
        return [
            (round_number, number, server)
            for round_number in range(self.rounds)
            for number, server in pairs(cells, servers if round_number % 2 == 0 else servers[::-1])
        ]

    def _announcement(self, servers: Sequence[Server], cells: Sequence[Cell], seconds: float) -> str:
        names = " and ".join(server.name for server in servers)
        return (
            f"{names}: {len(cells)} cells, rounds: {self.rounds}, seed {self.seed}; "
            f"about {format_duration(self.rounds * seconds)} in all, estimated from one short answer"
        )


def pairs(cells: Sequence[Cell], servers: Sequence[Server]) -> list[tuple[int, Server]]:
    """All pairs of a cell number and a server."""
    return [(number, server) for number in range(len(cells)) for server in servers]


def format_duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    return f"{round(seconds / 60)} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
