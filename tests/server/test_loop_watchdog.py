"""The watchdog of the event loop names what holds it for long, and only processor time counts."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import httpx
import pytest

from server.metrics import loop_watchdog
from server.metrics.loop_watchdog import LoopWatchdog
from tests.server.fakes import FakeEngine, serve_in_thread

LIMIT_SECONDS = 120.0


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the watchdog has looked at the loop's stack."""
    event, plain = threading.Event(), loop_watchdog.describe_stack

    def describe(frame: Any) -> list[str]:
        event.set()
        return plain(frame)

    monkeypatch.setattr(loop_watchdog, "describe_stack", describe)
    return event


def hold(described: threading.Event) -> None:
    """Compute until the watchdog has seen it."""
    until = time.monotonic() + LIMIT_SECONDS
    while not described.is_set() and time.monotonic() < until:
        pass


def sample(watchdog: LoopWatchdog, name: str) -> float:
    return watchdog.registry.get_sample_value(name) or 0.0


async def reach(watchdog: LoopWatchdog, name: str, value: float) -> None:
    """Wait for a metric."""
    until = time.monotonic() + LIMIT_SECONDS
    while sample(watchdog, name) < value and time.monotonic() < until:
        await asyncio.sleep(0.01)


def test_a_callback_that_computes_is_named(
    described: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watchdog, "_PACKAGES", (__file__,))

    async def main() -> LoopWatchdog:
        watchdog = LoopWatchdog()
        asyncio.current_task().set_name("request req_7 (POST)")  # type: ignore[union-attr]
        await reach(watchdog, "cellar_event_loop_lag_seconds_count", 1)
        hold(described)
        await reach(watchdog, "cellar_event_loop_stalls_total", 1)
        watchdog.stop()
        return watchdog

    with caplog.at_level(logging.WARNING, "cellar"):
        watchdog = asyncio.run(main())

    assert sample(watchdog, "cellar_event_loop_stalls_total") == 1
    assert sample(watchdog, "cellar_event_loop_lag_seconds_sum") > loop_watchdog.MAX_HELD_SECONDS
    [line] = [record.getMessage() for record in caplog.records]
    assert "held for" in line
    assert "'request req_7 (POST)' in " in line
    assert "hold (tests/server/test_loop_watchdog.py:" in line


def test_a_callback_that_waits_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """Neither on a busy machine, where the thread does not run, nor here, where it sleeps."""

    async def main() -> LoopWatchdog:
        watchdog = LoopWatchdog()
        await reach(watchdog, "cellar_event_loop_lag_seconds_count", 1)
        time.sleep(0.4)
        before = sample(watchdog, "cellar_event_loop_lag_seconds_count")
        await reach(watchdog, "cellar_event_loop_lag_seconds_count", before + 2)
        watchdog.stop()
        return watchdog

    watchdog = asyncio.run(main())

    assert sample(watchdog, "cellar_event_loop_stalls_total") == 0
    assert [] == [record for record in caplog.records if "held for" in record.getMessage()]


def test_warnings_are_rare(caplog: pytest.LogCaptureFixture) -> None:
    """The next one says how many were left out."""

    async def main() -> None:
        watchdog = LoopWatchdog()
        watchdog.stop()
        for _ in range(3):
            watchdog._log("'request' in work", 0.2)
        watchdog._logged_at -= loop_watchdog.LOG_INTERVAL_SECONDS
        watchdog._log("'request' in work", 0.2)

    asyncio.run(main())

    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "the event loop was held for 200 ms of processor time by 'request' in work",
        "the event loop was held for 200 ms of processor time by 'request' in work"
        ", and 2 times since the last such line",
    ]


def test_a_watchdog_ends_with_its_loop() -> None:
    """Also if nobody stops it."""

    async def main() -> threading.Thread:
        return LoopWatchdog()._thread

    thread = asyncio.run(main())
    thread.join(LIMIT_SECONDS)

    assert not thread.is_alive()


def test_a_server_has_the_metrics_of_its_loop() -> None:
    with serve_in_thread(FakeEngine()) as port:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text

    assert "cellar_event_loop_lag_seconds_bucket" in text
    assert "cellar_event_loop_stalls_total 0.0" in text


def test_the_tasks_of_the_loop_are_counted() -> None:
    """At the time of the scrape."""

    async def main() -> list[float]:
        watchdog = LoopWatchdog()
        counts = []
        for number in range(3):
            waiting = [asyncio.create_task(asyncio.sleep(60)) for _ in range(number)]
            counts.append(sample(watchdog, "cellar_event_loop_tasks"))
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        watchdog.stop()
        return counts

    first, *others = asyncio.run(main())

    assert others == [first + 1, first + 2]


def test_the_task_of_a_request_has_its_id() -> None:
    names = []

    class Engine(FakeEngine):
        def stats(self) -> Any:
            if (task := asyncio.current_task()) is not None:
                names.append(task.get_name())
            return super().stats()

    with serve_in_thread(Engine()) as port:
        httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"x-request-id": "mine"})

    assert "request mine (GET)" in names
