"""Measures cells against servers in turns, so that a drift of the machine meets all of them, under a progress bar."""

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

# One short wave of as many streams as a cell has wakes threads and memory that nothing used before.
WARMUP_PROMPT_TOKENS, WARMUP_ANSWER_TOKENS = 16, 4


@dataclass(slots=True)
class Measured:
    """One cell against one server, round by round."""

    server: str
    cell: Cell
    results: list[CellResult] = field(default_factory=list)

    @property
    def series(self) -> list[str]:
        """The names of the figures, in the order in which they came."""
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
        """How many requests ended how."""
        return outcomes([run for result in self.results for run in result.runs])

    @property
    def problems(self) -> dict[str, str]:
        """Of every way in which requests failed, what the server said of the first."""
        first: dict[str, str] = {}
        for sample in (sample for result in self.results for run in result.runs for sample in run.samples):
            if sample.outcome != OK:
                first.setdefault(sample.outcome, sample.text)
        return first

    @property
    def whole(self) -> bool:
        """Whether every request got a whole answer."""
        return {OK} == self.outcomes.keys()


@dataclass(slots=True, kw_only=True)
class Benchmark:
    """How to measure, and what was measured so far: that stays when a run is interrupted.

    watch     called after each cell; may raise to end the run
    measured  one for each cell and server, cell by cell
    """

    ask: RequestOptions
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
        self.console.print("asking a few short things first ...")
        found = {server: await probe(server, self.ask, self.kind, self.seed) for server in servers}
        seconds = {(number, server): found[server].speed.seconds(cells[number].work) for number, server in places}
        self.console.print(self._announcement(servers, cells, sum(seconds.values())), soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            bar = progress.add_task("", total=self.rounds * sum(seconds.values()))
            for turn, number, server in self._order(servers, cells):
                told = f"{server.name}, {cells[number].label}, round {turn + 1} of {self.rounds}"
                progress.update(bar, description=told)
                if not self.console.is_terminal:  # where no bar is shown
                    self.console.print(told)
                place = places[number, server]
                place.results.append(await self._measure(found[server], cells[number], turn))
                self.watch(place)
                progress.advance(bar, seconds[number, server])
        self.console.print(f"took {format_duration(time.monotonic() - began)}")

    async def _measure(self, found: ProbedServer, cell: Cell, turn: int) -> CellResult:
        asker = found.asker.for_round(turn)
        if turn == 0:
            count = cell.work.streams
            wave = [
                asker.prompts.unshared(WARMUP_PROMPT_TOKENS, "warm-up", cell.label, number) for number in range(count)
            ]
            await asker.closed_loop(wave, WARMUP_ANSWER_TOKENS, streams=count)
        return await cell.measure(asker)

    def _order(self, servers: Sequence[Server], cells: Sequence[Cell]) -> list[tuple[int, int, Server]]:
        """Rounds, cells and servers; who goes first changes from round to round."""
        return [
            (turn, number, server)
            for turn in range(self.rounds)
            for number, server in pairs(cells, servers if turn % 2 == 0 else servers[::-1])
        ]

    def _announcement(self, servers: Sequence[Server], cells: Sequence[Cell], seconds: float) -> str:
        names = " and ".join(server.name for server in servers)
        return (
            f"{names}: {len(cells)} cells, rounds: {self.rounds}, seed {self.seed}; "
            f"about {format_duration(self.rounds * seconds)} in all, from the pace of one short answer"
        )


def pairs(cells: Sequence[Cell], servers: Sequence[Server]) -> list[tuple[int, Server]]:
    """Every cell's number with every server."""
    return [(number, server) for number in range(len(cells)) for server in servers]


def format_duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    return f"{round(seconds / 60)} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
