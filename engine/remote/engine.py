"""An engine in a worker process, with the protocol of one in this process. No torch is imported here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import replace

from engine.adapters.folder import AdapterFolder
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import AdapterUnknown, Draining, EngineError, InvalidRequest, Loading
from engine.open_streams import OpenStreams
from engine.output.stream import RequestStream
from engine.queue_limit import QueueLimit
from engine.remote.calls import RemoteEmbeddingTokenizer, RemoteGrammars, RemoteSpeech, RemoteTokenizer
from engine.remote.error_message import to_error
from engine.remote.link import WorkerLink, dead, reason
from engine.remote.messages import (
    AdapterList,
    Batch,
    CancelStream,
    DrainEngine,
    EmbedTexts,
    Ended,
    LoadModel,
    LoadPhase,
    LoadProgress,
    LoadRemoteAdapter,
    OpenStream,
    Ready,
    Reply,
    SetStreamUnread,
    TakeSnapshot,
    UnloadRemoteAdapter,
    decode,
)
from engine.remote.process import Launch, StartedProcess
from engine.types.progress import Progress
from engine.types.request import EmbeddingJob, Request
from engine.types.snapshot import EngineSnapshot
from engine.types.status import AdapterInfo, DraftingInfo, EmbeddingModelInfo, MemoryPlan, ModelInfo, Stats

# Default of `stuck_seconds`: as long as a step may take.
_STUCK_SECONDS = 120.0
# For the answer of a worker beyond the time that it may drain.
_ANSWER_SECONDS = 2.0


class RemoteEngine(EngineClient):
    """Loads a model in a worker process and runs requests there. `close` ends the process.

    launch         starts the process; called in a worker thread
    stuck_seconds  without a sign of life after which the worker is killed
    """

    def __init__(
        self,
        config: EngineConfig,
        on_phase: Callable[[str], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        launch: Launch = StartedProcess,
        stuck_seconds: float = _STUCK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._on_phase, self._on_progress = config, on_phase, on_progress
        self._link = WorkerLink(self._handle, self._end, launch=launch, stuck_seconds=stuck_seconds, clock=clock)
        self._loaded: Ready | None = None
        self._tokenizer: RemoteTokenizer | None = None
        self._adapter_folder = AdapterFolder(config.lora_dir) if config.lora_dir else None
        self._adapters: tuple[AdapterInfo, ...] = ()
        self._draining = False
        self._phase = "resolve"
        self._stats = Stats()
        self._queue_limit = QueueLimit(config.max_waiting)
        self._streams = OpenStreams[int](self._queue_limit, lambda stream: self._link.send(CancelStream(stream.number)))

    def start(self) -> None:
        """Begin to load the model. Call it inside the event loop that uses the engine."""
        self._loop = asyncio.get_running_loop()
        self._load_done = asyncio.Event()
        self._link.start(LoadModel(self._config))

    async def wait_ready(self) -> None:
        """Return when the model is loaded. Raises the ModelError or EngineDead of a failed load."""
        await self._load_done.wait()
        if self._link.failure is not None:
            raise self._link.failure

    async def wait_dead(self) -> None:
        """Return when the engine is no longer `alive`."""
        await self._link.ended.wait()

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self._loaded is not None and self.alive and not self._draining

    @property
    def alive(self) -> bool:
        """Whether the worker is running; one without a sign of life is killed."""
        return self._link.failure is None

    @property
    def phase(self) -> str:
        """A phase of loading, "ready", "draining", or "dead: " and the reason."""
        if self._link.failure is not None:
            return f"dead: {reason(self._link.failure)}"
        return "draining" if self._draining else self._phase

    @property
    def pid(self) -> int | None:
        """The process id of the worker; None before its start."""
        return self._link.pid

    @property
    def info(self) -> ModelInfo:
        """The model, with its adapters now. Raises Loading before it is loaded."""
        info = self._require_model().info
        return info if info.adapters == self._adapters else replace(info, adapters=self._adapters)

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan. Raises Loading before the model is loaded."""
        return self._require_model().memory

    @property
    def drafting(self) -> DraftingInfo:
        """The drafters; none before the model is loaded."""
        return DraftingInfo() if self._loaded is None else self._loaded.drafting

    @property
    def tokenizer(self) -> RemoteTokenizer:
        """For worker threads: its methods block. Raises Loading before the model is loaded."""
        self._require_model()
        assert self._tokenizer is not None, "it came with the model"
        return self._tokenizer

    @property
    def grammars(self) -> RemoteGrammars:
        """For worker threads: its methods block. Raises Loading before the model is loaded."""
        self._require_model()
        return RemoteGrammars(self._link.call)

    @property
    def speech(self) -> RemoteSpeech:
        """For worker threads: its methods block. Raises Loading before the model is loaded."""
        self._require_model()
        return RemoteSpeech(self._link.call)

    @property
    def embedding(self) -> EmbeddingModelInfo | None:
        """The embedding model; None if there is none, or before it is loaded."""
        return None if self._loaded is None else self._loaded.embedding

    @property
    def embedding_tokenizer(self) -> RemoteEmbeddingTokenizer:
        """The tokenizer of the embedding model, which must exist. For worker threads: its methods block."""
        return RemoteEmbeddingTokenizer(self._link.call, self._require_model().embedding_length)

    def stats(self) -> Stats:
        """The statistics after the last step with events, or of the last second."""
        return self._stats

    def private_bytes(self) -> int:
        """Memory that the end of the worker returns, with its child processes. For worker threads."""
        return self._link.private_bytes()

    async def snapshot(self, owner: str, salt: bytes) -> EngineSnapshot:
        """The state between two steps, with sequences of `owner` and cached prefixes under `salt`.

        Raises Loading, and EngineDead if the worker ends.
        """
        self._require_model()
        number = self._link.number()
        raw = await self._link.ask(number, TakeSnapshot(number, owner, salt))
        assert raw is not None, "the answer is a Result"
        snapshot: EngineSnapshot = decode(raw, EngineSnapshot)
        return snapshot

    def has_adapter(self, name: str) -> bool:
        """Whether requests can name an adapter: a loaded one, or one of the folder of adapters."""
        names = {info.name for info in self._adapters} if self._loaded is not None else self._config.adapters
        return name in names or (self._adapter_folder is not None and self._adapter_folder.find(name) is not None)

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter below the folder of adapters; `in_place`: in place of an adapter with its name, which running
        requests keep.

        Raises Loading, EngineDead, AdapterUnsupported and subclasses of AdapterError.
        """
        self._require_model()
        number = self._link.number()
        await self._link.ask(number, LoadRemoteAdapter(number, name, path, in_place))

    def unload_adapter(self, name: str) -> None:
        """Forget a loaded adapter at once; running requests keep it. Raises Loading, EngineDead, AdapterUnknown."""
        self._require_model()
        kept = tuple(info for info in self._adapters if info.name != name)
        if kept == self._adapters:
            raise AdapterUnknown(name)
        self._adapters = kept
        self._link.send(UnloadRemoteAdapter(name))

    def check_admission(self, owner: str) -> None:
        """Raise Overloaded if `open` would refuse every request of the owner now because the queue is full."""
        if self._loaded is not None:
            self._queue_limit.check(owner, self._loaded.info.slots, self._stats.free_place_seconds)

    def reserve(self, owner: str) -> AbstractContextManager[None]:
        """Count a request of the owner as waiting inside the block: one that is being prepared for `open`."""
        return self._queue_limit.hold(owner)

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[RequestStream]:
        """Run a request inside the block; leaving the block cancels it.

        Raises before the request is queued: Loading, Draining, EngineDead, Overloaded, TimeoutTooShort, ContextTooLong,
        InvalidRequest.
        """
        command = OpenStream(self._link.number(), request)
        async with self._open_stream(command, request.id, request.owner) as stream:
            yield stream

    @asynccontextmanager
    async def embed(self, job: EmbeddingJob) -> AsyncIterator[RequestStream]:
        """Run texts, tokenized by `embedding_tokenizer`, through the embedding model; otherwise like `open`."""
        command = EmbedTexts(self._link.number(), job)
        async with self._open_stream(command, job.id, job.owner) as stream:
            yield stream

    @asynccontextmanager
    async def _open_stream(self, command: OpenStream | EmbedTexts, id: str, owner: str) -> AsyncIterator[RequestStream]:
        self._check_accepting(id)
        self._queue_limit.check(owner, self._require_model().info.slots, self._stats.free_place_seconds)
        number = command.number
        stream = RequestStream(id, number, lambda is_unread: self._link.send(SetStreamUnread(number, is_unread)))
        with self._streams.hold(number, stream, owner):
            await self._link.ask(number, command)
            yield stream

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, wait for the running ones, then for the prefix cache to be flushed to disk.

        After `seconds` in all, unfinished requests end with Failed and unflushed tokens are lost.
        """
        self._draining = True
        deadline = self._loop.time() + seconds
        drained = self._loop.create_task(self._drain_worker(seconds))
        await self._streams.wait_closed(deadline)
        self._streams.fail("the server is shutting down")
        with suppress(TimeoutError):
            await asyncio.wait_for(drained, max(deadline - self._loop.time(), 0) + _ANSWER_SECONDS)

    def kill(self) -> None:
        """End the worker at once: its streams end with Failed. For any thread."""
        self._link.kill()

    def close(self) -> None:
        """End the worker and wait for its end. For any thread."""
        self._link.close()

    async def _drain_worker(self, seconds: float) -> None:
        number = self._link.number()
        with suppress(EngineError):
            if self._loaded is not None:
                await self._link.ask(number, DrainEngine(number, seconds))

    def _check_accepting(self, id: str) -> None:
        if self._draining:
            raise Draining
        if any(stream.id == id for stream in self._streams.streams):
            raise InvalidRequest("id", f"a request with the id {id!r} is running")

    def _require_model(self) -> Ready:
        if self._link.failure is not None:
            raise dead(self._link.failure)
        if self._loaded is None:
            raise Loading(self._phase)
        return self._loaded

    def _handle(self, reply: Reply) -> None:
        match reply:
            case Batch():
                self._deliver(reply)
            case LoadPhase(phase):
                self._phase = phase
                if self._on_phase is not None:
                    self._on_phase(phase)
            case LoadProgress(progress):
                self._phase = progress.text
                if self._on_progress is not None:
                    self._on_progress(progress)
            case Ready():
                self._loaded, self._phase, self._adapters = reply, "ready", reply.info.adapters
                self._tokenizer = RemoteTokenizer(self._link.call, reply.tokenizer)
                self._load_done.set()
            case AdapterList(adapters):
                self._adapters = adapters
            case Ended(error):
                self._link.end(to_error(error))

    def _deliver(self, batch: Batch) -> None:
        """Deliver the events of a step."""
        if batch.stats is not None:
            self._stats = batch.stats
        streams = ((self._streams.get(message.number), message.event) for message in batch.events)
        self._streams.deliver((stream, event) for stream, event in streams if stream is not None)

    def _end(self, failure: EngineError) -> None:
        self._load_done.set()
        self._streams.fail("the engine stopped")
