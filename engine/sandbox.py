"""Subprocesses that run untrusted programs and files within limits of time and memory."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

# Elapsed time of an answer on a busy machine, where the start of a subprocess takes many seconds.
_ANSWER_TIMEOUT_SECONDS = 60.0
_POLLS = 10
# From the end of the pipe to the end of its subprocess.
_EXIT_SECONDS = 1.0
_ROOT = str(Path(__file__).resolve().parents[1])
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1])\n"
    "from importlib import import_module\n"
    "from multiprocessing.connection import Connection\n"
    "import_module(sys.argv[2]).serve(Connection(int(sys.argv[3])), *sys.argv[4:])"
)


class SandboxProcess:
    """A subprocess that answers messages of a pipe, started on demand. For one thread at a time.

    module  its function `serve` is the main loop; it gets the Connection, and the arguments as text
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._end: Callable[[], object] = lambda: None

    @property
    def is_running(self) -> bool:
        """Whether the subprocess was started, and has not ended."""
        return self._process is not None and self._process.poll() is None

    def was_killed(self) -> bool:
        """Whether the subprocess, whose pipe is closed, was ended by SIGKILL, as by a machine without memory."""
        if self._process is None:
            return False
        try:
            return self._process.wait(_EXIT_SECONDS) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def connect(self, *arguments: object) -> tuple[Connection, bool]:
        """The pipe to the subprocess, and whether it was started now, with the arguments, without a wait for it."""
        if self._pipe is not None and self.is_running:
            return self._pipe, False
        self.close()
        self._pipe = self._start(arguments)
        return self._pipe, True

    def receive(self) -> bytes:
        """The next message. Raises EOFError without a subprocess, and TimeoutError, after which it is ended."""
        if self._pipe is None:
            raise EOFError
        pipe = self._pipe
        # A wait is split into polls: after a suspension of both processes only one of them has timed out.
        if not any(pipe.poll(_ANSWER_TIMEOUT_SECONDS / _POLLS) for _ in range(_POLLS)):
            self.close()
            raise TimeoutError(f"no answer within {_ANSWER_TIMEOUT_SECONDS:g} s")
        return pipe.recv_bytes()

    def close(self) -> None:
        """End the subprocess; the next message starts another one."""
        self._end()
        self._process = self._pipe = None

    def _start(self, arguments: Sequence[object]) -> Connection:
        here, there = Pipe()
        # Isolated: modules of the working directory would shadow the standard library.
        values = map(str, (_ROOT, self._module, there.fileno(), *arguments))
        command = [sys.executable, "-I", "-c", _PROGRAM, *values]
        # No messages of a crash, and no signals from the terminal.
        self._process = subprocess.Popen(
            command,
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        there.close()
        self._end = weakref.finalize(self, _terminate, self._process, here)
        return here


def _terminate(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()


def limit_memory(limit_bytes: int) -> None:
    """Limit the memory of this process to `limit_bytes` more than now (Linux only)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + limit_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """End this process if the block takes more processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
