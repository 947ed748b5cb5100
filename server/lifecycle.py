"""The life of one server process, from the first phase of loading to the exit code, and its start-up screen.

The port opens at once: /health answers while the model loads, /ready when it is loaded. On SIGTERM or SIGINT the engine
drains first, while /ready and new requests are answered 503; then uvicorn ends. A second signal shortens the drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import replace
from typing import Literal

import uvicorn
from fastapi import FastAPI

from engine.errors import EngineError, ModelError
from engine.load.machine.resources import release_freed_memory
from engine.types.sizes import format_size
from engine.types.status import DraftingInfo, EmbeddingModelInfo, MemoryPlan, ModelInfo
from server.configuration.settings import Settings
from server.hosting import Hosting, ModelsHosting
from server.http.descriptors import ListeningSocket, connection_limit, log_exhaustion
from server.http.protocol import strict_protocol, strict_websocket
from server.http.version import version
from server.models.demonstration import TEXT, is_demonstration, other_model_lines
from server.store.store import describe_location
from server.terminal.sizes import format_count

logger = logging.getLogger("cellar")

# From sysexits.h: configuration error, internal error; shown by Compose and systemd.
EXIT_MODEL, EXIT_ENGINE = 78, 70
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SECOND_SIGNAL_SECONDS = 2.0
# For the last bytes of responses after the end of the engine; a blocked send gets no more.
FLUSH_SECONDS = 2
BACKLOG = 1024
# Of a Python thread that holds the interpreter lock: while a worker thread parses a large body, a step waits for the
# lock several times. Python's default is 5 ms.
SWITCH_SECONDS = 0.001
CLOCK_TICK_SECONDS = 1.0
# Full garbage collections stop every thread, for 90 ms while 512 streams begin (Python's default is a count of 10). So
# they wait until no request runs, or else for this many collections of the younger objects: some 700,000 objects.
FULL_COLLECTION_COUNT, IDLE_COLLECTION_COUNT, IDLE_CHECK_SECONDS = 100, 5, 5.0
# From the end of the drain to the end of the process, whatever its threads do.
EXIT_SECONDS = 4.0


class SignalFreeServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would close the port before the drain.

    uvicorn polls `should_exit` ten times a second; here an event ends the loop.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        self._ending = asyncio.Event()
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """Whether the server shall end. Set it on the event loop's thread."""
        return self._ending.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        """End the loop, or let it continue."""
        if value:
            self._ending.set()
        else:
            self._ending.clear()

    async def main_loop(self) -> None:
        """Tick once a second, for the Date header, until the server ends."""
        counter = 0
        while not await self.on_tick(counter):
            # uvicorn counts tenths of a second.
            counter += 10
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), CLOCK_TICK_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to Lifecycle."""
        yield


class Lifecycle:
    """One run of the server.

    print_line   shows messages to the user
    end_process  ends the process at once with an exit code
    """

    def __init__(
        self,
        hosting: Hosting | ModelsHosting,
        settings: Settings,
        print_line: Callable[[str], None],
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self.hosting, self.settings, self.print_line = hosting, settings, print_line
        self.server = SignalFreeServer(_config(self.hosting.app, settings))
        self._exit_code = 0
        self._end_process = end_process
        self._drain: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listening: socket.socket) -> int:
        """Serve on `listening` until a signal or the end of the engine; returns the exit code.

        Ends the process itself if the engine thread cannot be joined, and `EXIT_SECONDS` after the drain: asyncio and
        the interpreter wait for worker threads, which may never return from a tokenizer.
        """
        loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION_COUNT)
        loop.set_exception_handler(log_exhaustion)
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            self.hosting.start()
            self._spawn(self._collect_when_idle())
            if isinstance(self.hosting, ModelsHosting):
                self.print_line(banner_of_several(self.hosting, _url(listening)))
            else:
                self._spawn(self._watch(self.hosting, _url(listening)))
            await self.server.serve(sockets=[listening])
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            closed = await self.hosting.close()
        if not closed:
            # At interpreter shutdown a thread inside torch would abort the process.
            logging.shutdown()
            self._end_process(self._exit_code)
        return self._exit_code

    def stop(self) -> None:
        """Drain, then end; a second call shortens the drain. The signals call it."""
        seconds = self.settings.grace_seconds
        if self._drain is not None:
            seconds = min(SECOND_SIGNAL_SECONDS, seconds)
            self._drain.cancel()
        logger.info("draining: running requests have %g s to finish", seconds)
        self._drain = self._spawn(self._drain_engine(seconds))
        self._end_within(seconds + EXIT_SECONDS)

    def _end_within(self, seconds: float) -> None:
        """End the process after `seconds` if it still runs. The thread of the timer needs no event loop."""

        def end() -> None:
            self._end_process(self._exit_code)

        deadline = threading.Timer(seconds, end)
        deadline.daemon = True
        try:
            deadline.start()
        except RuntimeError:
            # No thread can be started.
            asyncio.get_running_loop().call_later(seconds, end)

    async def _drain_engine(self, seconds: float) -> None:
        await self.hosting.drain(seconds)
        self.server.should_exit = True

    async def _watch(self, hosting: Hosting, url: str) -> None:
        """Wait until the model is loaded, then until the engine ends."""
        try:
            engine = hosting.engine
            await engine.wait_ready()
            await asyncio.to_thread(freeze_garbage_collector)
            self.print_line(
                banner(
                    engine.info,
                    engine.memory,
                    engine.drafting,
                    self.settings,
                    url,
                    engine.embedding,
                    chats=engine.tokenizer.has_chat_template,
                )
            )
            self._spawn(hosting.prepare_when_idle())
            await engine.wait_dead()
            logger.critical("the engine ended: %s", engine.phase)
            self._exit_code = EXIT_ENGINE
            # For the error events of open streams, and 503 for probes.
            await asyncio.sleep(FLUSH_SECONDS)
        except EngineError as error:
            self.print_line(f"cellar: {error}")
            self._exit_code = EXIT_MODEL if isinstance(error, ModelError) else EXIT_ENGINE
        self._end_within(FLUSH_SECONDS + EXIT_SECONDS)
        self.server.should_exit = True

    async def _collect_when_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_CHECK_SECONDS)
            collect_if_idle(self.server.server_state.tasks)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """End the process after an exception in one of the tasks: a server that cannot drain could not be stopped."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the server ends after an unexpected exception", exc_info=error)
            self._exit_code = EXIT_ENGINE
            self._end_within(FLUSH_SECONDS + EXIT_SECONDS)
            self.server.should_exit = True


