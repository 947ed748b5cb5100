"""The tables of docs/scale.md are generated from benchmarks/results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.fleet.page import PAGE, fault, found, page
from benchmarks.result import BenchmarkResult


def result(benchmark: str, **row: Any) -> BenchmarkResult:
    """A result of one row of an invented machine."""
    machine = {"cpu": "CPU", "cores": 2}
    return BenchmarkResult(
        benchmark=benchmark,
        command="python",
        machine=machine,
        commit="abc",
        date="2026-01-01",
        rows=[row],
        note="quiet",
    )


def test_the_committed_page_is_up_to_date() -> None:
    """`python -m benchmarks.fleet.page` writes it."""
    assert page(PAGE.read_text(), found()) == PAGE.read_text()


def test_a_table_stands_in_its_place_with_its_source() -> None:
    """What was between the marks is gone; text around them stays."""
    given = result(
        "fleet_validation",
        replicas=2,
        policy="random",
        real_hit_share=0.71,
        hit_share=0.72,
        real_ttft_p50=0.0101,
        ttft_p50=0.011,
        ttft_ratio=1.09,
        agrees=True,
    )
    before = "before\n<!-- fleet_validation -->\nold\n<!-- end of fleet_validation -->\nafter\n"
    text = page(before, [given])

    assert text.startswith("before\n<!-- fleet_validation -->\n| replicas | policy")
    assert "| 2 | random | 71.0 / 72.0 % | 10.1 / 11.0 ms (1.09) | yes |\n" in text
    assert "CPU, 2 cores, quiet; commit abc, 2026-01-01: `python`.\n<!-- end of fleet_validation -->\nafter\n" in text
    assert "old" not in text
    assert text == page(text, [given])


def test_a_page_without_the_place_of_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no single place for routers"):
        page("no place", [replace(result("routers"), rows=[])])


def test_steps_name_the_ends_of_their_streams() -> None:
    streams = {"ok": 16, "error event": 8}
    kill = {"step": "kill", "replicas": 3, "streams": streams, "losing": 1, "its others": 0}

    assert ("kill", "3", "16 ok, 8 error event; 1 replica lost streams, 0 of its streams ended well", "") == fault(kill)
