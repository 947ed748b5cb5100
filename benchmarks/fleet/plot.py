"""The plot and the table of simulated fleets: policies by the number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import table

# The same text and ids in every run, so that a plot changes with its data only.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "cellar", "font.size": 9}
PANELS = {
    "hit_share": "cached share of prompt tokens",
    "ttft_p50": "first token, p50, s",
    "ttft_p99": "first token, p99, s",
    "imbalance": "largest / mean load",
}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a panel a figure and a line a policy; ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        panels = figure.subplots(1, len(PANELS))
        for panel, (name, title) in zip(panels, PANELS.items(), strict=True):
            for policy in policies(rows):
                own = [row for row in rows if row["policy"] == policy]
                places = [row["replicas"] for row in own]
                panel.plot(places, [row[name] for row in own], "o-", label=policy, markersize=3)
            panel.set_title(title)
            panel.set_xlabel("replicas")
            panel.set_xscale("log")
            panel.set_yscale("linear" if name == "hit_share" else "log")
            panel.grid(alpha=0.3)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
        figure.savefig(path, metadata={"Date": None})


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table: a row a policy, a column a number of replicas."""
    sizes = list(dict.fromkeys(row["replicas"] for row in rows))
    found = {(row["policy"], row["replicas"]): row for row in rows}
    headings = ["policy", *(f"{size:,} replicas" for size in sizes)]
    lines = [
        [policy, *(cell(found[policy, size]) if (policy, size) in found else "" for size in sizes)]
        for policy in policies(rows)
    ]
    return table(headings, lines)


def policies(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The policies in their order."""
    return list(dict.fromkeys(row["policy"] for row in rows))


def cell(row: dict[str, Any]) -> str:
    """Cached share, times to the first token, largest over mean load."""
    times = " / ".join(
        f"{row[name]:,.2f}" if row[name] < 100 else f"{row[name]:,.0f}" for name in ("ttft_p50", "ttft_p99")
    )
    return f"{100 * row['hit_share']:.1f} %, {times} s, {row['imbalance']:.1f}"
