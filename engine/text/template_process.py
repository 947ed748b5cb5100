"""Subprocesses that render chat templates within limits of time and memory.

A template is a program of the checkpoint: it may loop without end or build texts of gigabytes, for all conversations or
only for some. Here that ends the subprocess, and the conversation is refused. All tokenizers share two subprocesses, so
that others are rendered meanwhile.
"""

from __future__ import annotations

import functools
import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import TemplateError

from engine.sandbox import SandboxProcess, limit_memory
from engine.text.variables import undeclared_variables

# Processor time of all renderings of one request, or of the detection of the tool call format.
_MAX_SECONDS = 5.0
# Beyond the memory of the subprocess before its first template.
_MEMORY_BYTES = 256 * 2**20
_MAX_RENDERED_BYTES = 64 * 2**20
# Characters of all templates of a model; published ones have up to 30,000.
_MAX_CHARACTERS = 256 * 1024
_MAX_REASON_CHARACTERS = 1000
# A conversation that waits longer for one subprocess is rendered by the other one, and for how often it looks at both.
_TURN_SECONDS, _TURNS = 0.1, 50

_RENDERED, _REFUSED, _TOO_COSTLY = b"+", b"-", b"!"


class TemplateTooCostly(Exception):
    """A chat template exceeds its limits; the text continues "the chat template ..."."""


class TemplateUnavailable(Exception):
    """No rendering is possible now; the text continues "the chat template ..."."""


class TemplateJob:
    """The renderings of one request, which have a limit of processor time together."""

    def __init__(self, pipe: Connection, answer: Callable[[], bytes]) -> None:
        self._pipe, self._answer, self._is_first = pipe, answer, True

    def prepare(self, template: str) -> frozenset[str]:
        """Compile a template; the variables that it reads. Raises TemplateTooCostly, and TemplateUnavailable.

        A template with a syntax error has none: it fails when it is rendered.
        """
        try:
            return frozenset(self._call(template, None, {}).split())
        except TemplateError:
            return frozenset()

    def render(self, template: str, messages: Sequence[Mapping[str, object]], options: Mapping[str, object]) -> str:
        """The text of a conversation, as transformers renders it.

        Raises TemplateError if the template refuses it, TemplateTooCostly, and TemplateUnavailable.
        """
        # As `apply_chat_template`: many templates fail on fields that are None.
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        return self._call(template, plain, options)

    def _call(self, template: str, messages: list[dict[str, object]] | None, options: Mapping[str, object]) -> str:
        self._pipe.send_bytes(json.dumps((self._is_first, template, messages, dict(options))).encode())
        self._is_first = False
        answer = self._answer()
        text = answer[1:].decode(errors="surrogatepass")
        if answer[:1] == _REFUSED:
            raise TemplateError(text)
        return text


