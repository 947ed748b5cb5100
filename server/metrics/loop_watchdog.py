"""Watches the event loop: its lag, and callbacks that hold it for too long.

Processor time of the loop's thread counts for a warning, not elapsed time: on a busy machine every callback takes long.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

logger = logging.getLogger("cellar")

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# Processor time of the loop's thread between a probe and its answer.
MAX_HELD_SECONDS = 0.1
PROBE_INTERVAL_SECONDS = 0.05
# Between two looks at a loop that has not answered yet.
CHECK_SECONDS = 0.01
LOG_INTERVAL_SECONDS = 10.0
MAX_FRAMES = 4
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = tuple(str(_ROOT / name) + "/" for name in ("server", "engine", "kvcache"))


class LoopWatchdog:
    """A thread that sends probes to the running event loop until `stop`. Create it on the loop's thread.

    registry          metrics of the loop
    max_held_seconds  processor time without an answer to a probe, above which a warning names the request and the code
    """

    def __init__(self, max_held_seconds: float = MAX_HELD_SECONDS) -> None:
        self.registry = CollectorRegistry()
        self._lag = Histogram(
            "cellar_event_loop_lag_seconds",
            "From the wake-up of the event loop to its callback, 20 times a second.",
            buckets=LAG_BUCKETS,
            registry=self.registry,
        )
        self._stalls = Counter(
            "cellar_event_loop_stalls",
            f"Times that callbacks held the event loop for more than {1000 * MAX_HELD_SECONDS:g} ms of processor time.",
            registry=self.registry,
        )
        tasks = Gauge("cellar_event_loop_tasks", "Tasks of the event loop.", registry=self.registry)
        self._max_held_seconds = max_held_seconds
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        tasks.set_function(lambda: len(asyncio.all_tasks(self._loop)))
        self._over, self._answered = threading.Event(), threading.Event()
        self._logged_at, self._unlogged = -LOG_INTERVAL_SECONDS, 0
        # The clock of another thread: not on macOS, where lag alone is measured.
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        self._clock = None if clock_of is None else clock_of(self._loop_thread)
        self._thread = threading.Thread(target=self._run, name="loop-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(PROBE_INTERVAL_SECONDS):
            try:
                self._probe()
            except RuntimeError:
                # The loop is closed.
                return

    def _probe(self) -> None:
        self._answered.clear()
        sent, used, culprit = time.monotonic(), self._loop_seconds(), ""
        self._loop.call_soon_threadsafe(self._answered.set)
        while not self._over.is_set() and not self._answered.wait(CHECK_SECONDS):
            if not culprit and self._loop_seconds() - used > self._max_held_seconds:
                culprit = self._describe()
        if self._over.is_set():
            return
        self._lag.observe(time.monotonic() - sent)
        if culprit:
            self._stalls.inc()
            self._log(culprit, self._loop_seconds() - used)

    def _loop_seconds(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def _describe(self) -> str:
        """What the loop's thread computes now: the request, and the innermost functions of this project."""
        task = asyncio.current_task(self._loop)
        name = "a callback without a task" if task is None else task.get_name()
        frame = sys._current_frames().get(self._loop_thread)
        return f"{name[:200]!r} in {' < '.join(describe_stack(frame)) or 'unknown code'}"

    def _log(self, culprit: str, seconds: float) -> None:
        """Write a warning, or count it for the next one."""
        now = time.monotonic()
        if now - self._logged_at < LOG_INTERVAL_SECONDS:
            self._unlogged += 1
            return
        earlier = f", and {self._unlogged} times since the last such line" if self._unlogged else ""
        self._logged_at, self._unlogged = now, 0
        logger.warning(
            "the event loop was held for %.0f ms of processor time by %s%s", 1000 * seconds, culprit, earlier
        )


def describe_stack(frame: FrameType | None) -> list[str]:
    """The innermost functions of this project, the innermost first, after the library function that they call."""
    frames = list(_callers(frame))
    inside = [caller for caller in frames if caller.f_code.co_filename.startswith(_PACKAGES)]
    if frames and frames[0] not in inside:
        inside = [frames[0], *inside]
    return [_describe_frame(caller) for caller in islice(inside, MAX_FRAMES)]


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe_frame(frame: FrameType) -> str:
    code = frame.f_code
    file = code.co_filename.removeprefix(f"{_ROOT}/")
    return f"{code.co_name} ({'/'.join(file.split('/')[-3:])}:{frame.f_lineno})"
