"""One request over a connection of its own. What comes back is kept as it comes, and read when the run is over.

The load runs on the machine that it measures, so a token may cost it little: a read of the socket and a look at the
clock. httpx makes the request and h11 takes the answer apart; nothing of that happens while others are measured.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTP_PORT, HTTPS_PORT
from typing import Literal

import h11
import httpx


@dataclass(slots=True)
class Recording:
    """What a server sent, and how it ended. Moments are those of time.perf_counter.

    blocks   when each was read from the socket, and its bytes
    ended    when the server closed the connection, or at the timeout
    problem  "timeout" or "connection"; None: it was the server that closed
    reason   more of a problem with the connection
    """

    blocks: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    problem: Literal["timeout", "connection"] | None = None
    reason: str = ""

    def opened(self) -> tuple[int | None, Iterator[tuple[float, bytes]]]:
        """The status, None after a timeout, and the pieces of the body.

        h11.RemoteProtocolError, also from the pieces: the server did not answer, or closed before the end.
        """
        if not self.blocks and self.problem is None:
            raise h11.RemoteProtocolError("closed without an answer")
        events = self._events()
        _, head = next(events, (0.0, None))
        pieces = ((moment, bytes(event.data)) for moment, event in events if isinstance(event, h11.Data))
        return (head.status_code if isinstance(head, h11.Response) else None), pieces

    def _events(self) -> Iterator[tuple[float, h11.Event]]:
        connection = h11.Connection(h11.CLIENT)
        for sent in (h11.Request(method="POST", target="/", headers=[("Host", "")]), h11.EndOfMessage()):
            connection.send(sent)
        # That the server closed is the end of some answers, and too early for others.
        closed = [] if self.problem else [(self.ended, b"")]
        for moment, block in (*self.blocks, *closed):
            connection.receive_data(block)
            while isinstance(event := connection.next_event(), h11.Event):
                if isinstance(event, h11.EndOfMessage):
                    return
                if not isinstance(event, h11.InformationalResponse):
                    yield moment, event


async def record(request: httpx.Request, timeout_seconds: float) -> Recording:
    """Send a request and keep what comes back until the server closes; whatever happens is in the recording."""
    recording = Recording()
    try:
        async with asyncio.timeout(timeout_seconds):
            await _receive(request, recording)
    except TimeoutError:
        recording.problem = "timeout"
    except OSError as error:
        recording.problem, recording.reason = "connection", repr(error)
    recording.ended = time.perf_counter()
    return recording


async def _receive(request: httpx.Request, recording: Recording) -> None:
    loop, url = asyncio.get_running_loop(), request.url
    over: asyncio.Future[None] = loop.create_future()
    secure = url.scheme == "https"
    transport, _ = await loop.create_connection(
        lambda: _Recorder(recording, over),
        url.host,
        url.port or (HTTPS_PORT if secure else HTTP_PORT),
        ssl=_trusted() if secure else None,
    )
    try:
        transport.write(_written(request))
        await over
    finally:
        transport.abort()


class _Recorder(asyncio.Protocol):
    def __init__(self, recording: Recording, over: asyncio.Future[None]) -> None:
        self._blocks, self._over = recording.blocks, over

    def data_received(self, data: bytes) -> None:
        self._blocks.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._over.done():
            return
        if exc is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(exc)


def _written(request: httpx.Request) -> bytes:
    """The bytes of a request with `Connection: close`: only that says that no more comes."""
    connection = h11.Connection(h11.CLIENT)
    headers = [*request.headers.raw, (b"Connection", b"close")]
    head = h11.Request(method=request.method, target=request.url.raw_path, headers=headers)
    return b"".join(connection.send(part) for part in (head, h11.Data(data=request.content), h11.EndOfMessage()))


@functools.cache
def _trusted() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)
