"""Writes the measured tables of docs/scale.md from benchmarks/results: `python -m benchmarks.fleet.page`.

A table stands between two comments with its name. It ends with the machine, commit, date and command of its rows.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet.plot import markdown
from benchmarks.page import table
from benchmarks.result import RESULTS, ROOT, BenchmarkResult, documents

PAGE = ROOT / "docs" / "scale.md"
Rows = Sequence[dict[str, Any]]


def add_page_option(parser: ArgumentParser) -> None:
    """Add --page."""
    parser.add_argument("--page", action="store_true", help="write the tables of docs/scale.md from benchmarks/results")


def load_note() -> str:
    """The load of the machine, for the note of a result: to be called before the measurement."""
    return f"load average {os.getloadavg()[0]:.1f} before the run"


def routers(rows: Rows) -> str:
    """A column a router."""
    values: dict[str, Callable[[dict[str, Any]], str]] = {
        "errors": lambda row: f"{len(row['errors'])} of {row['requests']}",
        "cached share of prompt tokens": lambda row: f"{row['cached_share']:.3f}",
        "text with a seed equal to that of one server": lambda row: "yes" if row["equal_texts"] else "no",
        "one token, p50": lambda row: f"{row['unary_p50_ms']:.1f} ms",
        "first chunk of a stream, p50": lambda row: f"{row['first_chunk_p50_ms']:.1f} ms",
        "tokens/s of 8 streams": lambda row: f"{row['tokens_per_second']:,.0f}",
    }
    lines = [[name, *(value(row) for row in rows)] for name, value in values.items()]
    return table(["", *(row["name"] for row in rows)], lines)


def ray_faults(rows: Rows) -> str:
    """A row a step."""
    return table(["step", "replicas", "result", "seconds"], map(fault, rows))


def fault(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a step."""
    if "cached_share" in row:
        result = f"{row['errors']} of {row['requests']} requests with an error, cached share {row['cached_share']:.3f}"
    else:
        result = ", ".join(f"{count} {end}" for end, count in sorted(row["streams"].items(), reverse=True))
        if "losing" in row:
            result += f"; {row['losing']} replica lost streams, {row['its others']} of its streams ended well"
        if "old replicas" in row:
            result += f"; {row['old replicas']} old replicas left"
    return row["step"], f"{row['replicas']}", result, f"{row.get('seconds', '')}"


def fleet_validation(rows: Rows) -> str:
    """A row a number of replicas and policy."""
    headings = ["replicas", "policy", "cached share, real / simulated", "first token p50, real / simulated", "agree"]
    return table(headings, map(validated, rows))


def validated(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a comparison."""
    shares = f"{100 * row['real_hit_share']:.1f} / {100 * row['hit_share']:.1f} %"
    times = f"{1e3 * row['real_ttft_p50']:.1f} / {1e3 * row['ttft_p50']:.1f} ms ({row['ttft_ratio']:.2f})"
    return f"{row['replicas']}", row["policy"], shares, times, "yes" if row["agrees"] else "no"


TABLES: dict[str, Callable[[Rows], str]] = {
    "routers": routers,
    "ray_faults": ray_faults,
    "fleet": markdown,
    "fleet_validation": fleet_validation,
}


def page(text: str, results: Iterable[BenchmarkResult]) -> str:
    """The page with the tables of these results."""
    for result in results:
        marks = f"<!-- {result.benchmark} -->\n", f"<!-- end of {result.benchmark} -->"
        if [text.count(mark) for mark in marks] != [1, 1]:
            raise ValueError(f"{PAGE} has no single place for {result.benchmark}")
        before, _, rest = text.partition(marks[0])
        after = rest.partition(marks[1])[2]
        text = f"{before}{marks[0]}{TABLES[result.benchmark](result.rows)}\n{source(result)}\n{marks[1]}{after}"
    return text


def source(result: BenchmarkResult) -> str:
    """Machine, note, commit, date and command."""
    note = f", {result.note}" if result.note else ""
    machine = f"{result.cpu}, {result.machine['cores']} cores{note}"
    return f"{machine}; commit {result.commit}, {result.date}: `{result.command}`."


def found(folder: Path = RESULTS) -> list[BenchmarkResult]:
    """The newest result of each table."""
    return [documents(path)[-1] for name in TABLES if (path := folder / f"{name}.json").exists()]


def write_page() -> None:
    """Write docs/scale.md."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), found()), encoding="utf-8")


if __name__ == "__main__":
    write_page()
