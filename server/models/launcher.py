"""Starts the processes of models, with the memory that their plans need."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import EngineError, ModelError, ModelMissing
from engine.remote.engine import RemoteEngine
from engine.remote.planning import plan_model
from engine.remote.process import Launch
from engine.types.sizes import format_size
from engine.types.status import MemoryNeed
from server.models.entry import ModelEntry

logger = logging.getLogger("cellar")

# A file by its name, size and time of change.
FileState = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """The plan of a model, or why there is none, for the state of its files."""

    files: tuple[FileState, ...]
    outcome: MemoryNeed | ModelError


class WorkerLauncher:
    """Plans and loads models in processes that `launch` starts. Belongs to the event loop's thread."""

    def __init__(self, launch: Launch, budget_bytes: int) -> None:
        self._launch, self._budget_bytes = launch, budget_bytes
        self._plans: dict[ModelEntry, CachedPlan] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def needed_bytes(self, entry: ModelEntry) -> int:
        """The memory of the model. A plan, or its failure, holds until a file of the model changes."""
        config = entry.settings.engine_config()
        files = await asyncio.to_thread(lambda: tuple(_file_states(config)))
        cached = self._plans.get(entry)
        if cached is None or cached.files != files:
            cached = self._plans[entry] = CachedPlan(files, await self._plan(config))
        if isinstance(cached.outcome, ModelError):
            raise cached.outcome
        return cached.outcome.bytes

    def start(self, entry: ModelEntry, memory_bytes: int) -> RemoteEngine:
        """An engine that began to load the model."""
        need = self._plans[entry].outcome
        assert isinstance(need, MemoryNeed), "the model is planned"
        config = replace(
            entry.settings.engine_config(),
            memory=str(memory_bytes),
            shares_memory=True,
            context=need.context,
            slots=need.slots,
            cells=need.cells,
        )
        engine = RemoteEngine(config, launch=self._launch)
        engine.start()
        task = asyncio.create_task(_log_memory(entry.name, engine, memory_bytes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return engine

    async def stop(self, engine: EngineClient) -> None:
        """Return when the process has ended; one that makes no progress is killed."""
        assert isinstance(engine, RemoteEngine), "it was started here"
        if not engine.alive:
            engine.kill()
        await asyncio.to_thread(engine.close)

    async def _plan(self, config: EngineConfig) -> MemoryNeed | ModelError:
        try:
            return await plan_model(config, self._budget_bytes, self._launch)
        except ModelMissing:
            # The hub may have it later.
            raise
        except ModelError as error:
            return error


async def _log_memory(name: str, engine: RemoteEngine, granted_bytes: int) -> None:
    """Compare the memory of a loaded model with its plan."""
    try:
        await engine.wait_ready()
    except EngineError:
        return
    used = await asyncio.to_thread(engine.private_bytes)
    text = "model %s: process %s has %s of the granted %s"
    logger.info(text, name, engine.pid, format_size(used), format_size(granted_bytes))


def _file_states(config: EngineConfig) -> Iterator[FileState]:
    """The files of the models of the settings; none of the hub."""
    sources = (config.model, config.draft_model, config.embedding_model, *config.adapters.values())
    for source in filter(None, sources):
        path = Path(source).expanduser()
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file():
                stat = file.stat()
                yield str(file), stat.st_size, stat.st_mtime_ns
