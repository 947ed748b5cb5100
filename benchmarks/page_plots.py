"""The plots of docs/performance.md, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report import digits
from benchmarks.page import COLD, DECODE, PREFILL, RATE, REUSE, WARM, Figures, Row
from benchmarks.result import MODELS

# The same text and ids in every run, so that a plot changes with its data only.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "cellar", "font.size": 9}
SERVERS = {"cellar": "Cellar", "other": "llama.cpp"}
# Weights that no bar shows.
FLOATS = ("float32", "bfloat16", "F32", "BF16")


def write_plots(figures: Figures, folder: Path) -> None:
    """Write speed.svg, streams.svg, prefix.svg and quality.svg, as far as there is data."""
    folder.mkdir(parents=True, exist_ok=True)
    draw: dict[str, Callable[[Figures, Figure], None]] = {
        "speed": speed,
        "streams": streams,
        "prefix": prefix,
        "quality": quality,
    }
    with matplotlib.rc_context(STYLE):
        for name, plot in draw.items():
            figure = Figure(figsize=(8, 3), layout="constrained")
            plot(figures, figure)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def speed(figures: Figures, figure: Figure) -> None:
    """Decode and prefill by model, int8."""
    cpu = figures.machines("peers")[0]
    panels = figure.subplots(1, 2)
    for panel, name, title in zip(panels, (DECODE, PREFILL), ("decode", "prompt of 512 tokens"), strict=True):
        of = {"peer": "llama.cpp", "weights": "int8", "cell": "prompt of 512", "figure": name}
        rows = in_order(figures.rows("peers", cpu, **of))
        bars(
            panel,
            [row["model"] for row in rows],
            {label: [row[side] for row in rows] for side, label in SERVERS.items()},
        )
        panel.set_title(title)
        panel.set_ylabel("tokens/s")
    figure.suptitle(f"int8 / q8_0, one stream, {cpu}", fontsize="medium")


def streams(figures: Figures, figure: Figure) -> None:
    """Throughput by concurrent streams, int8."""
    cpu = figures.machines("peers")[0]
    panel = figure.subplots()
    for number, model in enumerate(MODELS):
        of = {"peer": "llama.cpp", "weights": "int8", "model": model, "figure": RATE}
        rows = sorted(figures.rows("peers", cpu, **of), key=stream_count)
        for side, label in SERVERS.items():
            line = "o-" if side == "cellar" else "o--"
            counts = [stream_count(row) for row in rows]
            if rows:
                panel.plot(counts, [row[side] for row in rows], line, color=f"C{number}", label=f"{model}, {label}")
    panel.set_xlabel("concurrent streams")
    panel.set_ylabel("tokens/s")
    every = {stream_count(row) for row in figures.rows("peers", cpu, peer="llama.cpp", weights="int8", figure=RATE)}
    panel.set_xticks(sorted(every))
    panel.set_yscale("log")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"int8 / q8_0, 256 tokens in, 128 out, {cpu}", fontsize="medium")


def prefix(figures: Figures, figure: Figure) -> None:
    """First token with and without a cached prefix, on the first machine with figures of both servers."""
    panel = figure.subplots()
    for cpu in figures.machines("peers"):
        found = [row for row in figures.rows("peers", cpu, peer="llama.cpp") if row["cell"] in REUSE and "other" in row]
        if found:
            break
    else:
        return
    values = {(row["cell"], row["figure"]): row for row in found}
    labels, heights = [], {label: list[float]() for label in SERVERS.values()}
    for cell, label in REUSE.items():
        for name, state in ((COLD, "cold"), (WARM, "cached")):
            if row := values.get((cell, name)):
                labels.append(f"{label},\n{state}")
                for side, server in SERVERS.items():
                    heights[server].append(row[side])
    bars(panel, labels, heights)
    panel.set_yscale("log")
    panel.set_ylabel("first token, ms")
    figure.suptitle(f"prompts of 2,048 tokens, {found[0]['model']}, {cpu}", fontsize="medium")


def quality(figures: Figures, figure: Figure) -> None:
    """Loss of perplexity by format, outliers and server."""
    cpus = figures.machines("quality")
    if not cpus:
        return
    rows = figures.rows("quality", cpus[0])
    models = list(dict.fromkeys((row["model"], row["outliers"]) for row in rows))
    formats = [pair for pair in dict.fromkeys((row["server"], row["weights"]) for row in rows) if pair[1] not in FLOATS]
    heights = {
        f"{server} {weights}": [
            next((row["divergence"] for row in rows if is_of(row, model, outliers, server, weights)), 0.0)
            for model, outliers in models
        ]
        for server, weights in formats
    }
    panel = figure.subplots()
    labels = [model if outliers == "none" else f"{model},\noutliers {outliers}" for model, outliers in models]
    bars(panel, labels, heights)
    panel.set_yscale("log")
    panel.set_ylabel("divergence from float32, nats")


def is_of(row: Row, *values: str) -> bool:
    """Whether a row of quality has this model, these outliers, this server and these weights."""
    return tuple(row[name] for name in ("model", "outliers", "server", "weights")) == values


def bars(panel: Axes, labels: Sequence[str], heights: dict[str, list[float]]) -> None:
    """Groups of bars, one bar of each series in a group."""
    width = 0.8 / len(heights)
    for number, (name, values) in enumerate(heights.items()):
        drawn = panel.bar([at + number * width for at in range(len(labels))], values, width, label=name)
        panel.bar_label(drawn, [digits(value) for value in values], fontsize="x-small")
    panel.set_xticks([at + width * (len(heights) - 1) / 2 for at in range(len(labels))], labels, fontsize="x-small")
    panel.margins(y=0.15)
    panel.legend(fontsize="x-small")


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows of the known models, by size."""
    return sorted((row for row in rows if row["model"] in MODELS), key=lambda row: MODELS.index(row["model"]))


def stream_count(row: Row) -> int:
    """Concurrent streams of a cell."""
    return int(str(row["cell"]).split()[0])
