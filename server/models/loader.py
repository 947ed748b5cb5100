"""Loads and unloads models within a memory budget. It alone changes their states.

All methods belong to the event loop's thread. Every event (a request, the end of a lease, of a load, of a process, or a
time) leads to `_advance`, which grants leases, unloads expired models and starts loads.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.client import EngineClient
from engine.errors import Draining, EngineDead, EngineError, LoadDelayed, Loading, Overloaded, PlanTooLarge
from engine.types.sizes import format_size
from server.http.errors import load_timeout, model_removed
from server.models.entry import ModelEntry, ModelStatus
from server.models.eviction import TURN_SECONDS, idle_victims, turn_ends_at, turn_victims
from server.models.instance import Instance, Lease, ModelRecord, UnloadReason, Waiter

logger = logging.getLogger("cellar")


class Launcher(Protocol):
    """Starts and stops the processes of models."""

    async def needed_bytes(self, entry: ModelEntry) -> int:
        """The memory that the model takes with its settings. Raises EngineError."""

    def start(self, entry: ModelEntry, memory_bytes: int) -> EngineClient:
        """An engine that began to load the model, within `memory_bytes`. Raises EngineError."""

    async def stop(self, engine: EngineClient) -> None:
        """Return when the process of the engine has ended."""


class LoadObserver(Protocol):
    """Is called for metrics."""

    def loaded(self, model: str, outcome: str, seconds: float) -> None:
        """A load ended with the outcome "ready" or "failed"."""

    def unloaded(self, model: str, reason: UnloadReason) -> None:
        """A loaded model was unloaded, or its process ended."""


@dataclass(frozen=True, slots=True)
class LoaderLimits:
    """Limits of all models together.

    memory_bytes  of all processes
    max_waiting   requests that wait for a load
    load_timeout  seconds that a request waits for a load
    keep_alive    seconds without a request after which a model is unloaded; infinite: never
    """

    memory_bytes: int
    max_waiting: int = 64
    load_timeout: float = 300.0
    keep_alive: float = math.inf


class Loader:
    """The models of a server, loaded on demand."""

    def __init__(
        self, entries: Iterable[ModelEntry], launcher: Launcher, limits: LoaderLimits, observer: LoadObserver
    ) -> None:
        self.limits = limits
        self._launcher, self._observer = launcher, observer
        self._records = {entry.name: ModelRecord(entry, limits.keep_alive) for entry in entries}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.is_draining = False

    def start(self) -> None:
        """Begin to load the models that are loaded at the start. Call it inside the event loop."""
        for record in self._records.values():
            if record.entry.pinned or record.entry.preloads:
                record.requested_at = self._now()
        self._advance()

    def add(self, entry: ModelEntry) -> None:
        """Add a model. The process of a removed one of its name ends before the first load."""
        record = self._records.setdefault(entry.name, ModelRecord(entry, self.limits.keep_alive))
        record.entry, record.is_removed = entry, False

    def remove(self, name: str) -> None:
        """Remove a model: requests that wait for it fail, and a loaded one is unloaded after the running requests."""
        record = self._records[name]
        record.is_removed = True
        record.fail_waiters(model_removed(name))
        record.failure = record.needed_bytes = None
        self._unload(record, "request")
        self._forget_removed(record)
        self._advance()

    @property
    def names(self) -> tuple[str, ...]:
        """The main names of all models, also of removed ones whose process runs."""
        return tuple(self._records)

    def status(self, name: str) -> ModelStatus:
        """The state of a model; "unloaded" without one."""
        record = self._records.get(name)
        if record is None:
            return ModelStatus("unloaded")
        instance = record.instance
        expires_in = record.expires_at - self._now()
        return ModelStatus(
            state=record.state,
            phase=_phase(record),
            reason="" if record.failure is None else str(record.failure),
            memory_bytes=0 if instance is None else instance.memory_bytes,
            leases=0 if instance is None else instance.leases,
            expires_in=None if expires_in == math.inf else max(expires_in, 0.0),
        )

    def engine(self, name: str) -> EngineClient | None:
        """The engine of a loaded model, without a lease; None if the model is not loaded."""
        record = self._records.get(name)
        instance = None if record is None else record.instance
        return instance.engine if instance is not None and instance.ready_since is not None else None

    @property
    def granted_bytes(self) -> int:
        """Memory granted to processes."""
        return sum(record.instance.memory_bytes for record in self._records.values() if record.instance is not None)

    @property
    def waiting(self) -> int:
        """Requests that wait for a load."""
        return sum(len(record.waiters) for record in self._records.values())

    async def acquire(self, name: str, *, keep_alive: float | None = None, waits: bool = True) -> Lease:
        """A lease of the model, which is loaded first if necessary.

        Raises Draining, Overloaded, EngineDead after crashes, the ModelError of a failed load, ApiError after
        `load_timeout` and for a removed model; Loading if the model is not loaded and `waits` is False.

        keep_alive  seconds that the model stays loaded after its last request; None: as before
        """
        record = self._check_accepting(name)
        if not waits or (record.instance is not None and record.instance.accepts_leases):
            return self.acquire_loaded(name, keep_alive)
        if self.waiting >= self.limits.max_waiting:
            raise Overloaded(self.waiting, TURN_SECONDS)
        waiter = Waiter(asyncio.get_running_loop().create_future(), self._now(), keep_alive)
        record.waiters.append(waiter)
        self._advance()
        return await self._wait(record, waiter)

    def acquire_loaded(self, name: str, keep_alive: float | None = None) -> Lease:
        """A lease of the model. Raises the errors of `acquire`; Loading if the model is not loaded."""
        record = self._check_accepting(name)
        if record.instance is None or not record.instance.accepts_leases:
            raise Loading(_phase(record) or record.state)
        return self._lease(record, record.instance, keep_alive)

    def request_load(self, name: str) -> None:
        """Load the model although no request waits for it."""
        record = self._check_accepting(name)
        if record.instance is None and record.requested_at is None:
            record.requested_at = self._now()
            self._advance()

    def unload(self, name: str) -> None:
        """Unload the model after its running requests; requests that come meanwhile load it again."""
        record = self._records[name]
        record.requested_at = None
        if record.instance is None or record.entry.pinned:
            return
        if record.instance.ready_since is None:
            record.keep_alive = 0.0
        else:
            self._unload(record, "request")
        self._advance()

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, and end the running ones of all models within `seconds`."""
        self.is_draining = True
        for record in self._records.values():
            record.fail_waiters(Draining())
        engines = [record.instance.engine for record in self._records.values() if record.instance is not None]
        await asyncio.gather(*(engine.drain(seconds) for engine in engines))

    async def close(self) -> None:
        """Stop all processes."""
        self.is_draining = True
        for record in self._records.values():
            record.fail_waiters(Draining())
            if record.instance is not None:
                record.instance.unload_reason = record.instance.unload_reason or "request"
                record.instance.ended.set()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._timer is not None:
            self._timer.cancel()

    def _check_accepting(self, name: str) -> ModelRecord:
        record = self._records.get(name)
        if self.is_draining:
            raise Draining
        if record is None or record.is_removed:
            raise model_removed(name)
        has_ended = record.instance is None or record.instance.ended.is_set()
        if has_ended and record.crashes.retry_at > self._now():
            raise _backoff_error(record, self._now())
        return record

    async def _wait(self, record: ModelRecord, waiter: Waiter) -> Lease:
        lease = None
        try:
            async with asyncio.timeout(self.limits.load_timeout):
                lease = await waiter.lease
            return lease
        except TimeoutError as error:
            raise load_timeout(record.entry.name, self.limits.load_timeout) from error
        finally:
            if lease is None:
                self._leave(record, waiter)

    def _leave(self, record: ModelRecord, waiter: Waiter) -> None:
        """The request ended before it had its lease. A load that began goes on."""
        if waiter in record.waiters:
            record.waiters.remove(waiter)
            self._advance()
        elif waiter.lease.done() and not waiter.lease.cancelled() and waiter.lease.exception() is None:
            waiter.lease.result().release()

    def _lease(self, record: ModelRecord, instance: Instance, keep_alive: float | None) -> Lease:
        instance.last_used = self._now()
        if keep_alive is not None:
            record.keep_alive = keep_alive
        return Lease(instance, self._release)

    def _release(self, instance: Instance) -> None:
        instance.last_used = self._now()
        if not instance.leases:
            if instance.unload_reason is not None:
                instance.ended.set()
            self._advance()

    def _advance(self) -> None:
        """Do what is possible now, and set the timer for the next time at which something is."""
        now = self._now()
        for record in self._records.values():
            self._grant_leases(record)
            if record.expires_at <= now:
                self._unload(record, "idle")
        if not self.is_draining:
            self._start_loads(now)
        self._set_timer(now)

    def _grant_leases(self, record: ModelRecord) -> None:
        while record.waiters and record.instance is not None and record.instance.accepts_leases:
            waiter = record.waiters.popleft()
            if not waiter.lease.done():
                waiter.lease.set_result(self._lease(record, record.instance, waiter.keep_alive))

    def _start_loads(self, now: float) -> None:
        """Load the queued models in the order of their requests.

        A later one that fits may pass a waiting one, until that has waited for TURN_SECONDS.
        """
        queued = [record for record in self._records.values() if record.waits_for_load]
        for record in sorted(queued, key=lambda record: record.waiting_since):
            if record.needed_bytes is None:
                self._plan(record)
                if record.entry.pinned:
                    break
                continue
            others = [other for other in self._records.values() if other is not record]
            budget = self.limits.memory_bytes - sum(other.reserved_bytes for other in others if other.entry.pinned)
            free = self.limits.memory_bytes - sum(other.reserved_bytes for other in others)
            if record.needed_bytes > budget:
                self._fail(record, _too_large(record.entry.name, record.needed_bytes, budget))
            elif record.needed_bytes <= free:
                self._load(record)
            elif self._make_space(record, record.needed_bytes - free, now):
                break

    def _make_space(self, record: ModelRecord, missing_bytes: int, now: float) -> bool:
        """Unload models for the queued one; whether no other model may be loaded before it."""
        missing_bytes -= sum(other.reserved_bytes for other in self._records.values() if other.state == "draining")
        if missing_bytes <= 0:
            return True
        has_turn = now >= record.waiting_since + TURN_SECONDS
        if has_turn:
            victims = turn_victims(self._records.values(), missing_bytes, now)
        else:
            victims = idle_victims(self._records.values(), missing_bytes)
        for victim in victims:
            self._unload(victim, "memory")
        return has_turn or bool(victims)

    def _unload(self, record: ModelRecord, reason: UnloadReason) -> None:
        """Unload a loaded model after its last lease."""
        instance = record.instance
        if instance is not None and instance.unload_reason is None:
            instance.unload_reason = reason
            if not instance.leases:
                instance.ended.set()

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [record.expires_at for record in self._records.values()]
        queued = [record for record in self._records.values() if record.waits_for_load]
        if queued:
            times += [record.waiting_since + TURN_SECONDS for record in queued]
            times += [turn_ends_at(record) for record in self._records.values() if record.state == "ready"]
        upcoming = min((time for time in times if time > now), default=math.inf)
        if upcoming < math.inf and not self.is_draining:
            self._timer = asyncio.get_running_loop().call_at(upcoming, self._advance)

    def _plan(self, record: ModelRecord) -> None:
        if not record.planning:
            record.planning = True
            self._spawn(self._compute_plan(record))

    async def _compute_plan(self, record: ModelRecord) -> None:
        entry = record.entry
        try:
            needed_bytes = await self._launcher.needed_bytes(entry)
        except EngineError as error:
            self._fail(record, error)
        else:
            # A plan that nobody waits for may be outdated at the next request.
            record.needed_bytes = needed_bytes if record.waits_for_load and record.entry == entry else None
        finally:
            record.planning = False
            self._forget_removed(record)
        self._advance()

    def _load(self, record: ModelRecord) -> None:
        assert record.needed_bytes is not None, "the model is planned"
        now, needed_bytes = self._now(), record.needed_bytes
        try:
            engine = self._launcher.start(record.entry, needed_bytes)
        except EngineError as error:
            self._fail(record, error)
            return
        logger.info("model %s: loading, within %s", record.entry.name, format_size(needed_bytes))
        record.instance = Instance(engine, needed_bytes, started=now, last_used=now)
        record.requested_at, record.failure, record.keep_alive = None, None, self.limits.keep_alive
        if not record.entry.pinned:
            record.needed_bytes = None
        self._spawn(self._run(record, record.instance))

    async def _run(self, record: ModelRecord, instance: Instance) -> None:
        """The life of a process, until its memory is free again."""
        serving, ended = asyncio.create_task(self._serve(record, instance)), asyncio.create_task(instance.ended.wait())
        await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
        failure = serving.result() if serving.done() else None
        for task in (serving, ended):
            task.cancel()
        instance.ended.set()
        if failure is not None:
            self._lose(record, instance, failure)
        await self._launcher.stop(instance.engine)
        record.instance = None
        if instance.ready_since is not None:
            reason = "crash" if failure is not None or instance.unload_reason is None else instance.unload_reason
            self._observer.unloaded(record.entry.name, reason)
            logger.info("model %s: unloaded (%s)", record.entry.name, reason)
        self._forget_removed(record)
        self._advance()

    async def _serve(self, record: ModelRecord, instance: Instance) -> EngineError:
        """Wait until the model is loaded, then until its process ends; the reason of the end."""
        try:
            await instance.engine.wait_ready()
        except EngineError as error:
            self._observer.loaded(record.entry.name, "failed", self._now() - instance.started)
            return error
        instance.ready_since = instance.last_used = self._now()
        self._observer.loaded(record.entry.name, "ready", self._now() - instance.started)
        self._advance()
        await instance.engine.wait_dead()
        dead, _, reason = instance.engine.phase.partition("dead: ")
        return EngineDead(reason if not dead and reason else "it does not move any more")

    def _lose(self, record: ModelRecord, instance: Instance, failure: EngineError) -> None:
        """A load failed, or the process of a loaded model ended."""
        logger.error("model %s: %s", record.entry.name, failure)
        record.crashes.record(self._now())
        if instance.ready_since is None:
            self._fail(record, failure)
            return
        record.failure = failure
        if record.crashes.retry_at > self._now():
            record.fail_waiters(_backoff_error(record, self._now()))

    def _forget_removed(self, record: ModelRecord) -> None:
        if record.is_removed and record.instance is None and not record.planning:
            del self._records[record.entry.name]

    def _fail(self, record: ModelRecord, failure: EngineError) -> None:
        record.failure = failure
        record.fail_waiters(failure)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the loader has an unexpected exception", exc_info=error)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _phase(record: ModelRecord) -> str:
    """The phase of a load, or what the load waits for."""
    if record.instance is not None and record.instance.ready_since is None:
        return record.instance.engine.phase
    if record.state == "queued":
        return "memory plan" if record.needed_bytes is None else "waiting for memory"
    return ""


def _backoff_error(record: ModelRecord, now: float) -> LoadDelayed:
    return LoadDelayed(
        f"the model ended several times, at last because {record.failure}", record.crashes.retry_at - now
    )


def _too_large(name: str, needed_bytes: int, budget: int) -> PlanTooLarge:
    advice = f"give the model {name} a smaller --context or --slots, or the server more --memory"
    return PlanTooLarge(needed_bytes, max(budget, 0), advice)
