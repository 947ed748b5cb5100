"""Closes a connection so that the client receives the last response (RFC 9112, 9.6).

A socket that is closed with unread bytes is reset, and the client may lose a response that it has not read yet: the
error of a request that is too large, for example, which it still sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# Time for the client to read the response and to close its side.
LINGER_SECONDS = 2.0


class LingeringTransport:
    """A transport that, while the client sends, closes its own direction first and discards received bytes.

    is_sending  whether the client may be in the middle of a request
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, is_sending: Callable[[], bool]
    ) -> None:
        self.transport, self._loop, self._is_sending = transport, loop, is_sending
        self._closing = False
        # Called for every token.
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def is_closing(self) -> bool:
        """Whether no more responses can be sent."""
        return self._closing or self.transport.is_closing()

    def close(self) -> None:
        """Close the connection, later if the client sends."""
        if self.is_closing():
            return
        self._closing = True
        if not self._is_sending() or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.transport.resume_reading()
        self._loop.call_later(LINGER_SECONDS, self.transport.close)
