"""The load scenarios at a small size, against a server without a model."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from typing import Any

import psutil
import pytest

from benchmarks.serving import soak
from benchmarks.serving.bodies import SEEDS
from benchmarks.serving.load import ABORTED, GOALS, PHASES, abort, missed_goals
from benchmarks.serving.raw_client import Loaded, Streamed, health_probe, percentile, read_stream
from benchmarks.serving.soak import NOT_SOAKED, soaking_request
from server.app import create_app
from tests.server.fakes import FakeEngine, ask, serve_in_thread, settings


def run(scenario: Any, **options: Any) -> dict[str, Any]:
    """The row of a scenario."""
    with serve_in_thread(FakeEngine()) as port:
        row: dict[str, Any] = asyncio.run(scenario(Loaded(port, psutil.Process()), argparse.Namespace(**options)))
    return row


def test_a_stream_is_read_to_its_end() -> None:
    fields = {"prompt": "a", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    with serve_in_thread(FakeEngine()) as port:
        whole = asyncio.run(read_stream(port, "/v1/completions", fields, Streamed()))
        refused = asyncio.run(read_stream(port, "/v1/completions", {**fields, "max_tokens": "x"}, Streamed()))

    assert (whole.status, whole.is_complete, whole.has_error) == (200, True, False)
    assert whole.tokens > 0
    assert whole.times == sorted(whole.times) != []
    assert (refused.status, refused.is_complete) == (400, False)


def test_every_health_request_counts() -> None:
    with serve_in_thread(FakeEngine()) as port, health_probe(port) as probe:
        pass

    assert probe.summary()["health_failures"] == 0


def test_a_soak_counts_statuses_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind is sent by all clients before the first point."""
    monkeypatch.setattr(soak, "SOAK_CLIENTS", 2)
    monkeypatch.setattr(soak, "IDLE_SECONDS", 0)
    row = run(soak.soak, count=50)

    assert row["requests"] == sum(row["statuses"].values()) == 50 + 2 * len(set(SEEDS) - NOT_SOAKED)
    assert len(row["pss_mb"]) == len(row["main_mb"]) == len(row["processes"]) == 5
    growth = row["growth_mb"] + row["of_further_processes_mb"]
    assert growth == pytest.approx(row["pss_mb"][-1] - row["pss_mb"][0], abs=0.2)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({1: 400.0, 2: 40.0}, 0.0),
        ({1: 400.0, 3: 40.0}, 0.0),
        ({1: 400.0, 2: 40.0, 3: 43.0}, 43.0),
        ({1: 400.0, 3: 40.0, 4: 43.0}, 43.0),
        ({1: 400.0}, 0.0),
    ],
)
def test_a_replaced_process_is_no_further_one(last: dict[int, float], expected: float) -> None:
    """Only a larger number of processes is."""
    assert soak.of_further_processes({1: 390.0, 2: 41.0}, last) == expected


@pytest.mark.parametrize("path", sorted(set(SEEDS) - NOT_SOAKED))
def test_the_requests_of_a_soak_are_known(path: str) -> None:
    """They reach their route; some are invalid."""
    content = soaking_request(random.Random(1), path, "fake").partition(b"\r\n\r\n")[2]
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]

    assert ask(app, "POST", path, body=content).status in (200, 400, 501)


@pytest.mark.parametrize(("path", "fields"), ABORTED)
def test_aborted_requests_are_valid(path: str, fields: dict[str, Any]) -> None:
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]

    assert ask(app, "POST", path, body=json.dumps(fields).encode()).status == 200


def test_a_server_survives_aborts_of_every_phase() -> None:
    fields = {"prompt": "a", "max_tokens": 5, "stream": True}
    with serve_in_thread(FakeEngine()) as port:

        async def work() -> Streamed:
            for phase in PHASES:
                await abort(port, random.Random(phase), phase)
            return await read_stream(port, "/v1/completions", fields, Streamed())

        streamed = asyncio.run(work())

    assert streamed.is_complete


def test_goals_name_what_is_missed() -> None:
    row = dict.fromkeys(GOALS["overload"], 0.0)

    assert missed_goals("overload", {**row, "goodput_ratio": 0.95}) == []
    assert missed_goals("overload", {**row, "goodput_ratio": 0.8, "refusal_p99_ms": 60}) == [
        "goodput_ratio",
        "refusal_p99_ms",
    ]
    assert missed_goals("overload", {**row, "goodput_ratio": 0.9, "refusal_p99_ms": math.nan}) == ["refusal_p99_ms"]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_a_percentile_is_one_of_the_values(share: float, value: int) -> None:
    assert percentile(range(1, 101), share) == value
