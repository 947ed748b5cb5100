"""A worker process: one engine, commands in, replies out.

    python -m engine.remote.worker      its standard input is the socket

It ends when the socket does: the end of the front end's process, however it ends, closes the socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress

from engine.client import EventStream
from engine.engine import Engine
from engine.errors import EngineDead, EngineError
from engine.load.plan.needed_memory import memory_budget, needed_memory
from engine.remote.connection import InvalidMessage, MessageConnection
from engine.remote.error_message import to_message
from engine.remote.messages import (
    Accepted,
    AdapterList,
    Batch,
    CancelStream,
    Command,
    DrainEngine,
    EmbedTexts,
    Ended,
    Invoke,
    LoadModel,
    LoadPhase,
    LoadProgress,
    LoadRemoteAdapter,
    MeasureMemory,
    MemoryBudget,
    OpenStream,
    PlanModel,
    Planned,
    Ready,
    Refused,
    RemoteMessage,
    Result,
    SetStreamUnread,
    StreamEvent,
    TakeSnapshot,
    TokenizerValues,
    UnloadRemoteAdapter,
    decode_command,
    encode,
    encode_value,
    stream_event,
)
from engine.types.events import Delta, Event
from engine.types.progress import Progress
from engine.types.status import AdapterInfo, Stats

log = logging.getLogger("cellar.worker")

# Interval of the signs of life.
HEARTBEAT_SECONDS = 1.0
# For the engine thread to end after its step; then the process ends without it.
_CLOSE_SECONDS = 5.0
# Blocking calls of tokenizers at the same time: as many as the front end has worker threads.
_THREADS = 40


class StreamFeed:
    """Passes the events of one request on, unless the client leaves them unread: then the engine's stream fills up.

    readable  cleared while the client reads nothing
    """

    def __init__(self, number: int, connection: MessageConnection, add: Callable[[int, Event], None]) -> None:
        self._number, self._writable, self._add = number, connection.writable, add
        self.readable = asyncio.Event()
        self.readable.set()

    async def run(self, stream: EventStream) -> None:
        """Until the last event."""
        stream.fast_path = self._add_delta
        async for event in stream:
            self._add(self._number, event)
            await self.readable.wait()
            await self._writable.wait()

    def _add_delta(self, delta: Delta) -> bool:
        if not (self.readable.is_set() and self._writable.is_set()):
            return False
        self._add(self._number, delta)
        return True


class Worker:
    """Runs the commands of a connection. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = MessageConnection(self._receive, self._end)
        self._ended = self._loop.create_future()
        self._engine: Engine | None = None
        self._feeds: dict[int, StreamFeed] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(_THREADS, "call")
        # Events of this iteration of the event loop, which are one step's.
        self._events: list[StreamEvent] = []
        self._sent_stats: Stats | None = None
        self._sent_adapters: tuple[AdapterInfo, ...] = ()

    async def run(self, connected: socket.socket) -> int:
        """Run the commands until the connection ends; the exit code of the process."""
        await self._loop.create_connection(lambda: self._connection, sock=connected)
        error = await self._ended
        if error is not None:
            log.error("the front end sent %s", error)
        # The engine thread may be in a long step, and nothing else ends this process.
        timer = threading.Timer(_CLOSE_SECONDS, os._exit, (0,))
        timer.daemon = True
        timer.start()
        if self._engine is not None:
            self._engine.close()
        return 0 if error is None else 1

    def _end(self, error: InvalidMessage | None) -> None:
        self._ended.set_result(error)

    def _send(self, message: RemoteMessage) -> None:
        """Send a message after the events before it."""
        if self._events:
            self._flush()
        self._connection.send(encode(message))

    def _add_event(self, number: int, event: Event) -> None:
        if not self._events:
            self._loop.call_soon(self._flush)
        self._events.append(stream_event(number, event))

    def _flush(self) -> None:
        if self._events:
            self._send_batch()

    def _send_batch(self) -> None:
        stats = None if self._engine is None else self._engine.stats()
        is_new, self._sent_stats = stats is not self._sent_stats, stats
        events, self._events = tuple(self._events), []
        self._connection.send(encode(Batch(events, stats if is_new else None)))

    def _send_adapters(self) -> None:
        """Send the adapters if they changed: requests and calls load them."""
        if self._engine is not None and self._engine.ready:
            adapters = self._engine.info.adapters
            if adapters != self._sent_adapters:
                self._sent_adapters = adapters
                self._send(AdapterList(adapters))

    def _receive(self, content: bytes) -> None:
        command = decode_command(content)
        if isinstance(command, LoadModel):
            if self._engine is not None:
                raise InvalidMessage("a second LoadModel")
            self._load(command)
        elif isinstance(command, MeasureMemory | PlanModel):
            self._spawn(self._plan(command))
            self._spawn(self._beat())
        elif self._engine is None:
            raise InvalidMessage(f"a {type(command).__name__} before LoadModel")
        else:
            self._execute(self._engine, command)

    def _load(self, command: LoadModel) -> None:
        self._engine = Engine(command.config, self._report_phase, self._report_progress)
        self._engine.start()
        self._spawn(self._watch(self._engine))
        self._spawn(self._beat())

    async def _plan(self, command: MeasureMemory | PlanModel) -> None:
        try:
            match command:
                case MeasureMemory(config):
                    self._send(MemoryBudget(await asyncio.to_thread(memory_budget, config)))
                case PlanModel(config, budget_bytes):
                    self._send(Planned(await asyncio.to_thread(needed_memory, config, budget_bytes)))
        except EngineError as error:
            self._send(Ended(to_message(error)))
        except Exception as error:
            log.exception("the plan failed")
            self._send(Ended(to_message(EngineDead(type(error).__name__))))

    def _execute(self, engine: Engine, command: Command) -> None:
        match command:
            case OpenStream(number, request):
                self._start(number, self._stream(number, engine.open(request)))
            case EmbedTexts(number, job):
                self._start(number, self._stream(number, engine.embed(job)))
            case CancelStream(number):
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case SetStreamUnread(number, is_unread):
                self._set_unread(number, is_unread=is_unread)
            case UnloadRemoteAdapter(name):
                with suppress(EngineError):
                    engine.unload_adapter(name)
            case Invoke() | TakeSnapshot() | LoadRemoteAdapter() | DrainEngine():
                self._start(command.number, self._answer(command.number, self._result(engine, command)))

    def _result(
        self, engine: Engine, command: Invoke | TakeSnapshot | LoadRemoteAdapter | DrainEngine
    ) -> Awaitable[object]:
        match command:
            case Invoke(_, invocation):
                return self._loop.run_in_executor(self._threads, invocation.run, engine)
            case TakeSnapshot(_, owner, salt):
                return engine.snapshot(owner, salt)
            case LoadRemoteAdapter(_, name, path, in_place):
                return engine.load_adapter(name, path, in_place=in_place)
            case DrainEngine(_, seconds):
                return engine.drain(seconds)

    def _set_unread(self, number: int, *, is_unread: bool) -> None:
        if (feed := self._feeds.get(number)) is None:
            return
        if is_unread:
            feed.readable.clear()
        else:
            feed.readable.set()

    def _start(self, number: int, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[number] = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(number))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _stream(self, number: int, opening: AbstractAsyncContextManager[EventStream]) -> None:
        feed = self._feeds[number] = StreamFeed(number, self._connection, self._add_event)
        try:
            async with opening as stream:
                self._send_adapters()
                self._send(Accepted(number))
                await feed.run(stream)
        except Exception as error:
            self._refuse(number, error)
        finally:
            del self._feeds[number]

    async def _answer(self, number: int, work: Awaitable[object]) -> None:
        try:
            value = encode_value(await work)
            self._send_adapters()
            self._send(Result(number, value))
        except Exception as error:
            self._refuse(number, error)

    def _refuse(self, number: int, error: Exception) -> None:
        if not isinstance(error, EngineError):
            log.error("a command failed", exc_info=error)
            error = EngineError(f"{type(error).__name__}: {error}")
        self._send(Refused(number, to_message(error)))

    async def _watch(self, engine: Engine) -> None:
        """Report the end of the load, and the end of the engine."""
        try:
            await engine.wait_ready()
        except EngineError as error:
            self._send(Ended(to_message(error)))
            return
        self._sent_adapters = engine.info.adapters
        self._send(_ready(engine))
        await engine.wait_dead()
        reason = engine.phase.removeprefix("dead: ") if engine.phase.startswith("dead: ") else "a step does not end"
        self._send(Ended(to_message(EngineDead(reason))))

    async def _beat(self) -> None:
        while True:
            self._send_adapters()
            self._send_batch()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    # Called in the engine thread.

    def _report_phase(self, phase: str) -> None:
        self._loop.call_soon_threadsafe(self._send, LoadPhase(phase))

    def _report_progress(self, progress: Progress) -> None:
        self._loop.call_soon_threadsafe(self._send, LoadProgress(progress))


def _ready(engine: Engine) -> Ready:
    tokenizer, embedding = engine.tokenizer, engine.embedding
    return Ready(
        info=engine.info,
        memory=engine.memory,
        drafting=engine.drafting,
        embedding=embedding,
        embedding_length=0 if embedding is None else engine.embedding_tokenizer.max_length,
        tokenizer=TokenizerValues(
            template_names=tokenizer.template_names,
            has_system_role=tokenizer.has_system_role,
            has_chat_template=tokenizer.has_chat_template,
            fill_in_middle=tokenizer.fill_in_middle,
            chat_format=tokenizer.chat_format_source(),
        ),
    )


def serve(connected: socket.socket) -> int:
    """Run a worker until the socket ends; the exit code of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # The front end drains first.
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="worker %(process)d: %(message)s")
    connected.setblocking(False)

    async def run() -> int:
        return await Worker().run(connected)

    return asyncio.run(run())


def detach_standard_input() -> socket.socket:
    """The socket that is the standard input; child processes then inherit an empty input."""
    connected = socket.socket(fileno=os.dup(0))
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return connected


if __name__ == "__main__":
    # Threads of tokenizers and grammars are not waited for.
    code = serve(detach_standard_input())
    sys.stderr.flush()
    os._exit(code)