class TemplateProcess:
    """A subprocess, started on demand. For any thread; one job at a time.

    max_seconds  processor time of a job
    """

    def __init__(self, max_seconds: float = _MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._process = SandboxProcess(__name__)
        self._is_ready = False

    def start(self) -> None:
        """Start the subprocess if it does not run, without a wait for its imports."""
        with self._lock:
            self._connect()

    def acquire(self, seconds: float) -> bool:
        """Wait for the end of the job of another thread; whether the subprocess is free for `job` now."""
        return self._lock.acquire(timeout=seconds)

    def release(self) -> None:
        """The counterpart of `acquire` without a job: the subprocess is started if it does not run."""
        with suppress(OSError):
            self._connect()
        self._lock.release()

    @property
    def is_ready(self) -> bool:
        """Whether the subprocess runs, and has ended its imports."""
        return self._is_ready and self._process.is_running

    @contextmanager
    def job(self) -> Iterator[TemplateJob]:
        """The renderings of one request, after `acquire`. Errors as of `TemplateProcesses.job`."""
        try:
            pipe = self._connect()
            if not self._is_ready:
                self._receive()
                self._is_ready = True
            yield TemplateJob(pipe, self._answer)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self.close()
            raise TemplateUnavailable("has no process that renders it") from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the subprocess; the next job starts another one."""
        self._process.close()

    def _connect(self) -> Connection:
        pipe, is_new = self._process.connect(self._max_seconds)
        self._is_ready = self._is_ready and not is_new
        return pipe

    def _answer(self) -> bytes:
        """The answer to a rendering. Raises TemplateTooCostly if the subprocess exceeded a limit, and EOFError."""
        try:
            answer = self._receive()
        except (EOFError, ConnectionResetError):
            if self._process.was_killed():
                # By another process: the limits end it in other ways.
                raise
            answer = _TOO_COSTLY
        if answer == _TOO_COSTLY:
            self.close()
            raise TemplateTooCostly("takes too long or too much memory to render")
        return answer

    def _receive(self) -> bytes:
        """The next message. Raises TemplateUnavailable, EOFError."""
        try:
            return self._process.receive()
        except TimeoutError as error:
            raise TemplateUnavailable(f"is not rendered: {error}") from error


class TemplateProcesses:
    """Two subprocesses: a conversation that takes long in one is rendered beside those of the other. For any thread.

    The second one is started when a conversation has waited for the first.

    max_seconds  processor time of a job
    """

    def __init__(self, max_seconds: float = _MAX_SECONDS) -> None:
        self.first, self.second = TemplateProcess(max_seconds), TemplateProcess(max_seconds)

    def start(self) -> None:
        """Start the first subprocess if it does not run, without a wait for its imports."""
        self.first.start()

    @contextmanager
    def job(self) -> Iterator[TemplateJob]:
        """The renderings of one request. Raises TemplateUnavailable; the block raises the errors of TemplateJob."""
        processes = (self.first, self.second) * _TURNS
        process = next((process for process in processes if process.acquire(_TURN_SECONDS)), None)
        if process is None:
            raise TemplateUnavailable("waits for other renderings")
        other = self.second if process is self.first else self.first
        # One that exceeded a limit imports again.
        if not process.is_ready and other.is_ready and other.acquire(0):
            process.release()
            process = other
        with process.job() as job:
            yield job

    def close(self) -> None:
        """End the subprocesses; the next job starts another one."""
        self.first.close()
        self.second.close()


@functools.cache
def template_processes() -> TemplateProcesses:
    """The subprocesses of this process."""
    return TemplateProcesses()


def check_size(templates: Iterable[str]) -> None:
    """Raise TemplateTooCostly if the templates of a model are too long together."""
    characters = sum(map(len, templates))
    if characters > _MAX_CHARACTERS:
        raise TemplateTooCostly(f"has {characters:,} characters, and the limit is {_MAX_CHARACTERS:,}")


def serve(pipe: Connection, max_seconds: str) -> None:
    """The main loop of the subprocess, until its pipe is closed or a job takes `max_seconds` of processor time."""
    # The other processes import transformers' templates later, or never.
    import engine.text.template  # noqa: F401

    pipe.send_bytes(b"")
    limit_memory(_MEMORY_BYTES)
    limit = seconds = float(max_seconds)
    while True:
        try:
            is_first, template, messages, options = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        # Its signal ends the subprocess.
        signal.setitimer(signal.ITIMER_PROF, limit if is_first else seconds)
        answer = _answer(template, messages, options)
        seconds, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(answer)


def _answer(template: str, messages: list[dict[str, object]] | None, options: dict[str, Any]) -> bytes:
    """The first byte is the outcome, the others are the text or the reason."""
    from engine.text.template import extend_environment, render

    try:
        extend_environment(template)
        rendered = (
            "\n".join(undeclared_variables(template)) if messages is None else render(template, messages, options)
        )
        answer = _RENDERED + rendered.encode(errors="surrogatepass")
    except MemoryError:
        return _TOO_COSTLY
    except Exception as error:
        answer = _REFUSED + str(error)[:_MAX_REASON_CHARACTERS].encode(errors="surrogatepass")
    return answer if len(answer) <= _MAX_RENDERED_BYTES else _TOO_COSTLY
