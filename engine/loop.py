"""All that the engine thread has to do: the steps of the core and, between them, batches of the embedding model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from engine.core import Core
from engine.embedder.scheduler import EmbeddingScheduler
from engine.grammar.matcher import GrammarMatcher
from engine.types.events import Event
from engine.types.request import EmbeddingJob, Request
from engine.types.status import Stats


class EngineLoop:
    """A core and, where there is an embedding model, its turns. One thread owns it."""

    def __init__(
        self, core: Core, embedding_queue: EmbeddingScheduler | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core, self._embedding_queue, self._clock = core, embedding_queue, clock

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return self._core.busy or (self._embedding_queue is not None and self._embedding_queue.busy)

    def submit(self, request: Request, matcher: GrammarMatcher | None) -> None:
        """Queue a request, with what follows its grammar."""
        self._core.submit(request, matcher)

    def embed(self, job: EmbeddingJob) -> None:
        """Queue texts for the embedding model, which must be there."""
        assert self._embedding_queue is not None, "who takes jobs knows whether there is an embedding model"
        self._embedding_queue.submit(job)

    def cancel(self, id: str) -> None:
        """Forget a request or a job; unknown and finished ones are no error."""
        self._core.cancel(id)
        if self._embedding_queue is not None:
            self._embedding_queue.cancel(id)

    def step(self) -> list[tuple[str, Event]]:
        """One batch of the core and, if it is its turn, one of the embedding model; what happened."""
        began, talks = self._clock(), self._core.busy
        events = self._core.step() if talks else []
        if self._embedding_queue is not None:
            events += self._embedding_queue.step(self._clock() - began if talks else math.inf)
        return events

    def flush_when_idle(self) -> bool:
        """Use a pause to save a little; False: nothing is left to be saved."""
        return self._core.flush_when_idle()

    def stats(self) -> Stats:
        """The state now."""
        stats = self._core.stats()
        return stats if self._embedding_queue is None else replace(stats, embedding=self._embedding_queue.counts())
