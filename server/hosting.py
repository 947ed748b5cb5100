"""An engine and its app inside any process: without port, signals and exit codes.

`cellar serve` adds these (lifecycle.py); Ray's replicas and other programs use `hosted`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from engine.errors import EngineError
from engine.load.machine.resources import limit_spinning
from server.app import create_app
from server.configuration.settings import Settings

if TYPE_CHECKING:
    from engine.client import EngineClient
    from engine.types.progress import Progress

logger = logging.getLogger("cellar")

CLOSE_SECONDS = 5.0
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
                missing = await asyncio.to_thread(self._prepare_grammars)

    def _prepare_grammars(self) -> bool:
        """Build a part of the tables; whether another part is missing."""
        try:
            return self.engine.grammars.prepare()
        except (EngineError, OSError) as error:
            logger.warning("the first grammar will be slow, its tables are not built: %s", error)
            return False

    def close(self) -> bool:
        """Join the engine thread, with a timeout since it may be loading weights; whether it ended."""
        closing = threading.Thread(target=self.engine.close, name="close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        return not closing.is_alive()


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
        if not await asyncio.to_thread(hosting.close):
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
