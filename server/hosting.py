"""An engine and its app inside any process: without port, signals and exit codes.

`cellar serve` adds these (lifecycle.py); Ray's replicas and other programs use `hosted`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from engine.errors import EngineError
from engine.load.machine.resources import limit_spinning
from engine.remote.zygote import Zygote
from server.app import create_app, create_app_of_several
from server.configuration.settings import Settings
from server.models.entry import ModelEntry
from server.models.keep_alive import parse_keep_alive
from server.models.launcher import WorkerLauncher
from server.models.loader import Loader, LoaderLimits

if TYPE_CHECKING:
    from engine.client import EngineClient
    from engine.types.progress import Progress

logger = logging.getLogger("cellar")

CLOSE_SECONDS = 5.0
_NOT_PREPARED = "the first grammar will be slow, its tables are not built"
IDLE_CHECK_SECONDS = 0.5
# Consecutive checks without a request before the server counts as idle.
IDLE_CHECKS = 4


class Hosting:
    """An engine and its app. All methods belong to the event loop's thread."""

    def __init__(self, engine: EngineClient, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.app = create_app(engine, settings)

    def start(self) -> None:
        """Start the engine, which loads its model."""
        self.engine.start()

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, and end the running ones within `seconds`."""
        await self.engine.drain(seconds)

    async def prepare_when_idle(self) -> None:
        """When the server is idle, build the tokenizer tables that the first grammar needs, part by part.

        Parts hold the interpreter lock, llguidance's up to 0.6 s with 262,000 tokens (measured). A check before each
        part keeps streams from pausing longer.
        """
        quiet, steps, missing = 0, 0, True
        while missing:
            if quiet < IDLE_CHECKS:
                await asyncio.sleep(IDLE_CHECK_SECONDS)
            numbers = self.engine.stats()
            # Between two checks a request may have come and gone.
            is_idle = not (numbers.running or numbers.waiting) and numbers.steps_total == steps
            quiet, steps = quiet + 1 if is_idle else 0, numbers.steps_total
            if quiet >= IDLE_CHECKS:
                try:
                    missing = await asyncio.to_thread(self._prepare_grammars)
                except RuntimeError as error:
                    # No thread can be started.
                    logger.warning("%s: %s", _NOT_PREPARED, error)
                    return

    def _prepare_grammars(self) -> bool:
        """Build a part of the tables; whether another part is missing."""
        try:
            return self.engine.grammars.prepare()
        except (EngineError, OSError) as error:
            logger.warning("%s: %s", _NOT_PREPARED, error)
            return False

    async def close(self) -> bool:
        """Stop the engine; whether its thread ended."""
        try:
            return await asyncio.to_thread(self._join)
        except RuntimeError as error:
            logger.warning("the engine is not closed: %s", error)
            return False

    def _join(self) -> bool:
        """Join the engine thread, with a timeout since it may be loading weights; whether it ended."""
        closing = threading.Thread(target=self.engine.close, name="close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        return not closing.is_alive()


class ModelsHosting:
    """Several models, loaded on demand into worker processes, and their app."""

    def __init__(self, entries: Sequence[ModelEntry], settings: Settings, budget_bytes: int, zygote: Zygote) -> None:
        self.entries, self.settings, self._zygote = entries, settings, zygote
        keep_alive = math.inf if settings.keep_alive is None else parse_keep_alive(settings.keep_alive)
        limits = LoaderLimits(budget_bytes, settings.max_waiting, settings.load_timeout, keep_alive)
        self.app = create_app_of_several(entries, WorkerLauncher(zygote.launch, budget_bytes), limits, settings)
        self.loader: Loader = self.app.state.loader

    def start(self) -> None:
        """Begin to load the models of the start."""
        self.loader.start()

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, and end the running ones within `seconds`."""
        await self.loader.drain(seconds)

    async def close(self) -> bool:
        """End all processes; whether they ended."""
        await self.loader.close()
        await asyncio.to_thread(self._zygote.close)
        return True


@asynccontextmanager
async def hosted(settings: Settings, engine: EngineClient | None = None) -> AsyncGenerator[FastAPI, None]:
    """The app of a loaded engine. Raises ModelError or EngineDead of a failed load.

    At the end of the block running requests have `settings.grace_seconds` to finish; then the engine is closed.

    engine  not started yet; by default one is created from the settings
    """
    if engine is None:
        engine = await asyncio.to_thread(create_engine, settings)
    hosting = Hosting(engine, settings)
    hosting.start()
    try:
        await hosting.engine.wait_ready()
        async with hosting.app.router.lifespan_context(hosting.app), _running(hosting.prepare_when_idle()):
            yield hosting.app
            await hosting.engine.drain(settings.grace_seconds)
    finally:
        if not await hosting.close():
            logger.error("the engine thread did not end within %g s", CLOSE_SECONDS)


@asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncGenerator[None, None]:
    """A task that is cancelled at the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def create_engine(
    settings: Settings,
    *,
    on_phase: Callable[[str], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> EngineClient:
    """An engine that is not started. Takes seconds: it imports torch."""
    limit_spinning()
    from engine.engine import Engine

    return Engine(settings.engine_config(), on_phase=on_phase, on_progress=on_progress)
