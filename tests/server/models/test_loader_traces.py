"""Invariants of the loader under random requests, crashes, disconnects and removals, in virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from typing import Any

from engine.errors import EngineError
from server.http.errors import ApiError
from server.models.entry import ModelEntry
from server.models.eviction import TURN_SECONDS
from server.models.instance import UnloadReason
from server.models.loader import Loader, LoaderLimits
from tests.server.fakes import settings
from tests.server.models.fake_launcher import LOAD_SECONDS, STOP_SECONDS, FakeLauncher, FakeProcess
from tests.virtual_time import run_in_virtual_time

TRACES = 1000
REQUESTS = 25
REMOVALS = 6
LONGEST_STREAM_SECONDS = 40.0
SETTINGS = settings()


class KeepAliveLauncher(FakeLauncher):
    """Checks also that idle models are unloaded when their keep_alive ends, and that removed ones are not loaded.

    removed  names of models without files now
    """

    def __init__(self, needed: dict[str, int], budget: int, keep_alive: float) -> None:
        super().__init__(needed, budget, keep_alive=keep_alive)
        self.removed = set[str]()

    def start(self, entry: ModelEntry, memory_bytes: int) -> Any:
        self.check(entry.name not in self.removed, f"{entry.name} is removed and loaded")
        return super().start(entry, memory_bytes)

    def unloaded(self, model: str, reason: UnloadReason) -> None:
        super().unloaded(model, reason)
        process = self.stopped[model]
        idle = process.stopped_at - process.last_use
        if reason == "idle":
            self.check(abs(idle - process.keep_alive) < 0.1, f"{model} is unloaded after {idle} s")
        elif reason == "memory":
            self.check(idle <= process.keep_alive + 0.1, f"{model} was idle for {idle} s")


class Trace:
    """Random requests to a few models."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        names = "abcde"[: self.random.randint(2, 5)]
        needed = {name: self.random.randint(1, 10) for name in names}
        self.pinned = {name for name in names if self.random.random() < 0.15}
        reserved = sum(needed[name] for name in self.pinned)
        others = [needed[name] for name in names if name not in self.pinned]
        self.budget = reserved + max(others, default=0) + self.random.choice([0, 0, 3, 8])
        default = self.random.choice([math.inf, 5.0])
        self.launcher = KeepAliveLauncher(needed, self.budget, keep_alive=default)
        self.crashes = self.random.random() < 0.3
        self.removes = self.random.random() < 0.3
        entries = [ModelEntry(name, SETTINGS, pinned=name in self.pinned) for name in names]
        self.entries = {entry.name: entry for entry in entries}
        limits = LoaderLimits(self.budget, max_waiting=1000, load_timeout=10_000, keep_alive=default)
        self.loader = Loader(entries, self.launcher, limits, self.launcher)
        self.names, self.outcomes, self.longest_wait = names, Counter[str](), 0.0

    async def run(self) -> None:
        """All requests, then the end of the server."""
        self.loader.start()
        requests = [asyncio.create_task(self._request()) for _ in range(REQUESTS)]
        if self.removes:
            requests += [asyncio.create_task(self._remove()) for _ in range(REMOVALS)]
        await asyncio.wait(requests)
        for request in requests:
            assert request.cancelled() or request.exception() is None, request.exception()
        assert self.loader.waiting == 0
        assert self.launcher.granted == self.loader.granted_bytes <= self.budget
        self._check_pinned()
        self.launcher.is_closing = True
        await self.loader.close()
        assert self.launcher.running == []
        assert self.launcher.faults == []

    def _check_pinned(self) -> None:
        if not self.crashes:
            assert self.pinned == {name for name in self.pinned if self.loader.status(name).state == "ready"}

    async def _request(self) -> None:
        await asyncio.sleep(self.random.uniform(0, 120))
        name = self.random.choice(self.names)
        keep_alive = self.random.choice([None, None, 0.0, 7.5, math.inf])
        work = self._use(name, keep_alive)
        if self.random.random() > 0.15:
            await work
            return
        task = asyncio.create_task(work)
        await asyncio.sleep(self.random.uniform(0, 40))
        task.cancel()
        await asyncio.wait((task,))
        self.outcomes["left"] += 1

    async def _remove(self) -> None:
        """Remove a model, and add it again later."""
        await asyncio.sleep(self.random.uniform(0, 120))
        name = self.random.choice([name for name in self.names if name not in self.pinned] or [""])
        if not name or name in self.launcher.removed:
            return
        self.launcher.removed.add(name)
        self.loader.remove(name)
        await asyncio.sleep(self.random.choice([0.0, 0.1, self.random.uniform(0, 60)]))
        self.loader.add(self.entries[name])
        self.launcher.removed.remove(name)

    async def _use(self, name: str, keep_alive: float | None) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            lease = await self.loader.acquire(name, keep_alive=keep_alive)
        except EngineError:
            assert self.crashes
            self.outcomes["failed"] += 1
            return
        except ApiError:
            # The model is removed.
            assert self.removes
            self.outcomes["refused"] += 1
            return
        finally:
            self.longest_wait = max(self.longest_wait, loop.time() - began)
        engine = lease.engine
        assert isinstance(engine, FakeProcess)
        if keep_alive is not None:
            engine.keep_alive = keep_alive
        engine.users += 1
        with lease:
            try:
                await self._stream(engine)
            finally:
                engine.users -= 1
                engine.last_use = loop.time()

    async def _stream(self, engine: FakeProcess) -> None:
        if self.crashes and self.random.random() < 0.2:
            await asyncio.sleep(self.random.uniform(0, 5))
            engine.dead.set()
            return
        dead = asyncio.create_task(engine.dead.wait())
        await asyncio.wait((dead,), timeout=self.random.uniform(0, LONGEST_STREAM_SECONDS))
        dead.cancel()
        self.outcomes["served"] += 1


def test_the_invariants_hold_in_random_traces() -> None:
    """Grants stay within the budget, models in use and pinned ones loaded, and every request ends within its turns."""
    outcomes, unloads = Counter[str](), Counter[str]()
    for seed in range(TRACES):
        trace = Trace(seed)
        run_in_virtual_time(trace.run())
        turn = 2 * TURN_SECONDS + LONGEST_STREAM_SECONDS + LOAD_SECONDS + STOP_SECONDS + 1
        assert trace.longest_wait <= turn * len(trace.names), seed
        outcomes += trace.outcomes
        unloads += Counter(reason for _, reason in trace.launcher.unloads)

    assert sum(outcomes.values()) > 0.9 * TRACES * REQUESTS
    assert outcomes["served"] > 0.7 * TRACES * REQUESTS
    assert outcomes["refused"] > 500
    assert min(unloads[reason] for reason in ("idle", "memory", "crash")) > 100
