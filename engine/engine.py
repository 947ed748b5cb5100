"""The border between the event loop and the one thread that owns torch. The only file with a thread in it.

What crosses is frozen and small: commands in through a queue, events out with one wake-up of the loop a step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from engine.commands import Cancel, Command, Embed, Stop, Submit
from engine.config import EngineConfig
from engine.core import Core
from engine.draft.loading import load_draft, make_speculation
from engine.embedder.loading import LoadedEmbedder, load_embedder
from engine.embedder.scheduler import EmbeddingScheduler
from engine.embedder.tokenizer import EmbeddingTokenizer
from engine.errors import (
    ContextTooLong,
    Draining,
    EngineDead,
    EngineError,
    InvalidRequest,
    Loading,
    ModelError,
)
from engine.grammar.compiler import GrammarCompiler
from engine.liveness import Watchdog
from engine.load.load import LoadedModel, load
from engine.loop import EngineLoop
from engine.model.runner import PackedRunner
from engine.output.stop_regex import check_stop_regex
from engine.output.stream import RequestStream
from engine.text.tokenizer import Tokenizer
from engine.types.events import Event, Failed
from engine.types.request import EmbeddingJob, Request
from engine.types.status import DraftingInfo, EmbeddingModelInfo, MemoryPlan, ModelInfo, Stats
from engine.validity import check_prompt, check_sampling
from engine.waiting import QueueLimit

log = logging.getLogger("cellar.engine")

# An idle engine tries this often whether what could not be saved can be saved now.
_FLUSH_RETRY_SECONDS = 10.0
# How often the event loop looks whether a step is stuck.
_LIVENESS_CHECK_SECONDS = 5.0
# Counting cells costs a tenth of a millisecond: not in every step.
_STATS_INTERVAL_SECONDS = 0.1


class Engine:
    """Loads a model and runs requests on a thread of its own. All methods belong to the event loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        on_phase: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._on_phase, self._clock = config, on_phase, clock
        self._watchdog = Watchdog(clock)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_thread, name="engine", daemon=True)
        self._streams: dict[str, RequestStream] = {}
        self._loaded: LoadedModel | None = None
        self._embedder: LoadedEmbedder | None = None
        self._failure: EngineError | None = None
        self._draining = False
        self._phase = "resolve"
        self._drafting = DraftingInfo()
        self._stats = Stats()
        self._queue_limit = QueueLimit(config.max_waiting)

    def start(self) -> None:
        """Start the thread, which loads the model first. Call inside the running event loop that will be served."""
        self._loop = asyncio.get_running_loop()
        self._load_done = asyncio.Event()
        self._stream_closed = asyncio.Event()
        self._flushed = asyncio.Event()
        self._failed = asyncio.Event()
        self._thread.start()

    async def wait_ready(self) -> None:
        """Return when the model answers. Raises the ModelError or EngineDead that ended it."""
        await self._load_done.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_dead(self) -> None:
        """Return when the engine is not `alive` any more."""
        while self.alive:
            await self._wait_until(self._failed, self._loop.time() + _LIVENESS_CHECK_SECONDS)

    @property
    def ready(self) -> bool:
        """Whether requests are taken now."""
        return self._loaded is not None and self._failure is None and not self._draining

    @property
    def alive(self) -> bool:
        """Whether the thread does its work; loading counts as work."""
        if self._failure is not None or not self._thread.is_alive():
            return False
        return not self._watchdog.is_stuck()

    @property
    def phase(self) -> str:
        """What the engine is doing: a phase of loading, "ready", "draining", or "dead: " and the reason."""
        if self._failure is not None:
            return f"dead: {self._failure}"
        return "draining" if self._draining else self._phase

    @property
    def info(self) -> ModelInfo:
        """The model. Raises Loading until there is one."""
        return self._require_model().info

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan. Raises Loading until there is one."""
        return self._require_model().memory

    @property
    def drafting(self) -> DraftingInfo:
        """Who guesses at text; nobody until the model is ready."""
        return self._drafting

    @property
    def tokenizer(self) -> Tokenizer:
        """For worker threads of the server: its methods block. Raises Loading until there is one."""
        return self._require_model().tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        """For worker threads of the server: its methods block. Raises Loading until there is a model."""
        return self._require_model().grammars

    @property
    def embedding(self) -> EmbeddingModelInfo | None:
        """The embedding model; None: there is none, or not yet."""
        return None if self._embedder is None else self._embedder.info

    @property
    def reader(self) -> EmbeddingTokenizer:
        """The embedding model's, which must be there. For worker threads of the server: its methods block."""
        assert self._embedder is not None, "who reads for the embedding model knows that there is one"
        return self._embedder.tokenizer

    def stats(self) -> Stats:
        """The state after the latest step."""
        return self._stats

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[RequestStream]:
        """Run a request for as long as the block lasts; leaving it always cancels.

        Raises before anything is computed: Loading, Draining, EngineDead, Overloaded, ContextTooLong, InvalidRequest.
        """
        self._check_request(request)
        matcher = None
        if request.stop_regex:
            await asyncio.to_thread(check_stop_regex, request.stop_regex)
        if request.grammar is not None:
            matcher = await asyncio.to_thread(self.grammars.matcher, request.grammar)
            # Others came meanwhile.
            self._check_request(request)
        async with self._open_stream(request.id, request.owner, Submit(request, matcher)) as stream:
            yield stream

    @asynccontextmanager
    async def embed(self, job: EmbeddingJob) -> AsyncIterator[RequestStream]:
        """Run texts, read by `reader`, through the embedding model, as `open` runs a request."""
        self._check_accepting(job.id)
        slots = self._require_model().info.slots
        if self._embedder is None or not job.inputs:
            raise InvalidRequest("input", "there is no embedding model, or nothing for it to read")
        self._queue_limit.check(job.owner, slots)
        async with self._open_stream(job.id, job.owner, Embed(job)) as stream:
            yield stream

    @asynccontextmanager
    async def _open_stream(self, id: str, owner: str, command: Submit | Embed) -> AsyncIterator[RequestStream]:
        stream = self._streams[id] = RequestStream(id)
        began = time.monotonic()
        self._inbox.put(command)
        try:
            with self._queue_limit.hold(owner):
                yield stream
        finally:
            if stream.finished:
                self._queue_limit.record_duration(time.monotonic() - began)
            else:
                self._inbox.put(Cancel(id))
            del self._streams[id]
            self._stream_closed.set()

    async def drain(self, seconds: float) -> None:
        """Take no more requests and wait for the running ones, then until what is remembered has been saved.

        Both in the same `seconds`: requests that last longer end with Failed, what is not saved by then is lost.
        """
        self._draining = True
        deadline = self._loop.time() + seconds
        while self._streams and await self._wait_until(self._stream_closed, deadline):
            self._stream_closed.clear()
        self._fail_streams("the server is shutting down")
        if self._loaded is not None and self.alive:
            await self._wait_until(self._flushed, deadline)

    async def _wait_until(self, event: asyncio.Event, deadline: float) -> bool:
        """Wait for something to happen, up to a deadline; whether it did."""
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

    def _check_request(self, request: Request) -> None:
        self._check_accepting(request.id)
        loaded = self._require_model()
        info, capacity = loaded.info, loaded.capacity
        if not request.prompt:
            raise InvalidRequest("prompt", "the prompt has no tokens")
        if len(request.prompt) > capacity - (0 if request.prefill_only else 1):
            raise ContextTooLong(len(request.prompt), capacity, max_context=info.max_context)
        check_prompt(request.prompt, info.vocabulary, None if loaded.encoder is None else loaded.encoder.image_token)
        check_sampling(request, info.vocabulary)
        if loaded.encoder is not None:
            loaded.encoder.check(request.media, request.prompt)
        elif request.media is not None:
            raise InvalidRequest("media", "this model has no encoder that could look at media")
        self._check_bidirectional(request, loaded)
        self._check_scores(request, loaded)
        drafter, kinds = request.speculation.drafter, self._drafting.kinds
        if drafter not in ("auto", "none", *kinds):
            others = f"it has {' and '.join(kinds)}" if kinds else "it has none"
            raise InvalidRequest("speculation.drafter", f"this server has no drafter {drafter!r}, {others}")
        self._queue_limit.check(request.owner, info.slots)

    def _check_accepting(self, id: str) -> None:
        if self._draining:
            raise Draining
        if id in self._streams:
            raise InvalidRequest("id", f"a request with the id {id!r} is running")

    def _check_bidirectional(self, request: Request, loaded: LoadedModel) -> None:
        """Ranges of tokens that see each other are computed in one forward each, by a model that runs packed."""
        if request.bidirectional and not isinstance(loaded.runner, PackedRunner):
            raise InvalidRequest("mutual", "this model runs by itself, with no ranges of tokens that see each other")
        before = 0
        for start, stop in request.bidirectional:
            if not before <= start < stop <= len(request.prompt):
                raise InvalidRequest("mutual", f"the range [{start}, {stop}) is not behind the others in the prompt")
            if stop - start > self._config.chunk:
                most = self._config.chunk
                raise InvalidRequest("mutual", f"the range [{start}, {stop}) has more tokens than a step ({most})")
            before = stop

    def _check_scores(self, request: Request, loaded: LoadedModel) -> None:
        vocabulary, start = loaded.info.vocabulary, request.score_from
        if start is not None and not 0 <= start <= len(request.prompt):
            raise InvalidRequest("score_from", f"position {start} is not in the prompt's {len(request.prompt)} tokens")
        if start is not None and not all(token < vocabulary for token in request.prompt[start:]):
            raise InvalidRequest("score_from", "the place of an image is no token that could be scored")
        if not all(0 <= token < vocabulary for token in request.label_tokens):
            raise InvalidRequest("labels", f"token ids lie in [0, {vocabulary})")
        if request.pooling is not None and not loaded.runner.has_hidden_states:
            raise InvalidRequest("pooling", "this model does not show the states that a vector is made of")

    def _require_model(self) -> LoadedModel:
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        if self._loaded is None:
            raise Loading(self._phase)
        return self._loaded

    def _fail_streams(self, reason: str) -> None:
        for stream in tuple(self._streams.values()):
            if not stream.finished:
                self._inbox.put(Cancel(stream.id))
            stream.deliver(Failed(reason))

    def _deliver(self, events: list[tuple[str, Event]], stats: Stats, flushed: bool) -> None:
        """On the loop: hand a step's events to their streams. One whose client has left is not there any more."""
        self._stats = stats
        if flushed:
            self._flushed.set()
        else:
            self._flushed.clear()
        for request_id, event in events:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.deliver(event)

    def _finish_loading(
        self,
        loaded: LoadedModel | None,
        drafting: DraftingInfo,
        failure: EngineError | None,
        embedder: LoadedEmbedder | None = None,
    ) -> None:
        """On the loop: the thread is ready, or it ended."""
        self._loaded, self._drafting = loaded or self._loaded, drafting
        self._embedder = embedder or self._embedder
        self._failure = failure
        self._phase = "ready"
        self._load_done.set()
        if failure is not None:
            self._failed.set()
            self._fail_streams("the engine stopped")

    # What follows runs on the engine thread.

    def _run_thread(self) -> None:
        try:
            embedder = load_embedder(self._config, self._set_phase)
            promised = 0 if embedder is None else embedder.info.workspace_bytes
            loaded = load(self._config, self._set_phase, reserved_bytes=promised)
            draft = load_draft(self._config, loaded, self._set_phase)
            speculation = make_speculation(self._config, loaded, draft, time.monotonic)
            core = Core(loaded, self._config, speculation)
            drafting = DraftingInfo(speculation.kinds)
            if isinstance(draft, LoadedModel):
                drafting = replace(drafting, model=draft.info, memory=draft.memory)
            self._set_phase("ready")
            self._call_on_loop(self._finish_loading, loaded, drafting, None, embedder)
            turns = (
                None if embedder is None else EmbeddingScheduler(embedder.embedder, max_batch_tokens=self._config.chunk)
            )
            self._serve(EngineLoop(core, turns))
        except ModelError as error:
            self._call_on_loop(self._finish_loading, None, DraftingInfo(), error)
        except Exception as error:
            log.exception("the engine thread ended")
            self._call_on_loop(self._finish_loading, None, DraftingInfo(), EngineDead(type(error).__name__))

    def _serve(self, loop: EngineLoop) -> None:
        told, stats, rested = 0.0, loop.stats(), False
        while self._drain_inbox(loop, rested):
            self._watchdog.step_started()
            before, now, busy = (stats, rested), self._clock(), loop.busy
            events = loop.step() if busy else []
            rested = not busy and not loop.flush_when_idle()
            if not loop.busy or now - told > _STATS_INTERVAL_SECONDS:
                told, stats = now, loop.stats()
            if busy or before != (stats, rested):
                self._call_on_loop(self._deliver, events, stats, rested)

    def _drain_inbox(self, loop: EngineLoop, flushed: bool) -> bool:
        """Do what the loop asked for; wait for it while there is nothing to do. False ends the thread."""
        wait = flushed and not loop.busy
        if wait:
            self._watchdog.idle()
        while wait or not self._inbox.empty():
            try:
                command = self._inbox.get(timeout=_FLUSH_RETRY_SECONDS) if wait else self._inbox.get_nowait()
            except queue.Empty:
                return True
            wait = False
            self._watchdog.step_started()
            match command:
                case Submit(request, matcher):
                    loop.submit(request, matcher)
                case Embed(job):
                    loop.embed(job)
                case Cancel(request_id):
                    loop.cancel(request_id)
                case Stop():
                    return False
        return True

    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        if self._on_phase is not None:
            self._on_phase(phase)

    def _call_on_loop(self, callback: Callable[..., None], *values: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *values)
