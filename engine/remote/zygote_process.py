"""The process of the zygote: one thread, the engine's modules, and a fork for each request.

    python -m engine.remote.zygote_process      its standard input is the socket of requests

It ends with the socket, and after the end of the front end it kills workers that hang. It runs no torch operation and
uses no device: threads and contexts do not survive a fork.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import socket
import sys
import time
from contextlib import suppress

import numpy as np
import torch

from engine.remote.worker import detach_standard_input, serve
from engine.remote.zygote import FORK, NUMBER

# Descriptors of a request: the socket of the worker, and the pipe of its exit code.
_DESCRIPTORS = 2
# For workers to end by themselves after the front end.
_GRACE_SECONDS = 1.0


class ZygoteLoop:
    """Forks a worker for each request, and reports its exit code."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._front_end = control, os.getppid()
        # Pipes for the exit codes of running workers, by process id.
        self._exit_codes: dict[int, int] = {}
        self._wakeup, self._woken = socket.socketpair()
        self._wakeup.setblocking(False)
        self._woken.setblocking(False)

    def run(self) -> None:
        """Serve until the socket of requests ends."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        # Shared pages stay shared: no collection writes to the objects of the imports.
        gc.collect()
        gc.freeze()
        while True:
            readable, _, _ = select.select([self._control, self._woken], [], [])
            if self._woken in readable:
                self._woken.recv(4096)
                self._reap()
            if self._control in readable:
                try:
                    data, descriptors, _, _ = socket.recv_fds(self._control, len(FORK), _DESCRIPTORS)
                except ConnectionResetError:
                    # The front end was killed before it read a reply.
                    data = b""
                if not data:
                    self._end()
                    return
                self._fork(*descriptors)

    def _fork(self, connected: int, exit_codes: int) -> None:
        pid = os.fork()
        if pid == 0:
            os.close(exit_codes)
            self._become_worker(connected)
        os.close(connected)
        self._exit_codes[pid] = exit_codes
        self._control.sendall(NUMBER.pack(pid))

    def _become_worker(self, connected: int) -> None:
        """In the forked process: run the worker, and end."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # An open copy of a descriptor would hide the end of its process.
            for end in (self._control, self._wakeup, self._woken):
                end.close()
            for pipe in self._exit_codes.values():
                os.close(pipe)
            renew_seeds()
            code = serve(socket.socket(fileno=connected))
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _end(self) -> None:
        """Kill the workers that outlive a front end that ended; those of one that lives continue."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._exit_codes and deadline > time.monotonic():
            readable, _, _ = select.select([self._woken], [], [], max(deadline - time.monotonic(), 0.0))
            if readable:
                self._woken.recv(4096)
                self._reap()
        if os.getppid() != self._front_end:
            for pid in self._exit_codes:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Report the exit codes of ended workers."""
        while self._exit_codes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            pipe = self._exit_codes.pop(pid)
            # The front end may have closed the pipe.
            with suppress(BrokenPipeError):
                os.write(pipe, NUMBER.pack(os.waitstatus_to_exitcode(status)))
            os.close(pipe)


def renew_seeds() -> None:
    """Seed the generators of random numbers, whose state a fork copies."""
    random.seed()
    np.random.seed()
    torch.seed()


def main() -> None:
    """Run the zygote."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    ZygoteLoop(detach_standard_input()).run()


if __name__ == "__main__":
    main()
