"""The boundary between the event loop and the engine thread, the only thread that uses torch.

Commands and events are frozen and small. Commands pass through a queue; the events of a step wake the event loop once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from engine.adapters.catalog import AdapterCatalog
from engine.adapters.folder import AdapterFolder
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.core import Core
from engine.draft.loading import load_draft, make_speculation
from engine.embedder.loading import LoadedEmbedder, load_embedder
from engine.embedder.scheduler import EmbeddingScheduler
from engine.embedder.tokenizer import EmbeddingTokenizer
from engine.errors import (
    AdapterPathRefused,
    AdapterUnknown,
    Draining,
    EngineDead,
    EngineError,
    InvalidRequest,
    Loading,
    ModelError,
    TimeoutTooShort,
)
from engine.grammar.compiler import GrammarCompiler
from engine.load.adapters import AdapterReader, adapter_limits
from engine.load.contents import with_ranges
from engine.load.load import LoadedModel
from engine.load.machine.device import resolve_device
from engine.load.recording import record_steps
from engine.loop import (
    Cancel,
    Command,
    Embed,
    EngineLoop,
    Inspect,
    LoadAdapter,
    SetUnread,
    Stop,
    Submit,
    UnloadAdapter,
)
from engine.media.speech_reader import SpeechReader
from engine.open_streams import OpenStreams
from engine.output.stop_regex import check_stop_regex
from engine.output.stream import RequestStream
from engine.parallel.loading import loaded_model
from engine.queue_limit import QueueLimit
from engine.text.tokenizer import Tokenizer
from engine.types.events import Event
from engine.types.progress import Progress, progress_to
from engine.types.request import EmbeddingJob, Request
from engine.types.snapshot import EngineSnapshot
from engine.types.status import DraftingInfo, EmbeddingModelInfo, MemoryPlan, ModelInfo, Stats
from engine.validity import check_request
from engine.watchdog import Watchdog

log = logging.getLogger("cellar.engine")

Result = TypeVar("Result")

# The interval at which the event loop checks for a stuck step.
_LIVENESS_CHECK_SECONDS = 5.0


class Engine(EngineClient):
    """Loads a model and runs requests on the engine thread. All public methods belong to the event loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        on_phase: Callable[[str], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._on_phase, self._on_progress = config, on_phase, on_progress
        self._watchdog = Watchdog(clock)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_thread, name="engine", daemon=True)
        # Requests and jobs that were opened so far.
        self._opened = 0
        self._loaded: LoadedModel | None = None
        self._adapter_folder = AdapterFolder(config.lora_dir) if config.lora_dir else None
        self._adapters: AdapterCatalog | None = None
        self._embedder: LoadedEmbedder | None = None
        self._failure: EngineError | None = None
        self._draining = False
        # Why the engine makes no progress, as of the last observation.
        self._stuck_reason = ""
        self._phase = "resolve"
        self._drafting = DraftingInfo()
        self._stats = Stats()
        self._queue_limit = QueueLimit(config.max_waiting)
        self._streams = OpenStreams[str](self._queue_limit, lambda stream: self._inbox.put(Cancel(stream.id)))
        # Requested snapshots, by owner and salt.
        self._snapshots: dict[tuple[str, bytes], asyncio.Future[EngineSnapshot | None]] = {}
        # Snapshots, and admissions of requests with a timeout, that the engine thread has not answered.
        self._pending = WeakSet[asyncio.Future[Any]]()

    def start(self) -> None:
        """Start the thread, which loads the model first. Call it inside the event loop that uses the engine."""
        self._loop = asyncio.get_running_loop()
        self._load_done = asyncio.Event()
        self._flushed = asyncio.Event()
        self._failed = asyncio.Event()
        self._thread.start()

    async def wait_ready(self) -> None:
        """Return when the model is loaded. Raises the ModelError or EngineDead of a failed load."""
        await self._load_done.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_dead(self) -> None:
        """Return when the engine is no longer `alive`; its streams have ended with Failed."""
        while self.alive:
            await self._wait_until(self._failed, self._loop.time() + _LIVENESS_CHECK_SECONDS)
        if self._stuck_reason:
            self._fail(EngineDead(self._stuck_reason))

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self._loaded is not None and self._failure is None and not self._draining

    @property
    def alive(self) -> bool:
        """Whether the thread is running and not stuck in a step, nor a worker thread in a tokenizer; a load of any
        duration is alive.
        """
        if self._failure is not None or not self._thread.is_alive():
            return False
        tokenizers = [part.tokenizer for part in (self._loaded, self._embedder) if part is not None]
        stuck_workers = [tokenizer.is_stuck() for tokenizer in tokenizers]
        worker_reason = "a worker thread does not leave the tokenizer" if any(stuck_workers) else ""
        self._stuck_reason = self._watchdog.describe() if self._watchdog.is_stuck() else worker_reason
        return not self._stuck_reason

    @property
    def phase(self) -> str:
        """A phase of loading, "ready", "draining", or "dead: " and the reason."""
        if self._failure is not None:
            return f"dead: {_reason(self._failure)}"
        if self._stuck_reason:
            return f"dead: {self._stuck_reason}"
        return "draining" if self._draining else self._phase

    @property
    def info(self) -> ModelInfo:
        """The model, with its adapters now. Raises Loading before it is loaded."""
        info = self._require_model().info
        return info if self._adapters is None else replace(info, adapters=self._adapters.infos)

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan. Raises Loading before the model is loaded."""
        return self._require_model().memory

    @property
    def drafting(self) -> DraftingInfo:
        """The drafters; none before the model is loaded."""
        return self._drafting

    @property
    def tokenizer(self) -> Tokenizer:
        """For worker threads: its methods block. Raises Loading before the model is loaded."""
        return self._require_model().tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        """For worker threads: its methods block. Raises Loading before the model is loaded."""
        return self._require_model().grammars

    @property
    def speech(self) -> SpeechReader:
        """For worker threads: its methods block. Raises Loading before the model is loaded."""
        reader = self._require_model().speech_reader
        assert reader is not None, "callers check `info.speech` first"
        return reader

    @property
    def embedding(self) -> EmbeddingModelInfo | None:
        """The embedding model; None if there is none, or before it is loaded."""
        return None if self._embedder is None else self._embedder.info

    @property
    def embedding_tokenizer(self) -> EmbeddingTokenizer:
        """The tokenizer of the embedding model, which must exist. For worker threads: its methods block."""
        assert self._embedder is not None, "callers check `embedding` first"
        return self._embedder.tokenizer

    def stats(self) -> Stats:
        """The statistics after the last step."""
        return self._stats

    async def snapshot(self, owner: str, salt: bytes) -> EngineSnapshot:
        """The state between two steps, with sequences of `owner` and cached prefixes under `salt`.

        Concurrent calls of an owner share one snapshot. Raises Loading, EngineDead if the engine thread ends, and
        EngineError if the snapshot fails.
        """
        self._require_model()
        pending = self._snapshots.get((owner, salt))
        if pending is None:
            pending = self._snapshots[owner, salt] = self._loop.create_future()
            self._pending.add(pending)
            pending.add_done_callback(lambda _: self._snapshots.pop((owner, salt)))
            self._inbox.put(Inspect(owner, salt, partial(self._call_on_loop, partial(_set_result, pending))))
        if (snapshot := await asyncio.shield(pending)) is None:
            raise EngineError("the snapshot failed")
        return snapshot

    def has_adapter(self, name: str) -> bool:
        """Whether requests can name an adapter: a loaded one, or one of the folder of adapters."""
        if self._adapters is not None:
            return self._adapters.has(name)
        return name in self._config.adapters or (
            self._adapter_folder is not None and self._adapter_folder.find(name) is not None
        )

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter below the folder of adapters; `in_place`: in place of an adapter with its name, which running
        requests keep.

        Raises Loading, EngineDead, AdapterUnsupported and subclasses of AdapterError.
        """
        self._require_model()
        if self._adapters is None:
            raise AdapterPathRefused
        await self._adapters.load(name, path, in_place=in_place)

    def unload_adapter(self, name: str) -> None:
        """Forget a loaded adapter at once; running requests keep it. Raises Loading, EngineDead, AdapterUnknown."""
        self._require_model()
        if self._adapters is None:
            raise AdapterUnknown(name)
        self._adapters.unload(name)

    def check_admission(self, owner: str) -> None:
        """Raise Overloaded if `open` would refuse every request of the owner now because the queue is full."""
        if self._loaded is not None:
            self._queue_limit.check(owner, self._loaded.info.slots, self._stats.free_place_seconds)

    def reserve(self, owner: str) -> AbstractContextManager[None]:
        """Count a request of the owner as waiting inside the block: one that is being prepared for `open`."""
        return self._queue_limit.hold(owner)

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[RequestStream]:
        """Run a request inside the block; leaving the block cancels it. An adapter of the folder is loaded first.

        Raises before the request is queued: Loading, Draining, EngineDead, Overloaded, TimeoutTooShort, ContextTooLong,
        InvalidRequest, AdapterUnsupported, AdaptersFull.
        """
        self._check(request)
        async with self._adapter_of(request), self._open_checked(request) as stream:
            yield stream

    @asynccontextmanager
    async def _adapter_of(self, request: Request) -> AsyncIterator[None]:
        """Inside the block the adapter of a request is in use."""
        if self._adapters is None or not request.adapter:
            yield
            return
        async with AsyncExitStack() as block:
            with self.reserve(request.owner):
                await block.enter_async_context(self._adapters.hold(request.adapter))
            yield

    @asynccontextmanager
    async def _open_checked(self, request: Request) -> AsyncIterator[RequestStream]:
        matcher = None
        if request.stop_regex or request.grammar is not None:
            with self.reserve(request.owner):
                if request.stop_regex:
                    await asyncio.to_thread(check_stop_regex, request.stop_regex)
                if request.grammar is not None:
                    matcher = await asyncio.to_thread(self.grammars.matcher, request.grammar)
        # The engine may be draining by now, or a request with this id was opened.
        self._check(request)
        admission: asyncio.Future[TimeoutTooShort | None] = self._loop.create_future()
        submit = Submit(request, matcher)
        if request.timeout_seconds is None:
            admission.set_result(None)
        else:
            submit = replace(submit, report=partial(self._call_on_loop, partial(_set_result, admission)))
            self._pending.add(admission)
        async with self._open_stream(request.id, request.owner, submit) as stream:
            if (refusal := await admission) is not None:
                raise refusal
            yield stream

    @asynccontextmanager
    async def embed(self, job: EmbeddingJob) -> AsyncIterator[RequestStream]:
        """Run texts, tokenized by `embedding_tokenizer`, through the embedding model; otherwise like `open`."""
        self._check_accepting(job.id)
        slots = self._require_model().info.slots
        if self._embedder is None or not job.inputs:
            raise InvalidRequest("input", "there is no embedding model, or no input")
        self._queue_limit.check(job.owner, slots, self._stats.free_place_seconds)
        async with self._open_stream(job.id, job.owner, Embed(job)) as stream:
            yield stream

    @asynccontextmanager
    async def _open_stream(self, id: str, owner: str, command: Submit | Embed) -> AsyncIterator[RequestStream]:
        self._opened += 1
        stream = RequestStream(id, self._opened, lambda is_unread: self._inbox.put(SetUnread(id, is_unread)))
        with self._streams.hold(id, stream, owner):
            self._inbox.put(command)
            yield stream

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, wait for the running ones, then for the prefix cache to be flushed to disk.

        After `seconds` in all, unfinished requests end with Failed and unflushed tokens are lost.
        """
        self._draining = True
        if self._adapters is not None:
            self._adapters.close()
        deadline = self._loop.time() + seconds
        await self._streams.wait_closed(deadline)
        self._streams.fail("the server is shutting down")
        if self._loaded is not None and self.alive:
            await self._wait_until(self._flushed, deadline)

    async def _wait_until(self, event: asyncio.Event, deadline: float) -> bool:
        """Wait for the event until the deadline; whether it is set."""
        try:
            await asyncio.wait_for(event.wait(), max(deadline - self._loop.time(), 0))
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop the thread and wait for its end."""
        if self._thread.is_alive():
            self._inbox.put(Stop())
            self._thread.join()

    def _check(self, request: Request) -> None:
        self._check_accepting(request.id)
        loaded = self._require_model()
        check_request(request, loaded, drafters=self._drafting.kinds, chunk=self._config.chunk)
        if self._adapters is not None:
            self._adapters.check(request.adapter)
        elif request.adapter:
            raise InvalidRequest("model", f"there is no adapter {request.adapter[:128]!r}")
        self._queue_limit.check(request.owner, loaded.info.slots, self._stats.free_place_seconds)

    def _check_accepting(self, id: str) -> None:
        if self._draining:
            raise Draining
        if self._streams.get(id) is not None:
            raise InvalidRequest("id", f"a request with the id {id!r} is running")

    def _require_model(self) -> LoadedModel:
        if self._failure is not None:
            raise EngineDead(_reason(self._failure))
        if self._loaded is None:
            raise Loading(self._phase)
        return self._loaded

    def _deliver(self, events: list[tuple[str, Event]], submitted: int, stats: Stats, flushed: bool) -> None:
        """On the event loop: deliver the events of a step, which knew the first `submitted` requests.

        A stream that was left is not in the table any more, and a later one may have its id.
        """
        self._stats = stats
        if flushed:
            self._flushed.set()
        else:
            self._flushed.clear()
        streams = ((self._streams.get(request_id), event) for request_id, event in events)
        self._streams.deliver(
            (stream, event) for stream, event in streams if stream is not None and stream.number <= submitted
        )

    def _finish_loading(
        self,
        loaded: LoadedModel | None,
        drafting: DraftingInfo,
        failure: EngineError | None,
        embedder: LoadedEmbedder | None = None,
    ) -> None:
        """On the event loop: the thread loaded the model, or failed."""
        self._loaded, self._drafting = loaded or self._loaded, drafting
        self._embedder = embedder or self._embedder
        if loaded is not None:
            self._config = with_ranges(self._config, loaded.content_encoder)
            if loaded.adapter_reader is not None:
                self._adapters = self._catalog(loaded, loaded.adapter_reader)
        self._phase = "ready"
        self._load_done.set()
        if failure is not None:
            self._fail(failure)

    def _fail(self, failure: EngineError) -> None:
        """On the event loop: the engine computes nothing more."""
        self._failure = self._failure or failure
        if not self._failed.is_set():
            self._failed.set()
            self._streams.fail("the engine stopped")
            for pending in [future for future in self._pending if not future.done()]:
                pending.set_exception(failure)

    def _catalog(self, loaded: LoadedModel, reader: AdapterReader) -> AdapterCatalog:
        """The adapters that are loaded, and those of the folder of the settings."""
        folder = self._adapter_folder
        root = None if folder is None else folder.root
        return AdapterCatalog(
            loaded.info.adapters,
            adapter_limits(self._config, loaded.memory.available_bytes),
            folder,
            read=partial(reader.read, root=root),
            load=lambda adapter: self._inbox.put(LoadAdapter(adapter)),
            unload=lambda name: self._inbox.put(UnloadAdapter(name)),
        )

    # The methods below run on the engine thread.

    def _run_thread(self) -> None:
        try:
            with ExitStack() as processes:
                self._load_and_run(processes)
        except (ModelError, EngineDead) as error:
            self._call_on_loop(self._finish_loading, None, DraftingInfo(), error)
        except Exception as error:
            log.exception("the engine thread ended")
            self._call_on_loop(self._finish_loading, None, DraftingInfo(), EngineDead(type(error).__name__))

    def _load_and_run(self, processes: ExitStack) -> None:
        """Load the models, and run the loop until a Stop; `processes` are the other ranks."""
        config = self._config = resolve_device(self._config)
        with progress_to(self._set_progress):
            embedder = load_embedder(config, self._set_phase)
            reserved = 0 if embedder is None else embedder.info.workspace_bytes
            loaded = processes.enter_context(
                loaded_model(config, self._set_phase, self._lose_rank, reserved_bytes=reserved)
            )
            draft = load_draft(config, loaded, self._set_phase)
            speculation = make_speculation(config, loaded, draft, time.monotonic, self._set_phase)
            core = Core(loaded, config, speculation)
            record_steps(config, loaded, core.cache, self._set_phase)
        drafting = DraftingInfo(speculation.kinds)
        if isinstance(draft, LoadedModel):
            drafting = replace(drafting, model=draft.info, memory=draft.memory)
        self._set_phase("ready")
        self._call_on_loop(self._finish_loading, loaded, drafting, None, embedder)
        embedding = None if embedder is None else EmbeddingScheduler(embedder.embedder, max_batch_tokens=config.chunk)
        with closing(core):
            EngineLoop(core, embedding).run(self._inbox, self._deliver_from_thread, self._watchdog)

    def _lose_rank(self, reason: str) -> None:
        """A process of tensor parallelism ended: in its thread."""
        self._call_on_loop(self._finish_loading, None, DraftingInfo(), EngineDead(reason))

    def _deliver_from_thread(
        self, events: list[tuple[str, Event]], submitted: int, stats: Stats, flushed: bool
    ) -> None:
        self._call_on_loop(self._deliver, events, submitted, stats, flushed)

    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        if self._on_phase is not None:
            self._on_phase(phase)

    def _set_progress(self, progress: Progress) -> None:
        self._phase = progress.text
        if self._on_progress is not None:
            self._on_progress(progress)

    def _call_on_loop(self, callback: Callable[..., None], *values: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *values)


def _reason(failure: EngineError) -> str:
    """The text of a failure, without the words that EngineDead adds."""
    return failure.reason if isinstance(failure, EngineDead) else str(failure)


def _set_result(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)
