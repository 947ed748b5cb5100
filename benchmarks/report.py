"""Turns runs into a table for people, JSON for machines and a plot for both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.samples import Run, Summary, summarize


@dataclass(frozen=True, slots=True)
class Level:
    """How hard to press: that many streams at once, or that many requests a second."""

    kind: str
    value: float

    def __str__(self) -> str:
        unit = "requests/s" if self.kind == "rate" else "stream" if self.value == 1 else "streams"
        return f"{self.value:g} {unit}"


@dataclass(slots=True)
class Cell:
    """All runs of one level against one server."""

    server: str
    level: Level
    runs: list[Run]

    @property
    def summary(self) -> Summary:
        """The figures of all runs together."""
        return summarize(self.runs)


def table(cells: Iterable[Cell]) -> Table:
    """Return the printed table: a row a level and server."""
    result = Table(
        caption="ttft: to the first text; itl: between pieces; tpot: a token after the first; p50 / p99 in ms"
    )
    for name in ("server", "level", "requests", "lost", "tokens/s", "ttft", "itl", "tpot"):
        result.add_column(name, justify="left" if name in ("server", "level") else "right", no_wrap=True)
    for cell in cells:
        figures = cell.summary
        result.add_row(
            cell.server,
            str(cell.level),
            ", ".join(f"{count} {outcome}" for outcome, count in figures.outcomes.items()),
            str(figures.lost),
            f"{figures.tokens_second:.1f}",
            pair(figures.ttft_p50, figures.ttft_p99),
            pair(figures.itl_p50, figures.itl_p99),
            pair(figures.tpot_p50, figures.tpot_p99),
        )
    return result


def pair(middle: float | None, high: float | None) -> str:
    """Return two times in milliseconds."""
    return f"{milliseconds(middle)} / {milliseconds(high)}"


def milliseconds(seconds: float | None) -> str:
    """Return a time with three digits, as far as it has them."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def document(cells: Iterable[Cell], *, environment: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return everything that was measured, as JSON can hold it."""
    return {
        "format": 1,
        "environment": environment,
        "options": options,
        "levels": [
            {
                "server": cell.server,
                "kind": cell.level.kind,
                "value": cell.level.value,
                "summary": dataclasses.asdict(cell.summary),
                "runs": [dataclasses.asdict(run) for run in cell.runs],
            }
            for cell in cells
        ],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the document."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def plot(path: Path, cells: list[Cell], title: str) -> None:
    """Draw time to first text, time between pieces and tokens a second over the levels, a colour a server."""
    from matplotlib.figure import Figure  # half a second of import, and only needed here
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    servers = list(dict.fromkeys(cell.server for cell in cells))
    values = sorted({cell.level.value for cell in cells})
    for number, server in enumerate(servers):
        own = [(values.index(cell.level.value), cell.summary) for cell in cells if cell.server == server]
        colour = f"C{number}"
        for panel, name in zip(panels, ("ttft", "itl"), strict=False):
            for share, style in (("p50", "o-"), ("p99", "^--")):
                points = [(x, getattr(figures, f"{name}_{share}")) for x, figures in own]
                drawn = [(x, seconds * 1e3) for x, seconds in points if seconds is not None]
                panel.plot(*zip(*drawn, strict=True), style, color=colour, label=f"{server} {share}") if drawn else None
        panels[2].plot(
            [x for x, _ in own], [figures.tokens_second for _, figures in own], "o-", color=colour, label=server
        )
    for panel in panels[:2]:
        panel.set_yscale("log")  # a full queue and an idle server are a factor of a thousand apart
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
    panels[2].set_ylim(bottom=0)
    across = "requests a second" if cells[0].level.kind == "rate" else "streams at once"
    for panel, name in zip(
        panels, ("time to first text, ms", "time between pieces, ms", "tokens a second"), strict=True
    ):
        panel.set_title(name)
        panel.set_xlabel(across)
        panel.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=110)
