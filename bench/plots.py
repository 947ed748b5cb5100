"""Draws one picture a scenario: a panel a figure, a line a server, bars from the lowest to the highest round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.benchmark import Measured
from bench.report import series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
MISSING = "no plots: matplotlib is not installed (in a checkout of Cellar: pip install '.[bench]')"


def draw(path: Path, measured: Sequence[Measured], title: str) -> None:
    """Write one scenario's picture; ImportError without matplotlib."""
    from matplotlib.figure import Figure  # half a second of import, and only needed here

    names = series(measured)
    labels = list(dict.fromkeys(result.cell.label for result in measured))
    down = -(-max(1, len(names)) // COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 3.5 * down), layout="constrained")
    panels = figure.subplots(down, COLUMNS, squeeze=False).flatten()
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    for panel, name in zip(panels, names, strict=False):
        for number, server in enumerate(dict.fromkeys(result.server for result in measured)):
            results = [result for result in measured if result.server == server and result.values(name)]
            places = [labels.index(result.cell.label) for result in results]
            line(panel, places, [result.values(name) for result in results], server, number)
        panel.set_title(name)
        panel.set_xticks(range(len(labels)), labels, rotation=20, ha="right", fontsize="small")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    if names:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=110)


def line(panel: Axes, places: list[int], rounds: list[list[float]], server: str, number: int) -> None:
    """Draw one server: medians joined by a line, and the range of the rounds."""
    if not rounds:
        return
    middles = [median(values) for values in rounds]
    low = [middle - min(values) for middle, values in zip(middles, rounds, strict=True)]
    high = [max(values) - middle for middle, values in zip(middles, rounds, strict=True)]
    panel.errorbar(places, middles, yerr=[low, high], fmt="o-", capsize=4, color=f"C{number}", label=server)
