"""The watchdog of the engine thread: which times count as stuck."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.schedule.step import Stepper
from engine.types.events import Failed
from engine.types.status import Stats
from engine.watchdog import Watchdog, WatchedLock
from tests.engine.kit.play import ask

LIMIT, STRIDE = 120.0, 10.0
NAMED = replace(ask("owner/r", (5, 4, 3), 2), group="req_1")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def ready_engine(model: Path, clock: Clock) -> Engine:
    engine = Engine(EngineConfig(model=str(model), context=64, slots=1), clock=clock)
    engine.start()
    await engine.wait_ready()
    return engine


def observed(watchdog: Watchdog, clock: Clock, seconds: float, pulse: float = 5.0) -> bool:
    """Whether the thread is stuck after `seconds`, observed at regular intervals."""
    stuck = watchdog.is_stuck()
    for _ in range(int(seconds / pulse)):
        clock.now += pulse
        stuck = watchdog.is_stuck()
    return stuck


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog(clock: Clock) -> Watchdog:
    return Watchdog(clock, LIMIT, STRIDE)


def test_a_step_is_stuck_after_the_limit(watchdog: Watchdog, clock: Clock) -> None:
    """And not before."""
    watchdog.step_started()

    assert not observed(watchdog, clock, LIMIT - 5)
    assert observed(watchdog, clock, 5)


def test_a_new_step_resets_the_time(watchdog: Watchdog, clock: Clock) -> None:
    for _ in range(5):
        watchdog.step_started()

        assert not observed(watchdog, clock, LIMIT - 10)


@pytest.mark.parametrize("waits", [False, True])
def test_idle_time_does_not_count(watchdog: Watchdog, clock: Clock, waits: bool) -> None:
    """Neither before the first step nor while the thread waits for requests."""
    if waits:
        watchdog.step_started()
        observed(watchdog, clock, LIMIT - 10)
        watchdog.idle()

    assert not observed(watchdog, clock, 10 * LIMIT)
    watchdog.step_started()
    assert not observed(watchdog, clock, LIMIT - 5)
    assert observed(watchdog, clock, 5)


def test_a_suspended_process_is_not_stuck(watchdog: Watchdog, clock: Clock) -> None:
    """A jump of the clock by hours adds one maximum gap."""
    watchdog.step_started()
    observed(watchdog, clock, 60)
    clock.now += 8 * 3600

    assert not watchdog.is_stuck()
    assert not observed(watchdog, clock, 45)
    assert observed(watchdog, clock, 5)


def test_a_clock_that_goes_back_is_ignored(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.step_started()
    observed(watchdog, clock, 60)
    clock.now -= 3600

    assert not observed(watchdog, clock, 55)
    assert observed(watchdog, clock, 5)


def test_the_description_of_a_stuck_step_names_its_requests(watchdog: Watchdog) -> None:
    """Some of many; the next step has others, or none."""
    watchdog.step_started()
    watchdog.name_requests(("a", "b"))
    named = watchdog.describe()
    watchdog.name_requests(tuple("abcdefghijk"))
    many = watchdog.describe()
    watchdog.step_started()

    reason = "a step has taken longer than 120 s"
    assert named == f"{reason}, of the requests a, b"
    assert many == f"{reason}, of the requests a, b, c, d, e, f, g, h and 3 more"
    assert watchdog.describe() == reason


def test_a_step_that_does_not_end_is_reported_with_its_requests(
    folder: Callable[[str], Path], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it ends, if it does."""
    started, go_on, run = threading.Event(), threading.Event(), Stepper.run

    def stuck(*arguments: Any, **options: Any) -> Any:
        started.set()
        go_on.wait(60)
        return run(*arguments, **options)

    async def scene() -> None:
        engine = await ready_engine(folder("llama"), clock)
        monkeypatch.setattr(Stepper, "run", stuck)
        async with engine.open(NAMED) as stream:
            await asyncio.to_thread(started.wait, 60)
            alive = [engine.alive]
            for _ in range(13):
                clock.now += STRIDE
                alive.append(engine.alive)
            assert alive == [True] * 12 + [False] * 2
            assert engine.phase == "dead: a step has taken longer than 120 s, of the requests req_1"
            go_on.set()
            async for _ in stream:
                pass
        assert (engine.alive, engine.phase) == (True, "ready")
        await asyncio.to_thread(engine.close)

    asyncio.run(scene())


