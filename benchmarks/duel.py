"""The result of two servers measured in turns: pairs, medians, ratios, goals, and how they are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench.benchmark import Measured
from bench.cells import FASTER
from bench.report import digits
from benchmarks.goals import Goals


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one cell, ours and the peer's, pair by pair. `goal` None: nobody set one."""

    cell: str
    figure: str
    ours: list[float]
    peers: list[float]
    goal: float | None

    @property
    def name(self) -> str:
        """The cell and the figure."""
        return f"{self.cell}: {self.figure}"

    @property
    def ratios(self) -> list[float]:
        """Pair by pair, how many times better ours is: more of a rate, less of a time."""
        pairs = zip(self.ours, self.peers, strict=True)
        return [peer / own if self.figure.endswith(", ms") else own / peer for own, peer in pairs]

    @property
    def verdict(self) -> str:
        """Whether the median reaches the goal; of reuse, ours alone is asked for."""
        if self.goal is None:
            return ""
        return "PASS" if median(self.ours if self.figure == FASTER else self.ratios) >= self.goal else "behind"


def rows(measured: Sequence[Measured], goals: Goals) -> list[Row]:
    """Return a row a figure of neighbours in `measured`: ours, the peer's, ours, ..."""
    result = []
    for ours, peers in list(pairwise(measured))[::2]:
        # A run that was interrupted leaves the last pair without its second half.
        whole = min(len(ours.results), len(peers.results))
        for name in ours.series:
            pair = [one.values(name)[:whole] for one in (ours, peers)]
            # Where pieces bring several tokens the time between them may be 0: no ratio says anything of that.
            if whole and len(pair[0]) == len(pair[1]) and all(map(all, pair)):
                result.append(Row(ours.cell.label, name, pair[0], pair[1], goals.of(ours.cell, name)))
    return result


def table(duel: Sequence[Row], names: tuple[str, str]) -> Table:
    """Return the printed table."""
    result = Table(caption="medians; times better: the median of the pairs' ratios, and the lowest and highest of them")
    for heading in ("figure", *names, "times better", "lowest", "highest", "goal", ""):
        result.add_column(heading, justify="left" if heading in ("figure", "") else "right", no_wrap=True)
    for row in duel:
        told = [median(row.ours), median(row.peers), median(row.ratios), min(row.ratios), max(row.ratios)]
        goal = "" if row.goal is None else f"{row.goal:g}"
        result.add_row(row.name, *(digits(value) for value in told), goal, row.verdict)
    return result


def document(duel: Sequence[Row]) -> list[dict[str, Any]]:
    """Return all pairs, as JSON can hold them."""
    return [
        dataclasses.asdict(row)
        | {"ratios": row.ratios, "ratio": median(row.ratios), "medians": (median(row.ours), median(row.peers))}
        | {"verdict": row.verdict}
        for row in duel
    ]


def medians(duel: Sequence[Row], about: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Rows for benchmarks.page; `about` is the same in all of them: model, weights and peer."""
    for row in duel:
        yield {
            **about,
            "cell": row.cell,
            "figure": row.figure,
            "cellar": round(median(row.ours), 3),
            "other": round(median(row.peers), 3),
            "ratio": round(median(row.ratios), 3),
            "lowest": round(min(row.ratios), 3),
            "highest": round(max(row.ratios), 3),
        }


def plot(path: Path, duel: Sequence[Row], peer: str, title: str) -> None:
    """Draw how many times better ours is, a row a figure, a dot a pair and a cross the goal; ImportError may come."""
    from matplotlib.figure import Figure  # half a second of import, and only needed here
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(10, 1.5 + 0.3 * len(duel)), layout="constrained")
    panel = figure.subplots()
    for place, row in enumerate(duel):
        panel.plot([median(row.ratios)], [place], "|", color="C0", markersize=16, markeredgewidth=3)
        panel.plot(row.ratios, [place] * len(row.ratios), "o", color="C0", alpha=0.4)
        if row.goal is not None and row.figure != FASTER:
            panel.plot([row.goal], [place], "x", color="C1")
    panel.axvline(1.0, color="black", linewidth=0.8)
    panel.set_xscale("log")  # half as good and twice as good are equally far from even
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_yticks(range(len(duel)), [row.name for row in duel])
    panel.invert_yaxis()
    panel.grid(alpha=0.3)
    panel.set_xlabel(f"times better than {peer}")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=110)
