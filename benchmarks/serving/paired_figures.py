"""Figures of two servers that were measured alternately: pairs, medians, ratios, goals, table and plot."""

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
from benchmarks.serving.goals import Goals


@dataclass(frozen=True, slots=True)
class PairedFigure:
    """One figure of one cell, Cellar's and the peer's values pair by pair, and a goal for the ratio."""

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
        """Of each pair, how many times better Cellar is: a higher rate, a lower time."""
        pairs = zip(self.ours, self.peers, strict=True)
        return [peer / own if self.figure.endswith(", ms") else own / peer for own, peer in pairs]

    @property
    def verdict(self) -> str:
        """Whether the median reaches the goal; the goal of the prefix cache is for Cellar's own ratio."""
        if self.goal is None:
            return ""
        return "PASS" if median(self.ours if self.figure == FASTER else self.ratios) >= self.goal else "behind"


def rows(measured: Sequence[Measured], goals: Goals) -> list[PairedFigure]:
    """Pair the figures of neighbours in `measured`: Cellar, the peer, Cellar, ..."""
    result = []
    for ours, peers in list(pairwise(measured))[::2]:
        # An interrupted run may lack the second half of its last pair.
        whole = min(len(ours.results), len(peers.results))
        for name in ours.series:
            pair = [one.values(name)[:whole] for one in (ours, peers)]
            # The time between tokens of one chunk may be 0, which has no ratio.
            if whole and len(pair[0]) == len(pair[1]) and all(map(all, pair)):
                result.append(PairedFigure(ours.cell.label, name, pair[0], pair[1], goals.of(ours.cell, name)))
    return result


def table(duel: Sequence[PairedFigure], names: tuple[str, str]) -> Table:
    """Return the printed table."""
    result = Table(caption="medians; times better: the median of the pairs' ratios, and the lowest and highest of them")
    for heading in ("figure", *names, "times better", "lowest", "highest", "goal", ""):
        result.add_column(heading, justify="left" if heading in ("figure", "") else "right", no_wrap=True)
    for row in duel:
        figures = [median(row.ours), median(row.peers), median(row.ratios), min(row.ratios), max(row.ratios)]
        goal = "" if row.goal is None else f"{row.goal:g}"
        result.add_row(row.name, *(digits(value) for value in figures), goal, row.verdict)
    return result


def document(duel: Sequence[PairedFigure]) -> list[dict[str, Any]]:
    """All pairs, as JSON values."""
    return [
        dataclasses.asdict(row)
        | {"ratios": row.ratios, "ratio": median(row.ratios), "medians": (median(row.ours), median(row.peers))}
        | {"verdict": row.verdict}
        for row in duel
    ]


def medians(duel: Sequence[PairedFigure], about: Mapping[str, str]) -> Iterator[dict[str, Any]]:
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


def plot(path: Path, duel: Sequence[PairedFigure], peer: str, title: str) -> None:
    """Draw the ratios: a line for each figure, a dot for each pair, a cross for the goal. Needs matplotlib."""
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
