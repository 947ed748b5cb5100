"""WebSocket mode of /v1/responses: sequential requests on one connection; each event is one JSON text message.

The connection keeps its latest response with all items, so a conversation continues without a store. A second request
is queued until the first one ends; a disconnect cancels the current one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.websockets import WebSocket, WebSocketDisconnect

from engine.errors import EngineError
from server.http.admission import admitted
from server.http.encoding import dumps
from server.http.errors import CONNECTION_LIMIT, TOO_MANY_WEBSOCKETS, ApiError, from_engine_error, invalid_value
from server.http.lenient import left_out_warnings
from server.http.parsing import LARGE_BODY_BYTES, loads, validated
from server.responses.messages import LatestResponse
from server.responses.response_service import ResponseService
from server.responses.task import ResponseTask
from server.schemas.content import IgnoredFields
from server.schemas.responses import ResponseRequest

PATH = "/v1/responses"
CREATE = "response.create"
# OpenAI's limit; clients reconnect.
SESSION_SECONDS = 3600.0
# Without a request or an answer; pongs do not count.
IDLE_SECONDS = 600.0
# The share of all connections that WebSockets of one client may be; the rest is for others.
CLIENT_SHARE = 1 / 4
# With a single owner: the rest is for its other requests.
SINGLE_OWNER_SHARE = 3 / 4
# Queued requests of one connection.
MAX_QUEUED = 4
# Close codes of RFC 6455.
POLICY_VIOLATION, TRY_AGAIN_LATER = 1008, 1013


class WebSocketLimit:
    """Limits the open WebSockets of each client: an owner, or an address on a server without keys.

    Behind a proxy all clients have one address, so with keys addresses are not counted.
    """

    def __init__(self, connections: int, owners: int) -> None:
        self._limit = max(int(connections * (SINGLE_OWNER_SHARE if owners == 1 else CLIENT_SHARE)), 1)
        self._open: Counter[str] = Counter()

    @contextmanager
    def hold(self, owner: str, address: str) -> Iterator[None]:
        """Count a WebSocket of a client as open in the block; ApiError above the limit."""
        client = owner or address
        if self._open[client] >= self._limit:
            message = f"A client may have {self._limit} open WebSockets. Close one of them."
            raise ApiError(TOO_MANY_WEBSOCKETS, message)
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]


class WebSocketSession:
    """One connection, from its handshake to its end."""

    def __init__(self, socket: WebSocket, service: ResponseService) -> None:
        self._socket, self._service = socket, service
        self._latest = LatestResponse()

    async def serve(self) -> None:
        """Answer requests until the client disconnects or the time limit of the connection."""
        await self._socket.accept()
        queue: asyncio.Queue[str] = asyncio.Queue(MAX_QUEUED)
        tasks = {asyncio.create_task(self._read(queue)), asyncio.create_task(self._process(queue))}
        try:
            done, _ = await asyncio.wait(tasks, timeout=SESSION_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # raises an unexpected exception, which ends the connection and is logged by the middleware
        if not done:
            await self._send_error(
                ApiError(CONNECTION_LIMIT, "A connection is limited to 60 minutes. Reconnect to continue.")
            )
            await self._close(TRY_AGAIN_LATER)

    async def _read(self, queue: asyncio.Queue[str]) -> None:
        """Read messages at once, since only a read detects pongs and the client's disconnect."""
        with suppress(WebSocketDisconnect, KeyError, asyncio.QueueFull):
            while True:
                queue.put_nowait(await self._socket.receive_text())
        await self._close(POLICY_VIOLATION)

    async def _process(self, queue: asyncio.Queue[str]) -> None:
        with suppress(WebSocketDisconnect):
            while True:
                try:
                    async with asyncio.timeout(IDLE_SECONDS):
                        text = await queue.get()
                except TimeoutError:
                    await self._close(TRY_AGAIN_LATER)
                    return
                await self._answer(text)

    async def _answer(self, text: str) -> None:
        """Send the events of one response, or an error event."""
        body: ResponseRequest | None = None
        try:
            with admitted(self._socket):
                body, warnings = await _read_request(text, self._socket.app.state.large_bodies)
                async with self._service.loaded(body.model):
                    task = await self._service.create(body, warnings, latest=self._latest)
        except (ApiError, EngineError) as error:
            self._forget_latest(body)
            await self._send_error(error)
        else:
            await self._send_events(task, body)

    async def _send_events(self, task: ResponseTask, body: ResponseRequest) -> None:
        try:
            async with aclosing(task.follow()) as frames:
                async for frame in frames:
                    for event in _events(frame):
                        await self._socket.send_text(event)
        finally:
            await task.abort()
        if task.error is not None:
            self._forget_latest(body)
        else:
            self._latest = LatestResponse(task.response["id"], (*task.items, *task.output))

    def _forget_latest(self, body: ResponseRequest | None) -> None:
        """After a failed continuation the conversation has to start anew, as at OpenAI."""
        if body is not None and body.previous_response_id == self._latest.id:
            self._latest = LatestResponse()

    async def _send_error(self, error: ApiError | EngineError) -> None:
        api_error = error if isinstance(error, ApiError) else from_engine_error(error, PATH)
        with suppress(WebSocketDisconnect):
            await self._socket.send_text(
                dumps({"type": "error", "status": api_error.kind.status, **api_error.body}).decode()
            )

    async def _close(self, code: int) -> None:
        # RuntimeError: it is closed already.
        with suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.close(code)


async def _read_request(text: str, large_bodies: CapacityLimiter) -> tuple[ResponseRequest, list[str]]:
    data = text.encode()
    if len(data) <= LARGE_BODY_BYTES:
        return _parse_request(data)
    return await anyio.to_thread.run_sync(_parse_request, data, limiter=large_bodies)


def _parse_request(data: bytes) -> tuple[ResponseRequest, list[str]]:
    """The body of a `response.create` event, and the warnings of its hints; ApiError for any other message."""
    body = loads(data)
    if body.pop("type", None) != CREATE:
        raise invalid_value("type", f"it must be '{CREATE}'")
    if body.get("stream") is False or body.get("background"):
        name = "background" if body.get("background") else "stream"
        raise invalid_value(name, "over a WebSocket every response is streamed")
    body, context = {**body, "stream": True}, IgnoredFields()
    request = validated(ResponseRequest, body, context)
    return request, list(left_out_warnings(body, context))


def _events(frames: bytes) -> Iterator[str]:
    """The JSON texts of server-sent events."""
    for frame in frames.split(b"\n\n"):
        if frame:
            yield frame.partition(b"\ndata: ")[2].decode()
