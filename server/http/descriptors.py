"""File descriptors: the limit of connections that follows from them, and a listening socket for their exhaustion."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from contextlib import suppress
from typing import Any

logger = logging.getLogger("cellar.http")

# For everything but connections: the store, files of the disk cache, the grammar sandbox, threads; and for connections
# that are reserved for probes.
RESERVED_DESCRIPTORS = 144
# Connections accepted in one iteration of the event loop. Excess connections release their descriptors a few iterations
# later, so a burst takes several times this number of the reserve.
ACCEPT_BATCH = 16

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def connection_limit(connections: int) -> int:
    """`connections`, or the number that file descriptors allow; raises the soft limit up to the hard limit."""
    required = connections + RESERVED_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < required:
        raised = required if hard == resource.RLIM_INFINITY else min(required, hard)
        # A sandbox may forbid it.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    return (
        connections if soft == resource.RLIM_INFINITY else min(connections, max(soft - RESERVED_DESCRIPTORS, soft // 2))
    )


class ListeningSocket(socket.socket):
    """A listening socket for asyncio that survives the exhaustion of file descriptors.

    After EMFILE asyncio retries in a second, but first calls accept() up to 2,048 times (Python 3.11 to 3.14), with a
    traceback and a timer each. Here the call after a failed one raises BlockingIOError, which ends that loop.
    """

    _exhausted = False
    _accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; BlockingIOError until the next iteration of the event loop."""
        self._accepted = (self._accepted + 1) % (ACCEPT_BATCH + 1)
        if self._exhausted or not self._accepted:
            self._exhausted, self._accepted = False, 0
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            self._exhausted = error.errno in _EXHAUSTED
            raise


def log_exhaustion(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception handler of asyncio: one log line instead of a traceback when descriptors are exhausted."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _EXHAUSTED and "socket" in context:
        logger.error("no connection can be accepted, next attempt in a second: %s", error.strerror)
    else:
        loop.default_exception_handler(context)