def test_streams_end_when_a_step_is_stuck(
    folder: Callable[[str], Path], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the step, a native call perhaps, never returns."""
    started, go_on = threading.Event(), threading.Event()

    def stuck(*arguments: Any, **options: Any) -> Any:
        started.set()
        go_on.wait(60)
        raise AssertionError

    async def scene() -> None:
        engine = await ready_engine(folder("llama"), clock)
        monkeypatch.setattr(Stepper, "run", stuck)
        async with engine.open(NAMED) as stream:
            await asyncio.to_thread(started.wait, 60)
            while engine.alive:
                clock.now += STRIDE
            await engine.wait_dead()
            events = [event async for event in stream]
            assert events == [Failed("the engine stopped")]
            assert engine.phase == "dead: a step has taken longer than 120 s, of the requests req_1"
            assert not engine.ready
        go_on.set()
        await asyncio.to_thread(engine.close)

    asyncio.run(scene())


def test_a_slow_load_is_alive(folder: Callable[[str], Path], clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of any duration, also before the thread has its first request."""
    go_on, stats = threading.Event(), EngineLoop.stats

    def late(loop: EngineLoop) -> Stats:
        go_on.wait(20)
        return stats(loop)

    def slow(phase: str) -> None:
        clock.now += 1000.0

    async def scene() -> None:
        monkeypatch.setattr(EngineLoop, "stats", late)
        engine = Engine(EngineConfig(model=str(folder("llama")), context=64, slots=1), on_phase=slow, clock=clock)
        engine.start()
        await engine.wait_ready()
        alive = engine.alive
        go_on.set()
        await asyncio.to_thread(engine.close)

        assert alive

    asyncio.run(scene())


def test_an_idle_engine_does_not_wake_the_loop(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle thread retries to flush; the event loop is woken only after a flush."""
    monkeypatch.setattr("engine.loop._FLUSH_RETRY_SECONDS", 0.001)
    delivered: list[object] = []

    async def scene() -> int:
        engine = Engine(EngineConfig(model=str(folder("llama")), context=64, slots=1))
        engine.start()
        await engine.wait_ready()
        await engine._flushed.wait()
        engine._deliver = lambda *arguments: delivered.append(arguments)  # type: ignore[method-assign]
        # The thread counts its retries as steps.
        steps = engine._watchdog._steps
        while engine._watchdog._steps < steps + 20:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.close)
        return len(delivered)

    assert 0 == asyncio.run(scene())


def test_a_worker_thread_that_does_not_leave_the_tokenizer_is_stuck(clock: Clock) -> None:
    """After minutes; threads that wait for it do not count, and the next one starts anew."""
    lock = WatchedLock(clock)
    with lock:
        assert not any(advanced(lock, clock) for _ in range(50))
        assert any(advanced(lock, clock) for _ in range(20))
    assert not advanced(lock, clock)
    with lock:
        assert not any(advanced(lock, clock) for _ in range(50))


def advanced(lock: WatchedLock, clock: Clock) -> bool:
    clock.now += 5.0
    return lock.is_stuck()


def test_an_engine_with_a_stuck_tokenizer_is_not_alive(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        engine = Engine(EngineConfig(model=str(folder("llama")), context=64, slots=1))
        engine.start()
        await engine.wait_ready()
        alive = engine.alive
        monkeypatch.setattr(engine.tokenizer, "is_stuck", lambda: True)

        assert (alive, engine.alive) == (True, False)
        await asyncio.to_thread(engine.close)

    asyncio.run(scene())
