"""One load of a model, from the start of its process to the end, and the requests that wait for a load."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.client import EngineClient
from engine.errors import EngineError
from server.models.entry import ModelEntry, State

UnloadReason = Literal["idle", "memory", "request", "crash"]

# Crashes of a model within CRASH_WINDOW_SECONDS, after which its next load is delayed.
MAX_CRASHES = 3
CRASH_WINDOW_SECONDS = 300.0
# The first delay; each further crash doubles it, up to MAX_BACKOFF_SECONDS.
BACKOFF_SECONDS = 60.0
MAX_BACKOFF_SECONDS = 600.0


class CrashBackoff:
    """Delays the load of a model after its process ended often.

    retry_at  no load before this time
    """

    def __init__(self) -> None:
        self.retry_at = -math.inf
        self._crashes: deque[float] = deque(maxlen=MAX_CRASHES)
        self._delay = 0.0

    def record(self, now: float) -> None:
        """Count an end of the process."""
        if self._crashes and now - self._crashes[-1] > CRASH_WINDOW_SECONDS + self._delay:
            self._delay = 0.0
            self._crashes.clear()
        self._crashes.append(now)
        if self._delay:
            self._delay = min(2 * self._delay, MAX_BACKOFF_SECONDS)
        elif len(self._crashes) == MAX_CRASHES and now - self._crashes[0] <= CRASH_WINDOW_SECONDS:
            self._delay = BACKOFF_SECONDS
        self.retry_at = now + self._delay


class Lease:
    """The use of a loaded model by one request: the model is not unloaded before `release`. A context manager."""

    def __init__(self, instance: Instance, on_release: Callable[[Instance], None]) -> None:
        self.engine = instance.engine
        self._instance: Instance | None = instance
        self._on_release = on_release
        instance.leases += 1

    def release(self) -> None:
        """End the use; further calls have no effect."""
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.leases -= 1
            self._on_release(instance)

    def share(self) -> Lease:
        """Another lease of the same process, while this one is held."""
        assert self._instance is not None, "the lease is held"
        return Lease(self._instance, self._on_release)

    def __enter__(self) -> EngineClient:
        return self.engine

    def __exit__(self, *error: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for a lease.

    keep_alive  seconds; None: the model's last value stays
    """

    lease: asyncio.Future[Lease]
    since: float
    keep_alive: float | None = None


@dataclass(slots=True, eq=False)
class Instance:
    """A process with a loaded model. Times are of the event loop's clock.

    memory_bytes   granted to it
    ready_since    None while it loads
    unload_reason  set if it takes no new lease and ends after the last one
    ended          set when the process has to be stopped
    """

    engine: EngineClient
    memory_bytes: int
    started: float
    last_used: float
    ready_since: float | None = None
    leases: int = 0
    unload_reason: UnloadReason | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def accepts_leases(self) -> bool:
        """Whether a request may use it now."""
        return self.ready_since is not None and self.unload_reason is None and not self.ended.is_set()


@dataclass(slots=True, eq=False)
class ModelRecord:
    """What the loader knows of one model.

    needed_bytes    planned memory; None: not planned yet
    keep_alive      seconds without a request after which the model is unloaded; infinite: never
    requested_at    time of a request to load it that nobody waits for; None: none
    planning        the plan is being computed
    failure         of the last load
    crashes         delays the next load after crashes
    is_removed      the model takes no more requests, and is forgotten when its process has ended
    """

    entry: ModelEntry
    keep_alive: float
    instance: Instance | None = None
    needed_bytes: int | None = None
    requested_at: float | None = None
    planning: bool = False
    failure: EngineError | None = None
    waiters: deque[Waiter] = field(default_factory=deque)
    crashes: CrashBackoff = field(default_factory=CrashBackoff)
    is_removed: bool = False

    @property
    def state(self) -> State:
        """The state of the model."""
        if self.instance is not None:
            if self.instance.unload_reason is not None or self.instance.ended.is_set():
                return "draining"
            return "loading" if self.instance.ready_since is None else "ready"
        if self.waits_for_load:
            return "queued"
        return "unloaded" if self.failure is None else "failed"

    @property
    def waits_for_load(self) -> bool:
        """Whether a load is requested, by a waiter or without one."""
        return self.instance is None and (bool(self.waiters) or self.requested_at is not None)

    @property
    def waiting_since(self) -> float:
        """The time of the oldest request to load it; a pinned model is loaded before the others."""
        if self.entry.pinned:
            return -math.inf
        times = [waiter.since for waiter in self.waiters]
        return min(times if self.requested_at is None else [self.requested_at, *times])

    @property
    def reserved_bytes(self) -> int:
        """Memory that no other model may take: that of its process, and the planned memory of a pinned one."""
        if self.instance is not None:
            return self.instance.memory_bytes
        return (self.needed_bytes or 0) if self.entry.pinned else 0

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and no request uses it."""
        return self.instance is not None and self.instance.accepts_leases and not self.instance.leases

    @property
    def expires_at(self) -> float:
        """The time at which it is unloaded unless a request comes; infinite: not by time."""
        if self.instance is None or self.entry.pinned or not self.is_idle:
            return math.inf
        return self.instance.last_used + self.keep_alive

    def fail_waiters(self, error: Exception) -> None:
        """End the wait of all requests with an error."""
        self.requested_at = None
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.lease.done():
                waiter.lease.set_exception(error)
