"""File descriptors: how many connections there are descriptors for, and what happens where none is left."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from contextlib import suppress
from typing import Any

logger = logging.getLogger("cellar.http")

# For all but connections: the store, files of the shelf, the process that compiles grammars, what threads open.
RESERVED_DESCRIPTORS = 128
# Connections that are taken in one turn of the event loop. It takes a few more turns until those that were too many
# give their descriptors back, so that a burst needs several times as many of the reserve.
ACCEPT_BATCH = 16

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def connection_limit(connections: int) -> int:
    """So many connections, or as many as there are descriptors for; the soft limit is raised where it may be."""
    wanted = connections + RESERVED_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # A sandbox may forbid it.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    return (
        connections if soft == resource.RLIM_INFINITY else min(connections, max(soft - RESERVED_DESCRIPTORS, soft // 2))
    )


class ListeningSocket(socket.socket):
    """A listening socket that asyncio can serve when descriptors run out.

    asyncio retries after a second, but goes on accepting before, up to 2,048 times (Python 3.11 to 3.14), with a
    traceback and a timer of a second each. Here the call behind the one that failed says that nothing has come.
    """

    _exhausted = False
    _accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; BlockingIOError where none is to be taken before the event loop goes on."""
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
    """asyncio's handler of exceptions, but a line in place of a traceback where descriptors run out."""
    fault = context.get("exception")
    if isinstance(fault, OSError) and fault.errno in _EXHAUSTED and "socket" in context:
        logger.error("no connection can be taken, next try in a second: %s", fault.strerror)
    else:
        loop.default_exception_handler(context)
