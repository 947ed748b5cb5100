"""Detects threads that make no progress: the engine thread in a step, worker threads in a tokenizer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

# Of one call of a tokenizer: the longest texts take seconds, tokenizers in Python a minute.
_MAX_HELD_SECONDS = 300.0
# Requests of a stuck step that its description names.
_MAX_NAMED = 8


class Watchdog:
    """Measures how long a thread has been in one step: zero before the first step and while it is idle.

    The thread reports steps, the event loop observes. Each writes its own fields, so there is no lock.

    limit_seconds    in one step that count as stuck
    max_gap_seconds  maximum that one observation adds: between observations farther apart the process was suspended
                     (SIGSTOP, a paused container, a sleeping machine), or the event loop was blocked
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        limit_seconds: float = 120.0,
        max_gap_seconds: float = 10.0,
    ) -> None:
        self._clock, self._limit_seconds, self._max_gap_seconds = clock, limit_seconds, max_gap_seconds
        # Written by the thread.
        self._steps, self._idle = 0, True
        self._requests: tuple[str, ...] = ()
        # Written by the observer.
        self._observed_at, self._observed_step, self._step_seconds = clock(), 0, 0.0

    def step_started(self) -> None:
        """The thread starts a step."""
        self._steps += 1
        self._idle = False
        self._requests = ()

    def name_requests(self, requests: tuple[str, ...]) -> None:
        """The step starts to compute these requests."""
        self._requests = requests

    def idle(self) -> None:
        """The thread waits for work."""
        self._idle = True

    def is_stuck(self) -> bool:
        """Observe the thread; whether it has been in one step for longer than the limit."""
        now, step = self._clock(), self._steps
        gap = min(max(now - self._observed_at, 0.0), self._max_gap_seconds)
        progressed = self._idle or step != self._observed_step
        self._observed_at, self._observed_step = now, step
        self._step_seconds = 0.0 if progressed else self._step_seconds + gap
        return self._step_seconds >= self._limit_seconds

    def describe(self) -> str:
        """The reason of a stuck thread, with the requests that its step computes."""
        reason, requests = f"a step has taken longer than {self._limit_seconds:g} s", self._requests
        if not requests:
            return reason
        others = len(requests) - _MAX_NAMED
        more = f" and {others} more" if others > 0 else ""
        return f"{reason}, of the requests {', '.join(requests[:_MAX_NAMED])}{more}"


class WatchedLock:
    """A lock for calls that may never return, and an observation of its holder. Used in `with`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._watchdog = threading.Lock(), Watchdog(clock, _MAX_HELD_SECONDS)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._watchdog.step_started()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.idle()
        self._lock.release()

    def is_stuck(self) -> bool:
        """Observe the lock; whether one holder has kept it for longer than the limit."""
        return self._watchdog.is_stuck()
