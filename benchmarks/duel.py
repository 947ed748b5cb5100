"""The result of two servers measured in turns: medians, ratios, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.contest import Figures


@dataclass(slots=True)
class Duel:
    """Pairs of figures, ours and the peer's, in the order in which they were measured."""

    names: tuple[str, str]
    pairs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, ours: Figures, peers: Figures) -> None:
        """Take the figures of one cell, measured once on both sides."""
        for name, value in ours.items():
            self.pairs.setdefault(name, []).append((value, peers[name]))

    def ratios(self, name: str) -> list[float]:
        """Return, pair by pair, how many times better ours is: more of a rate, less of a time."""
        return [peer / own if name.endswith(", ms") else own / peer for own, peer in self.pairs[name]]

    def medians(self, name: str) -> tuple[float, float]:
        """Return the middle of ours and of the peer's."""
        ours, peers = zip(*self.pairs[name], strict=True)
        return median(ours), median(peers)


def table(duel: Duel) -> Table:
    """Return the printed table: a row a figure."""
    result = Table(caption="medians; times better: the median of the pairs' ratios, and the lowest and highest of them")
    for heading in ("figure", *duel.names, "times better", "lowest", "highest", "pairs"):
        result.add_column(heading, justify="left" if heading == "figure" else "right", no_wrap=True)
    for name, pairs in duel.pairs.items():
        ratios = duel.ratios(name)
        told = [*duel.medians(name), median(ratios), min(ratios), max(ratios)]
        result.add_row(name, *(digits(value) for value in told), str(len(pairs)))
    return result


def digits(value: float) -> str:
    """Return a number with three digits, as far as it has them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def document(duel: Duel, *, environment: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return everything that was measured, as JSON can hold it."""
    figures = {
        name: {
            "pairs": pairs,
            "medians": duel.medians(name),
            "ratio": median(duel.ratios(name)),
            "ratios": duel.ratios(name),
        }
        for name, pairs in duel.pairs.items()
    }
    return {"format": 1, "environment": environment, "options": options, "servers": duel.names, "figures": figures}


def plot(path: Path, duel: Duel, title: str) -> None:
    """Draw how many times better ours is, a row a figure and a dot a pair."""
    from matplotlib.figure import Figure  # half a second of import, and only needed here
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(10, 1.5 + 0.3 * len(duel.pairs)), layout="constrained")
    panel = figure.subplots()
    for row, name in enumerate(duel.pairs):
        ratios = duel.ratios(name)
        panel.plot([median(ratios)], [row], "|", color="C0", markersize=16, markeredgewidth=3)
        panel.plot(ratios, [row] * len(ratios), "o", color="C0", alpha=0.4)
    panel.axvline(1.0, color="black", linewidth=0.8)
    panel.set_xscale("log")  # half as good and twice as good are equally far from even
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_yticks(range(len(duel.pairs)), list(duel.pairs))
    panel.invert_yaxis()
    panel.grid(alpha=0.3)
    panel.set_xlabel(f"times better than {duel.names[1]}")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=110)
