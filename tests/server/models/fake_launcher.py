"""A launcher whose engines load in virtual time, and which notes what the loader must not ask of it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

from engine.errors import EngineDead, ModelError, ModelUnsupported
from server.models.entry import ModelEntry
from server.models.instance import UnloadReason

LOAD_SECONDS = 3.0
STOP_SECONDS = 0.3


class FakeProcess:
    """An engine as far as the loader uses it. `users`, `last_use` and `keep_alive` are the test's."""

    def __init__(self, entry: ModelEntry, memory_bytes: int, failure: ModelError | None, keep_alive: float) -> None:
        self.entry, self.memory_bytes, self.failure = entry, memory_bytes, failure
        self.users, self.last_use, self.stopped_at, self.keep_alive = 0, 0.0, 0.0, keep_alive
        self.is_loaded, self.dead = False, asyncio.Event()

    async def wait_ready(self) -> None:
        await asyncio.wait((asyncio.create_task(self.dead.wait()),), timeout=LOAD_SECONDS)
        if self.failure is not None:
            raise self.failure
        if self.dead.is_set():
            raise EngineDead("killed")
        self.is_loaded, self.last_use = True, asyncio.get_running_loop().time()

    async def wait_dead(self) -> None:
        await self.dead.wait()

    @property
    def phase(self) -> str:
        if self.dead.is_set():
            return "dead: killed"
        return "ready" if self.is_loaded else "loading weights 43 %"

    async def drain(self, seconds: float) -> None:
        while self.users:
            await asyncio.sleep(0.1)


class FakeLauncher:
    """Starts fake processes. The needed bytes and failures are by model name."""

    def __init__(
        self,
        needed: dict[str, int],
        budget: int,
        failures: dict[str, ModelError] | None = None,
        keep_alive: float = math.inf,
    ) -> None:
        self.needed, self.budget, self.failures, self.keep_alive = needed, budget, failures or {}, keep_alive
        self.running: list[Any] = []
        self.starts: list[str] = []
        self.unloads: list[tuple[str, UnloadReason]] = []
        self.outcomes: Counter[str] = Counter()
        self.stopped: dict[str, FakeProcess] = {}
        self.is_closing = False
        # Broken invariants: an exception in a task of the loader would not reach the test.
        self.faults: list[str] = []

    def check(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)

    async def needed_bytes(self, entry: ModelEntry) -> int:
        await asyncio.sleep(0.2)
        if entry.name not in self.needed:
            raise ModelUnsupported(entry.name, "no plan")
        return self.needed[entry.name]

    def start(self, entry: ModelEntry, memory_bytes: int) -> Any:
        process = FakeProcess(entry, memory_bytes, self.failures.get(entry.name), self.keep_alive)
        self.check(entry.name not in {other.entry.name for other in self.running}, f"{entry.name} has two processes")
        self.running.append(process)
        self.starts.append(entry.name)
        self.check(self.granted <= self.budget, f"{self.granted} bytes are granted")
        return process

    async def stop(self, engine: Any) -> None:
        if not self.is_closing and not engine.dead.is_set() and engine.failure is None:
            self.check(engine.users == 0, f"{engine.entry.name} is unloaded in use")
            self.check(not engine.entry.pinned, f"{engine.entry.name} is pinned and unloaded")
        engine.stopped_at = asyncio.get_running_loop().time()
        await asyncio.sleep(STOP_SECONDS)
        self.running.remove(engine)
        self.stopped[engine.entry.name] = engine

    @property
    def granted(self) -> int:
        return sum(process.memory_bytes for process in self.running)

    def loaded(self, model: str, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] += 1

    def unloaded(self, model: str, reason: UnloadReason) -> None:
        self.unloads.append((model, reason))
