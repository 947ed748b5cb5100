"""Tells a stuck step from a slow start, an idle thread and a process that was suspended.

The engine thread reports, the event loop observes. Both write fields of their own, so there is no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Watchdog:
    """Measures how long the engine thread has been in one step.

    The time is zero until the first `working` and while the thread waits for requests.

    limit   seconds in one step that count as stuck
    stride  seconds that one observation adds at most: between observations farther apart the process did not run
            (SIGSTOP, a paused container, a suspended machine), or the event loop did not
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, limit: float = 120.0, stride: float = 10.0) -> None:
        self._clock, self._limit, self._stride = clock, limit, stride
        # Of the engine thread.
        self._steps, self._idle = 0, True
        # Of the observer.
        self._observed, self._step, self._seconds = clock(), 0, 0.0

    def working(self) -> None:
        """The engine thread begins a step."""
        self._steps += 1
        self._idle = False

    def waiting(self) -> None:
        """The engine thread waits for requests."""
        self._idle = True

    def stuck(self) -> bool:
        """Observe the thread; whether it has been in one step for longer than the limit."""
        now, step = self._clock(), self._steps
        gap = min(max(now - self._observed, 0.0), self._stride)
        moved = self._idle or step != self._step
        self._observed, self._step = now, step
        self._seconds = 0.0 if moved else self._seconds + gap
        return self._seconds >= self._limit
