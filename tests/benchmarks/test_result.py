"""Results of benchmarks in files: rows are added and replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.result import BenchmarkResult, add_rows, documents, load


def result(date: str, *rows: dict[str, Any], cpu: str = "any") -> BenchmarkResult:
    """A result of GGUF files."""
    # JSON has no tuples.
    machine = {"cpu": cpu, "load_average": (1.0, 2.0)}
    return BenchmarkResult(
        benchmark="gguf", command="python", machine=machine, commit="1234567", date=date, rows=list(rows)
    )


def row(cell: str, value: float) -> dict[str, Any]:
    """A figure of one cell."""
    about = {"model": "tiny", "weights": "Q4_0", "peer": "llama.cpp"}
    return about | {"cell": cell, "figure": "decode", "cellar": value}


def contents(results: list[BenchmarkResult]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Date, processor and rows."""
    return [(each.date, each.cpu, each.rows) for each in results]


def test_rows_of_one_run_are_one_document(tmp_path: Path) -> None:
    path = tmp_path / "gguf.json"
    for found in (row("alone", 1.0), row("streams", 2.0)):
        add_rows(path, result("2026-01-01", found))

    assert [("2026-01-01", "any", [row("alone", 1.0), row("streams", 2.0)])] == contents(documents(path))
    assert documents(path) == load(tmp_path)


def test_a_later_run_replaces_equal_rows_only(tmp_path: Path) -> None:
    """Other rows keep their command, commit and date; a document without rows disappears."""
    path = tmp_path / "gguf.json"
    result("2026-01-01", row("alone", 1.0), row("streams", 2.0)).write(path)
    add_rows(path, result("2026-01-02", row("alone", 4.0), cpu="other"))
    add_rows(path, result("2026-01-03", row("alone", 3.0)))

    early, other = ("2026-01-01", "any", [row("streams", 2.0)]), ("2026-01-02", "other", [row("alone", 4.0)])
    assert [early, other, ("2026-01-03", "any", [row("alone", 3.0)])] == contents(documents(path))

    add_rows(path, result("2026-01-04", row("streams", 5.0)))
    assert ["2026-01-02", "2026-01-03", "2026-01-04"] == [found.date for found in documents(path)]
