"""Workers as forks of a process that has imported the engine: they start without its imports and share its memory."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress

import psutil

from engine.remote.process import StartedProcess, WorkerProcess, start_module

# A process id in the reply of the zygote; an exit code in the pipe of a worker.
NUMBER = struct.Struct("!i")
# The request for a worker, which carries its end of the socket and of the pipe.
FORK = b"f"
# For the imports of the zygote on a busy machine.
_REPLY_SECONDS = 120.0


class ForkedProcess:
    """A worker that the zygote forked.

    exit_codes  this process's end of the pipe to which the zygote writes the exit code
    """

    def __init__(self, pid: int, connected: socket.socket, exit_codes: int) -> None:
        self.pid, self.socket, self._exit_codes = pid, connected, exit_codes
        os.set_blocking(exit_codes, False)
        self._lock = threading.Lock()
        self._code: int | None = None
        # It has the start time of the process, so a later process with the id is another one. None: it has ended.
        self._process: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)

    def __del__(self) -> None:
        os.close(self._exit_codes)

    def kill(self) -> None:
        """Send SIGKILL; no error if the process has ended."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._process.kill()

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, negative for a signal; None: the process is running after `seconds`.

        The code is 0 if the zygote ended before the process.
        """
        if self._code is None and _is_readable(self._exit_codes, seconds):
            with self._lock, suppress(BlockingIOError):
                data = b"" if self._code is not None else os.read(self._exit_codes, NUMBER.size)
                if len(data) == NUMBER.size:
                    self._code = NUMBER.unpack(data)[0]
            if self._code is None:
                return self._wait_for_orphan(seconds)
        return self._code

    def _wait_for_orphan(self, seconds: float | None) -> int | None:
        try:
            if self._process is not None and self._process.status() != psutil.STATUS_ZOMBIE:
                self._process.wait(seconds)
        except psutil.NoSuchProcess:
            return 0
        except psutil.TimeoutExpired:
            return None
        return 0


class Zygote:
    """Forks workers; a process that has ended is started again. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the zygote; None before its start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Begin to import the engine: the first worker then starts sooner. Does not wait for it."""
        with self._lock:
            self._started()

    def launch(self) -> WorkerProcess:
        """Fork a worker; blocks while the engine is imported. Without support for forks the worker is started.

        Raises OSError.
        """
        if not can_fork():
            return StartedProcess()
        with self._lock:
            try:
                return self._fork()
            except (EOFError, BrokenPipeError, ConnectionResetError):
                self._stop()
            try:
                return self._fork()
            except EOFError as error:
                raise OSError("the process that forks workers ended") from error

    def close(self) -> None:
        """End the zygote; its workers continue."""
        with self._lock:
            self._stop()

    def _started(self) -> socket.socket:
        if self._control is None:
            self._control, far = socket.socketpair()
            self._control.settimeout(_REPLY_SECONDS)
            with far:
                self._process = start_module("engine.remote.zygote_process", far)
        return self._control

    def _fork(self) -> ForkedProcess:
        control = self._started()
        near, far = socket.socketpair()
        exit_codes, written = os.pipe()
        try:
            with far:
                socket.send_fds(control, [FORK], [far.fileno(), written])
            data = control.recv(NUMBER.size, socket.MSG_WAITALL)
            if len(data) < NUMBER.size:
                raise EOFError
        except OSError:
            near.close()
            os.close(exit_codes)
            raise
        finally:
            os.close(written)
        return ForkedProcess(NUMBER.unpack(data)[0], near, exit_codes)

    def _stop(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()
        self._control = self._process = None


def can_fork() -> bool:
    """Whether workers are forked: on macOS libraries of the system break in a forked process."""
    return sys.platform == "linux"


def _is_readable(descriptor: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))
