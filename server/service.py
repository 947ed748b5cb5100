"""The service of one resolved model: its engine, settings and metrics; what a route does with a model passes here."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from anyio import CapacityLimiter

from engine.errors import Draining, EngineDead, Loading, SequenceFailed, Unsatisfiable
from engine.types.events import Delta, Event, Failed, Finished
from engine.types.request import EmbeddingJob, Request
from engine.types.snapshot import EngineSnapshot
from engine.types.status import EmbeddingModelInfo
from server.configuration.settings import Settings
from server.http.access_log import current
from server.http.admission import release_reservation
from server.http.auth import caller
from server.http.errors import MODEL_NOT_FOUND, ApiError
from server.http.events import ChoiceEvents, DeltaSink
from server.http.version import version
from server.media.threads import MediaThreads
from server.media.uploads import MediaReader
from server.metrics.metrics import Endpoint, Metrics
from server.metrics.timer import GenerationTimer
from server.metrics.traces import GenerationTraces

if TYPE_CHECKING:
    from engine.client import EngineClient, EventStream


MAX_GRAMMAR_THREADS = 4
# Of a tokenizer, which encodes one text at a time. More of them would only contend for the interpreter lock.
MAX_ENCODING_THREADS = 2
# Adapters of --lora-dir and of calls, in metrics.
DYNAMIC_ADAPTERS = "dynamic"


@dataclass(frozen=True, slots=True)
class WorkerThreads:
    """Limits of the worker threads of a model, so that the threads of other requests stay free.

    grammar   wait for grammars
    encoding  encode prompts of completions
    media     render prompts with images or sounds
    """

    grammar: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_GRAMMAR_THREADS))
    encoding: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_ENCODING_THREADS))
    media: MediaThreads = field(default_factory=MediaThreads)


@dataclass(frozen=True, slots=True)
class Service:
    """One engine with its settings, metrics and traces, under one name of the model.

    name             for the response: the one of the request, or the main name
    listed_name      of the model or adapter in /v1/models, which keys are limited to; "": `name`
    media            reads images and sounds of requests
    adapter          name of the LoRA adapter that requests run with; "": none
    threads          worker threads of the model, whatever its name
    """

    engine: EngineClient
    settings: Settings
    metrics: Metrics
    name: str
    traces: GenerationTraces | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    adapter: str = ""
    listed_name: str = ""
    media: MediaReader = field(default_factory=MediaReader)
    threads: WorkerThreads = field(default_factory=WorkerThreads)

    def check_alive(self) -> None:
        """Raise EngineDead if a restart would help: the engine thread ended or makes no progress."""
        if not self.engine.alive:
            dead, _, reason = self.engine.phase.partition("dead: ")
            raise EngineDead(reason if not dead and reason else "it does not move any more")

    def check_ready(self) -> None:
        """Raise the error of an engine that cannot accept a request now."""
        self.check_alive()
        if self.engine.phase == "draining":
            raise Draining()
        if not self.engine.ready:
            raise Loading(self.engine.phase)

    def fingerprint(self) -> str:
        """A digest of everything that may change the text: weights, adapter, number format, version."""
        info = self.engine.info
        adapter = [adapter.digest for adapter in info.adapters if adapter.name == self.adapter]
        return _fingerprint(info.fingerprint, info.architecture, info.dtype, version(), *adapter)

    @property
    def embedder(self) -> EmbeddingModelInfo | None:
        """The embedding model, if it produces vectors."""
        embedding = self.engine.embedding
        return embedding if embedding is not None and embedding.output_kind == "vectors" else None

    @property
    def reranker(self) -> EmbeddingModelInfo | None:
        """The embedding model, if it scores pairs of texts."""
        embedding = self.engine.embedding
        return embedding if embedding is not None and embedding.output_kind == "scores" else None

    @asynccontextmanager
    async def open(self, request: Request, endpoint: Endpoint, choice: int = 0) -> AsyncIterator[ChoiceEvents]:
        """The events of one generation; leaving the block cancels it. A Failed event is raised as an exception."""
        request = self._scoped_to_owner(request)
        self._check_permitted()
        release_reservation()
        async with self.engine.open(request) as stream, self._observed(stream, endpoint, choice) as events:
            # The choices of a request share its prompt.
            if not choice:
                caller().charge(prompt_tokens=len(request.prompt))
            yield events

    @asynccontextmanager
    async def embed(self, job: EmbeddingJob, endpoint: Endpoint) -> AsyncIterator[ChoiceEvents]:
        """The events of a job of the embedding model."""
        owner = caller().owner
        self._check_permitted()
        job = replace(job, id=_scoped_id(owner, job.id), owner=owner)
        release_reservation()
        async with self.engine.embed(job) as stream, self._observed(stream, endpoint, 0) as events:
            yield events

    async def snapshot(self) -> EngineSnapshot:
        """The engine's state, with sequences and cached prefixes of the caller's organisation alone."""
        owner = caller().owner
        return await self.engine.snapshot(owner, _owner_salt(owner, b""))

    def _check_permitted(self) -> None:
        """Raise ApiError if the key of the request may not use the model.

        The registry refuses such names; here, also a request that names no model is refused.
        """
        model = self.listed_name or self.name
        if not caller().may_use(model):
            message = f"The API key of this request may not use the model '{model}'; name another one in 'model'."
            raise ApiError(MODEL_NOT_FOUND, message, param="model")

    def _scoped_to_owner(self, request: Request) -> Request:
        """The request with its adapter and its owner: the salt excludes cached prefixes of other owners, and the id is
        unique for the owner.

        All requests to the model pass here, so no route can omit it.
        """
        owner, group = caller().owner, caller().request
        salt = _owner_salt(owner, request.salt)
        return replace(
            request, id=_scoped_id(owner, request.id), salt=salt, owner=owner, group=group, adapter=self.adapter
        )

    @asynccontextmanager
    async def _observed(self, stream: EventStream, endpoint: Endpoint, choice: int) -> AsyncIterator[ChoiceEvents]:
        if self.adapter:
            # Only names of the settings are labels.
            self.metrics.count_adapter(self.adapter if self.adapter in self.settings.adapters else DYNAMIC_ADAPTERS)
        with self.metrics.observe(endpoint) as timer:
            try:
                async with aclosing(self._observed_events(stream, timer, choice)) as events:
                    yield ChoiceEvents(events, partial(_set_sink, stream, timer, choice))
            finally:
                caller().charge(generated_tokens=timer.generated_tokens)
                record = current()
                if self.traces is not None and record is not None:
                    self.traces.record(timer, endpoint, record.id, record.trace)

    async def _observed_events(
        self, stream: EventStream, timer: GenerationTimer, choice: int
    ) -> AsyncGenerator[tuple[int, Event], None]:
        async for event in stream:
            timer.observe(event)
            if isinstance(event, Finished) and (record := current()) is not None:
                record.add(self.settings.model_names[0], event)
            if isinstance(event, Failed):
                self._raise_failure(event)
            yield choice, event

    def _raise_failure(self, failed: Failed) -> None:
        if failed.caused_by_request:
            raise Unsatisfiable(failed.reason)
        # The event has the reason in words; the engine's state decides whether a retry makes sense.
        if self.engine.phase == "draining":
            raise Draining()
        if not self.engine.alive:
            raise EngineDead(failed.reason)
        raise SequenceFailed(failed.reason)


def _scoped_id(owner: str, id: str) -> str:
    return f"{owner}/{id}" if owner else id


def _owner_salt(owner: str, salt: bytes) -> bytes:
    # Owner ids have a fixed length, so no two owners share a salt.
    return hashlib.sha256(owner.encode() + salt).digest() if owner else salt


@functools.lru_cache(maxsize=16)
def _fingerprint(*parts: str) -> str:
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def _set_sink(stream: EventStream, timer: GenerationTimer, choice: int, sink: DeltaSink) -> None:
    def fast_path(delta: Delta) -> bool:
        sent = sink(choice, delta)
        if sent:
            timer.observe_delta(delta)
        return sent

    stream.fast_path = fast_path
