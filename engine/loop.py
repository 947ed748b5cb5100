"""The loop of the engine thread: it handles commands and steps the core and the embedding model between them."""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.adapters.adapter import Adapter
from engine.core import Core
from engine.embedder.scheduler import EmbeddingScheduler
from engine.errors import TimeoutTooShort
from engine.grammar.matcher import GrammarMatcher
from engine.types.events import Event
from engine.types.request import EmbeddingJob, Request
from engine.types.snapshot import EngineSnapshot
from engine.types.status import Stats
from engine.watchdog import Watchdog

log = logging.getLogger("cellar.engine")

# While idle, a flush to disk that failed is tried again this often.
_FLUSH_RETRY_SECONDS = 10.0
# Counting cells takes 0.1 ms: too long for each step.
_STATS_INTERVAL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request, with the matcher of its grammar.

    report  called with the refusal, or with None when the request is queued
    """

    request: Request
    matcher: GrammarMatcher | None
    report: Callable[[TimeoutTooShort | None], None] = lambda refusal: None


@dataclass(frozen=True, slots=True)
class Embed:
    """Queue texts for the embedding model."""

    job: EmbeddingJob


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a request or an embedding job."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SetUnread:
    """Record whether the client leaves the output of a request unread."""

    request_id: str
    is_unread: bool


@dataclass(frozen=True, slots=True)
class Inspect:
    """Pass a snapshot to `deliver`: sequences of `owner`, and cached prefixes under `salt`; None: it failed."""

    owner: str
    salt: bytes
    deliver: Callable[[EngineSnapshot | None], None]


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter under its name, in place of another one with that name."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Forget a loaded adapter."""

    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop."""


Command = Submit | Embed | Cancel | SetUnread | Inspect | LoadAdapter | UnloadAdapter | Stop


class EngineLoop:
    """Runs a core and, if there is an embedding model, its scheduler. One thread owns it."""

    def __init__(
        self, core: Core, embedding: EmbeddingScheduler | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core, self._embedding, self._clock = core, embedding, clock
        # Requests and jobs that were submitted so far.
        self._submitted = 0
        self._stats = Stats()

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return self._core.busy or (self._embedding is not None and self._embedding.busy)

    def run(
        self,
        inbox: queue.SimpleQueue[Command],
        deliver: Callable[[list[tuple[str, Event]], int, Stats, bool], None],
        watchdog: Watchdog,
    ) -> None:
        """Handle commands and compute steps until a Stop.

        deliver  called after each step, and when idle work changes the statistics, with the events of the step, the
                 number of requests submitted before it, the statistics and whether everything is flushed to disk
        """
        stats_at, stats, flushed = 0.0, self.stats(), False
        self._core.on_compute = watchdog.name_requests
        while self._handle_commands(inbox, watchdog, wait=flushed and not self.busy):
            watchdog.step_started()
            before, now, busy = (stats, flushed), self._clock(), self.busy
            events = self.step() if busy else []
            flushed = not busy and not self._core.flush_when_idle()
            if not self.busy or now - stats_at > _STATS_INTERVAL_SECONDS:
                stats_at, stats = now, self.stats()
            if busy or before != (stats, flushed):
                deliver(events, self._submitted, stats, flushed)

    def step(self) -> list[tuple[str, Event]]:
        """One step of the core, and a batch of the embedding model if it is due; their events."""
        began, busy = self._clock(), self._core.busy
        events = self._core.step() if busy else []
        if self._embedding is not None:
            events += self._embedding.step(self._clock() - began if busy else math.inf)
        return events

    def stats(self) -> Stats:
        """The current statistics; after an exception those before."""
        try:
            stats = self._core.stats()
            self._stats = stats if self._embedding is None else replace(stats, embedding=self._embedding.counts())
        except Exception:
            log.exception("the statistics failed")
        return self._stats

    def handle(self, command: Command) -> None:
        """Execute a command other than Stop; an exception is logged. To cancel an unknown request is no error."""
        try:
            self._execute(command)
        except Exception:
            log.exception("a command failed")

    def _execute(self, command: Command) -> None:
        match command:
            case Submit(request, matcher, report):
                self._submitted += 1
                report(self._core.submit(request, matcher))
            case Embed(job):
                self._submitted += 1
                assert self._embedding is not None, "the engine accepts jobs for an embedding model only"
                self._embedding.submit(job)
            case Cancel(request_id):
                self._core.cancel(request_id)
                if self._embedding is not None:
                    self._embedding.cancel(request_id)
            case SetUnread(request_id, is_unread):
                self._core.set_unread(request_id, is_unread)
            case Inspect(owner, salt, deliver):
                deliver(self._snapshot(owner, salt))
            case LoadAdapter(adapter):
                self._core.load_adapter(adapter)
            case UnloadAdapter(name):
                self._core.unload_adapter(name)

    def _snapshot(self, owner: str, salt: bytes) -> EngineSnapshot | None:
        try:
            return self._core.snapshot(owner, salt)
        except Exception:
            log.exception("a snapshot failed")
            return None

    def _handle_commands(self, inbox: queue.SimpleQueue[Command], watchdog: Watchdog, *, wait: bool) -> bool:
        """Execute all queued commands; `wait` for the first one for a while. False after a Stop."""
        if wait:
            watchdog.idle()
        while wait or not inbox.empty():
            try:
                command = inbox.get(timeout=_FLUSH_RETRY_SECONDS) if wait else inbox.get_nowait()
            except queue.Empty:
                return True
            wait = False
            watchdog.step_started()
            if isinstance(command, Stop):
                return False
            self.handle(command)
        return True
