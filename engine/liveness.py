"""Tells a stuck step from a slow start, an idle thread and a process that was suspended.

The engine thread reports, the event loop observes. Both write fields of their own, so there is no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Watchdog:
    """Measures how long the engine thread has been in one step.

    The time is zero until the first `step_started` and while the thread waits for requests.

    limit   seconds in one step that count as stuck
    stride  seconds that one observation adds at most: between observations farther apart the process did not run
            (SIGSTOP, a paused container, a suspended machine), or the event loop did not
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, limit_seconds: float = 120.0, max_gap_seconds: float = 10.0
    ) -> None:
        self._clock, self._limit_seconds, self._max_gap_seconds = clock, limit_seconds, max_gap_seconds
        # Of the engine thread.
        self._steps, self._idle = 0, True
        # Of the observer.
        self._observed_at, self._observed_step, self._step_seconds = clock(), 0, 0.0

    def step_started(self) -> None:
        """The engine thread begins a step."""
        self._steps += 1
        self._idle = False

    def idle(self) -> None:
        """The engine thread waits for requests."""
        self._idle = True

    def is_stuck(self) -> bool:
        """Observe the thread; whether it has been in one step for longer than the limit."""
        now, step = self._clock(), self._steps
        gap = min(max(now - self._observed_at, 0.0), self._max_gap_seconds)
        moved = self._idle or step != self._observed_step
        self._observed_at, self._observed_step = now, step
        self._step_seconds = 0.0 if moved else self._step_seconds + gap
        return self._step_seconds >= self._limit_seconds
