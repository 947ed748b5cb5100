"""Results as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench.benchmark import Measured
from bench.client import Server
from bench.samples import LoadRun

TITLES = {
    "latency": "Latency: one stream, by the length of its prompt",
    "throughput": "Throughput: many streams",
    "reuse": "Reuse: prompts with a cached prefix",
    "long": "Long context: one stream, by how full the context is",
}


def by_scenario(measured: Iterable[Measured]) -> list[tuple[str, list[Measured]]]:
    """All of them, as they share a table and a plot."""
    return [(name, list(group)) for name, group in groupby(measured, key=lambda result: result.cell.scenario)]


def series(measured: Iterable[Measured]) -> list[str]:
    """The names of all their figures."""
    return list(dict.fromkeys(name for result in measured for name in result.series))


def table(scenario: str, measured: Sequence[Measured]) -> Table:
    """The printed table of one scenario: a row a cell and server."""
    names = series(measured)
    result = Table(title=TITLES[scenario], title_justify="left")
    for name in ("server", "", "requests"):
        result.add_column(name, no_wrap=True)
    for name in names:
        result.add_column(name, justify="right")
    for row in measured:
        ended = ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items())
        result.add_row(row.server, row.cell.label, ended, *(spread(row.values(name)) for name in names))
    return result


def spread(values: list[float]) -> str:
    """The median, and where there are several values the lowest and the highest."""
    if not values:
        return "-"
    middle = digits(median(values))
    return middle if len(values) == 1 else f"{middle} ({digits(min(values))} to {digits(max(values))})"


def digits(value: float) -> str:
    """A number with three digits, as far as it has them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def document(
    measured: Sequence[Measured],
    *,
    servers: Sequence[Server],
    environment: dict[str, Any],
    options: dict[str, Any],
    left_out: Sequence[str],
) -> dict[str, Any]:
    """Everything that was measured, as JSON can hold it; keys of servers are not in it."""
    return {
        "format": 2,
        "environment": environment,
        "options": options,
        "servers": [
            {"name": server.name, "url": server.url, "model": server.model, "context": server.context}
            for server in servers
        ],
        "left_out": list(left_out),
        "cells": [cell_entry(result) for result in measured],
    }


def cell_entry(measured: Measured) -> dict[str, Any]:
    """One cell: its figures round by round, and every request."""
    return {
        "server": measured.server,
        "scenario": measured.cell.scenario,
        "label": measured.cell.label,
        "at": measured.cell.axis_position,
        "outcomes": measured.outcomes,
        "problems": measured.problems,
        "figures": {
            name: {"median": measured.median(name), "rounds": measured.values(name)} for name in measured.series
        },
        "runs": [run_entry(run) for result in measured.results for run in result.runs],
    }


def run_entry(run: LoadRun) -> dict[str, Any]:
    """A run without the texts of its answers."""
    content = dataclasses.asdict(run)
    for sample in content["samples"]:
        del sample["text"]
    return content


def write_json(path: Path, content: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Write a document, or a list of them; the file appears when it is complete."""
    scratch = path.with_name(f"{path.name}.part")
    scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
