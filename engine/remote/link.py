"""The link to a worker process: its start, commands and their answers, its signs of life, and its end."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import psutil

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.remote.connection import InvalidMessage, MessageConnection
from engine.remote.error_message import UnknownError, to_error
from engine.remote.invocations import Invocation, result_type
from engine.remote.messages import (
    Accepted,
    Invoke,
    Refused,
    RemoteMessage,
    Reply,
    Result,
    decode,
    decode_reply,
    encode,
)
from engine.remote.process import Launch, WorkerProcess, exit_text
from engine.watchdog import Watchdog

# Interval at which the signs of life of the worker are checked.
_CHECK_SECONDS = 0.5
# For the worker to end after its socket; then it is killed.
_CLOSE_SECONDS = 10.0
# For the exit code of a worker whose socket has ended.
_EXIT_CODE_SECONDS = 2.0


class WorkerLink:
    """One worker process. Methods belong to the event loop's thread, except `call`, `kill`, `close`, `private_bytes`.

    on_reply       called with each reply that is no answer to a command
    on_end         called once, with the failure
    launch         starts the process; called in a worker thread
    stuck_seconds  without a sign of life after which the worker is killed
    """

    def __init__(
        self,
        on_reply: Callable[[Reply], None],
        on_end: Callable[[EngineError], None],
        *,
        launch: Launch,
        stuck_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_reply, self._on_end, self._launch = on_reply, on_end, launch
        self._watchdog = Watchdog(clock, stuck_seconds)
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[msgspec.Raw | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._process: WorkerProcess | None = None
        # Held while the process is started, so that `close` ends every process.
        self._launching, self._closed = threading.Lock(), False
        self.failure: EngineError | None = None

    def start(self, first: RemoteMessage) -> None:
        """Begin to start the process, and send a message to it."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.ended = asyncio.Event()
        self._connection = MessageConnection(self._receive, self._disconnected)
        self._spawn(self._run(first))

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return None if self._process is None else self._process.pid

    def number(self) -> int:
        """A number for a command."""
        return next(self._numbers)

    def send(self, message: RemoteMessage) -> None:
        """Send a message; no error if the worker has ended."""
        self._connection.send(encode(message))

    async def ask(self, number: int, command: RemoteMessage) -> msgspec.Raw | None:
        """Send a command and wait for its answer: None for Accepted, the value of a Result.

        Raises the error of a Refused, EngineDead, and InvalidRequest for a command that cannot be encoded.
        """
        if self.failure is not None:
            raise dead(self.failure)
        framed = _encode_request(command)
        answer: asyncio.Future[msgspec.Raw | None] = self._loop.create_future()
        self._answers[number] = answer
        try:
            self._connection.send(framed)
            return await answer
        finally:
            del self._answers[number]

    def call(self, method: Invocation) -> Any:
        """The value of a method in the worker; blocks a thread other than the event loop's."""
        if threading.get_ident() == self._thread:
            raise RuntimeError("a call of the worker would block the event loop")
        number = self.number()
        raw = asyncio.run_coroutine_threadsafe(self.ask(number, Invoke(number, method)), self._loop).result()
        assert raw is not None, "the answer of a call is a Result"
        return decode(raw, result_type(type(method)))

    def end(self, error: EngineError) -> None:
        """Kill the worker because of a failure; commands without an answer raise EngineDead."""
        if self.failure is not None:
            return
        self.failure = error
        self.kill()
        self._connection.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(dead(error))
        self.ended.set()
        self._on_end(error)

    def kill(self) -> None:
        """Kill the worker process, if it is running."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the worker and wait for its end."""
        with self._launching:
            self._closed = True
        if self._process is None:
            return
        with suppress(OSError):
            self._process.socket.shutdown(socket.SHUT_RDWR)
        if self._process.wait(_CLOSE_SECONDS) is None:
            self._process.kill()
            self._process.wait()

    def private_bytes(self) -> int:
        """Memory that the end of the worker and its child processes returns; 0 if they have ended. Blocks."""
        processes: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            if self.pid is not None:
                worker = psutil.Process(self.pid)
                processes = [worker, *worker.children(recursive=True)]
        return sum(map(_private_bytes, processes))

    async def _run(self, first: RemoteMessage) -> None:
        """Start the worker; then check its signs of life until it ends."""
        try:
            process = await asyncio.to_thread(self._start_process)
            await self._loop.create_connection(lambda: self._connection, sock=process.socket)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self.end(EngineDead(f"the worker process cannot be started: {error}"))
            return
        self.send(first)
        self._watchdog.step_started()
        while not self.ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), _CHECK_SECONDS)
            if self._watchdog.is_stuck():
                self.end(EngineDead("the worker process makes no progress"))

    def _start_process(self) -> WorkerProcess:
        """In a worker thread."""
        with self._launching:
            if self._closed:
                raise OSError("the engine is closed")
            self._process = self._launch()
            self._process.socket.setblocking(False)
        return self._process

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _receive(self, content: bytes) -> None:
        self._watchdog.step_started()
        try:
            self._handle(decode_reply(content))
        except UnknownError as error:
            raise InvalidMessage(str(error)) from error

    def _handle(self, reply: Reply) -> None:
        match reply:
            case Accepted(number):
                self._answer(number, None)
            case Result(number, value):
                # The content of the message, which is freed after this call.
                self._answer(number, msgspec.Raw(bytes(value)))
            case Refused(number, error):
                self._refuse(number, to_error(error))
            case _:
                self._on_reply(reply)

    def _answer(self, number: int, value: msgspec.Raw | None) -> None:
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(value)

    def _refuse(self, number: int, error: EngineError) -> None:
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def _disconnected(self, error: InvalidMessage | None) -> None:
        if error is not None:
            self.end(EngineDead(f"the worker process sent {error}"))
        elif self._closed:
            self.end(EngineDead("the engine is closed"))
        elif self.failure is None:
            self._spawn(self._explain_end())

    async def _explain_end(self) -> None:
        """The socket ended: report why the process did."""
        assert self._process is not None, "it was connected"
        code = await asyncio.to_thread(self._process.wait, _EXIT_CODE_SECONDS)
        self.end(EngineDead(f"the worker process {exit_text(code)}"))


def dead(failure: EngineError) -> EngineDead:
    """The error of a request after a failure."""
    return EngineDead(reason(failure))


def reason(failure: EngineError) -> str:
    """The text of a failure, without the words that EngineDead adds."""
    return failure.reason if isinstance(failure, EngineDead) else str(failure)


def _encode_request(command: RemoteMessage) -> bytes:
    try:
        return encode(command)
    except UnicodeEncodeError as error:
        text = "a text has half of a surrogate pair, which is not a character"
        raise InvalidRequest("request", text) from error
    except OverflowError as error:
        raise InvalidRequest("request", "an integer has more than 64 bits") from error
    except InvalidMessage as error:
        raise InvalidRequest("request", str(error)) from error


def _private_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