def freeze_garbage_collector() -> None:
    """Exclude loaded objects from garbage collection: a full collection stops every thread for 0.2 s (measured).

    The memory of collected objects is returned to the system: the first start of a model checks it in 200 MiB.
    """
    gc.collect()
    release_freed_memory()
    gc.freeze()


def collect_if_idle(requests: Collection[object]) -> None:
    """Collect all garbage if no request runs, and enough objects have been created; return the memory to the system."""
    if not requests and gc.get_count()[2] >= IDLE_COLLECTION_COUNT:
        gc.collect()
        release_freed_memory()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; OSError if the address is in use or not of this machine.

    It names TCP as its protocol, unlike socket.create_server: asyncio disables Nagle's algorithm only for such sockets,
    and with Nagle's algorithm each token of a stream may be delayed by 40 ms (measured).
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = ListeningSocket(family, kind, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    # A wildcard address cannot be called.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    limits = replace(settings.limits, connections=connection_limit(settings.limits.connections))
    return uvicorn.Config(
        app,
        http=strict_protocol(
            limits, app.state.refuse if settings.direct_writes else None, direct_writes=settings.direct_writes
        ),
        ws=strict_websocket(limits),
        ws_max_size=limits.body_bytes,
        ws_ping_interval=limits.ping_seconds,
        # A compressed message may expand a thousandfold.
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.limits.keep_alive_seconds,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


def banner(
    info: ModelInfo,
    memory: MemoryPlan,
    drafting: DraftingInfo,
    settings: Settings,
    url: str,
    embedding: EmbeddingModelInfo | None = None,
    *,
    chats: bool = True,
) -> str:
    """The start-up screen.

    chats  whether the model has a chat template; without one, the example is a completion
    """
    rows = [*_lines(info, memory, drafting, settings), *(() if embedding is None else (_embedding_line(embedding),))]
    return "\n".join(
        [
            f"Cellar {version()} serves {', '.join(settings.model_names)}",
            *(f"  {name:<10} {text}" for name, text in rows),
            *(_other_model_lines(memory) if is_demonstration(settings) else ()),
            *_url_lines(settings, url, chats=chats),
        ]
    )


def banner_of_several(hosting: ModelsHosting, url: str) -> str:
    """The start-up screen of several models."""
    settings = hosting.settings
    states = {"pinned": "loaded now, never unloaded", "preloads": "loaded now"}
    budget = format_size(hosting.loader.limits.memory_bytes)
    lines = [f"Cellar {version()} serves {len(hosting.entries)} models in {budget}"]
    for entry in hosting.entries:
        state = next((text for name, text in states.items() if getattr(entry, name)), "loaded on demand")
        kind = ", embedding model" if entry.kind == "embedding" else ""
        lines.append(f"  model      {', '.join((entry.name, *entry.aliases))}: {entry.source}{kind}, {state}")
    example = replace(settings, model=None, served_names=(hosting.entries[0].name,))
    return "\n".join([*lines, *_url_lines(example, url, chats=True)])


def _lines(
    info: ModelInfo, memory: MemoryPlan, drafting: DraftingInfo, settings: Settings
) -> Iterator[tuple[str, str]]:
    yield "model", f"{info.architecture}, {format_count(info.parameters)} parameters, {info.dtype}, from {info.folder}"
    maximum = f" (--context: up to {info.max_context})" if info.max_context > info.context else ""
    yield "context", f"{info.context} tokens a sequence{maximum}, {info.slots} slots, overflow: {settings.overflow}"
    if info.text_only_reason:
        unread = ", ".join(info.unread_modalities)
        yield "inputs", f"text only: its {unread} parts are not used ({info.text_only_reason})"
    elif info.input_modalities != ("text",):
        yield "inputs", ", ".join(info.input_modalities)
    yield "steps", _step_text(info)
    if info.tensor_parallel > 1:
        yield "ranks", f"{info.tensor_parallel} processes divide the model; the memory below is that of each"
    yield "batches", _invariance_text(info)
    yield "queue", f"{settings.max_waiting} requests may wait"
    windows = f" + windows {format_size(memory.window_bytes)}" if memory.window_bytes else ""
    yield (
        "memory",
        f"weights {format_size(memory.weights_bytes)} + cache {format_size(memory.cache_bytes)} "
        f"({memory.cells} tokens x {format_size(memory.cell_bytes)}{windows}) "
        f"+ work {format_size(memory.workspace_bytes)} "
        f"= {format_size(memory.weights_bytes + memory.cache_bytes + memory.workspace_bytes)} "
        f"of {format_size(memory.available_bytes)} free",
    )
    if settings.lora_dir:
        yield "adapters", f"of {settings.lora_dir} at their first request, at most {settings.max_loras} in memory"
    for adapter in info.adapters:
        targets = ", ".join(adapter.targets)
        yield "adapter", f"{adapter.name}: rank {adapter.rank}, {targets}, {format_size(adapter.bytes)} of the weights"
    yield "drafts", _draft_text(drafting, settings.draft_tokens)
    if settings.disk_cache_folder is not None:
        yield "disk cache", f"{settings.disk_cache_folder}, {format_size(settings.disk_cache_bytes)} at most"
    yield "responses", describe_location(settings.store)
    if settings.origins:
        yield "pages", f"of {', '.join(settings.origins)} may call the server from a browser"
    keys = len(settings.all_keys) + sum(entry.key is None for entry in settings.key_entries)
    yield "keys", f"{keys} API keys" if keys else "none: every client that reaches the port is served"


def _step_text(info: ModelInfo) -> str:
    """How steps are computed, and the weight bytes of --quantize."""
    variants = " and ".join(dict.fromkeys(info.kernel_variants))
    path = (
        f"one native call{f', with kernels for {variants}' if variants else ''}"
        if info.not_native_reason is None
        else f"torch operations instead of the native step: {info.not_native_reason}"
    )
    estimate = info.quantization_estimate
    if estimate is None:
        return path
    sizes = " or ".join(f"{kind} {share:.0%}" for kind, share in estimate.relative_bytes)
    auto = "no quantisation" if estimate.auto is None else estimate.auto
    return f"{path}; weight bytes per token with --quantize: {sizes}; auto: {auto}"


def _invariance_text(info: ModelInfo) -> str:
    """Whether logits depend on the batch."""
    if info.batch_invariant:
        return "logits are independent of the batch, bit for bit"
    return (
        "logits depend on the batch by rounding, which may change the choice between tokens of nearly equal probability"
    )


def _draft_text(drafting: DraftingInfo, tokens: Literal["auto"] | int) -> str:
    """The drafters, the draft depth, and the memory of the draft model."""
    if not drafting.kinds:
        return "none"
    depth = "depth chosen at run time" if tokens == "auto" else f"depth {tokens}"
    text = f"{' and '.join(drafting.kinds)}, {depth}"
    if drafting.model is None or drafting.memory is None:
        return text
    model, memory = drafting.model, drafting.memory
    return (
        f"{text}; {model.architecture}, {format_count(model.parameters)} parameters, from {model.folder}: "
        f"weights {format_size(memory.weights_bytes)} + cache {format_size(memory.cache_bytes)}"
    )


def _embedding_line(embedding: EmbeddingModelInfo) -> tuple[str, str]:
    """The kind, size and memory of the embedding model."""
    model, length = embedding.model, f" of {embedding.dimensions} numbers" if embedding.output_kind == "vectors" else ""
    return embedding.output_kind, (
        f"{model.architecture}, {format_count(model.parameters)} parameters, {model.dtype}, from {model.folder}: "
        f"{embedding.output_kind}{length}, {model.context} tokens a text, "
        f"weights {format_size(embedding.weights_bytes)} + work {format_size(embedding.workspace_bytes)}"
    )


def _other_model_lines(memory: MemoryPlan) -> Iterator[str]:
    """What the bundled model is, and commands for other models."""
    # By the path of this start where the PATH has no cellar, as after `make serve`.
    command = "cellar" if shutil.which("cellar") else sys.argv[0]
    heading, *commands = other_model_lines(memory.available_bytes, f"{command} serve")
    yield f"  this is    {TEXT}; {heading}"
    yield from (f"             {command_line}" for command_line in commands)


def _url_lines(settings: Settings, url: str, *, chats: bool) -> Iterator[str]:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.has_keys else ""
    path, use = ("chat/completions", "chat") if chats else ("completions", "completion of texts")
    prompt = {"messages": [{"role": "user", "content": "Hello"}]} if chats else {"prompt": "Once upon a time"}
    limit = {} if chats else {"max_tokens": 64}
    body = json.dumps({"model": settings.model_names[0], **prompt, **limit})
    yield f"  page       {url}/    {use} and a live view of the engine"
    yield f"  API        {url}/v1    metrics {url}/metrics    types {url}/openapi.json"
    yield f"  try        curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'"
