"""The process of a worker, and its start as a new interpreter."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol


class WorkerProcess(Protocol):
    """A worker process. Methods are for any thread.

    socket  this process's end of the connection; the worker ends when it is closed
    """

    pid: int
    socket: socket.socket

    def kill(self) -> None:
        """Send SIGKILL; no error if the process has ended."""

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, negative for a signal; None: the process is running after `seconds`."""


# Starts a worker. Blocks; raises OSError.
Launch = Callable[[], WorkerProcess]


class StartedProcess:
    """A worker in a new interpreter, which imports the modules of this process."""

    def __init__(self, module: str = "engine.remote.worker") -> None:
        """Start it: its standard input is the other end of the socket."""
        self.socket, far = socket.socketpair()
        with far:
            self._process = start_module(module, far)
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float | None = None) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


def start_module(module: str, standard_input: socket.socket) -> subprocess.Popen[bytes]:
    """Run a module in a new interpreter, outside of the process group that a terminal interrupts."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    command = [sys.executable, "-P", "-m", module]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(command, stdin=standard_input.fileno(), env=environment, process_group=0)


def exit_text(code: int | None) -> str:
    """How a process ended, as the end of a sentence."""
    if code is None:
        return "did not end"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
