"""Messages of bytes on a stream socket: four bytes of length, big-endian, then the content."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

# Limit of one message. Uploads of a request are limited by the server, long before.
MAX_MESSAGE_BYTES = 2**30
_LENGTH = struct.Struct("!I")


class InvalidMessage(ValueError):
    """The other process sent bytes that are no message, or a message is too large to be sent."""


def frame(content: bytes) -> bytes:
    """A message with its length. Raises InvalidMessage beyond MAX_MESSAGE_BYTES."""
    if len(content) > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"a message of {len(content)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(content)) + content


class MessageConnection(asyncio.Protocol):
    """One end of a socket between two processes. Belongs to the event loop's thread.

    on_message  called with the content of each message; InvalidMessage closes the connection
    on_lost     called once after the last message: with the InvalidMessage that closed it, or None
    writable    cleared while the other process reads more slowly than this one sends
    """

    def __init__(self, on_message: Callable[[bytes], None], on_lost: Callable[[InvalidMessage | None], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._error: InvalidMessage | None = None
        self.writable = asyncio.Event()
        self.writable.set()

    def send(self, framed: bytes) -> None:
        """Send a message of `frame`; no error if the connection is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed)

    def close(self) -> None:
        """Close the socket after what was sent."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            self._handle_messages()
        except InvalidMessage as error:
            self._error = error
            self._received.clear()
            assert self._transport is not None, "data arrives after connection_made"
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self._error)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def _handle_messages(self) -> None:
        """Pass on the complete messages; the rest of the buffer is the beginning of one."""
        start, end = 0, len(self._received)
        while end - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if length > MAX_MESSAGE_BYTES:
                raise InvalidMessage(f"a message of {length} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
            stop = start + _LENGTH.size + length
            if stop > end:
                break
            content = bytes(self._received[start + _LENGTH.size : stop])
            start = stop
            self._on_message(content)
        if start:
            del self._received[:start]
