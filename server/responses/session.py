"""WebSocket mode of /v1/responses: requests in turns on one connection, their events as one JSON text each.

The connection keeps its latest response with all items, so that a chain goes on without a store. A second request waits
for the end of the first; a client that leaves cancels what is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, suppress

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.websockets import WebSocket, WebSocketDisconnect

from engine.errors import EngineError
from server.http.encoding import dumps
from server.http.errors import CONNECTION_LIMIT, ApiError, invalid, translate
from server.http.parsing import LARGE_BODY_BYTES, loads, validated
from server.responses.desk import Desk
from server.responses.history import Recent
from server.responses.run import Run
from server.schemas.responses import ResponseRequest

PATH = "/v1/responses"
CREATE = "response.create"
# OpenAI's limit; clients connect anew and go on.
SESSION_SECONDS = 3600.0
# Requests of one connection that wait for the one that runs.
MOST_WAITING = 4
# From RFC 6455: the message breaks a rule of the endpoint; try again later.
BROKEN_RULE, TRY_LATER = 1008, 1013


class Session:
    """One connection, from its handshake to its end."""

    def __init__(self, socket: WebSocket, desk: Desk) -> None:
        self._socket, self._desk = socket, desk
        self._recent = Recent()

    async def serve(self) -> None:
        """Answer requests until the client leaves or the time of the connection is over."""
        await self._socket.accept()
        waiting: asyncio.Queue[str] = asyncio.Queue(MOST_WAITING)
        tasks = {asyncio.create_task(self._read(waiting)), asyncio.create_task(self._work(waiting))}
        try:
            done, _ = await asyncio.wait(tasks, timeout=SESSION_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # a fault of ours ends the connection, and the border logs it
        if not done:
            await self._refuse(ApiError(CONNECTION_LIMIT, "A connection lasts 60 minutes. Connect anew to go on."))
            await self._close(TRY_LATER)

    async def _read(self, waiting: asyncio.Queue[str]) -> None:
        """Take messages as they come: one who does not read sees neither pongs nor the client leaving."""
        with suppress(WebSocketDisconnect, KeyError, asyncio.QueueFull):
            while True:
                waiting.put_nowait(await self._socket.receive_text())
        await self._close(BROKEN_RULE)

    async def _work(self, waiting: asyncio.Queue[str]) -> None:
        with suppress(WebSocketDisconnect):
            while True:
                await self._answer(await waiting.get())

    async def _answer(self, text: str) -> None:
        """One response, or the error event that stands for it."""
        body: ResponseRequest | None = None
        try:
            body = await _read_request(text, self._socket.app.state.large_bodies)
            run = await self._desk.create(body, recent=self._recent)
        except (ApiError, EngineError) as error:
            self._forget(body)
            await self._refuse(error)
        else:
            await self._tell(run, body)

    async def _tell(self, run: Run, body: ResponseRequest) -> None:
        try:
            async with aclosing(run.follow()) as frames:
                async for frame in frames:
                    for event in _events(frame):
                        await self._socket.send_text(event)
        finally:
            await run.leave()
        if run.error is not None:
            self._forget(body)
        else:
            self._recent = Recent(run.response["id"], (*run.items, *run.output))

    def _forget(self, body: ResponseRequest | None) -> None:
        """A chain whose continuation failed has to begin anew, as at OpenAI."""
        if body is not None and body.previous_response_id == self._recent.id:
            self._recent = Recent()

    async def _refuse(self, error: ApiError | EngineError) -> None:
        told = error if isinstance(error, ApiError) else translate(error, PATH)
        with suppress(WebSocketDisconnect):
            await self._socket.send_text(dumps({"type": "error", "status": told.kind.status, **told.body}).decode())

    async def _close(self, code: int) -> None:
        # RuntimeError: it is closed already.
        with suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.close(code)


async def _read_request(text: str, large_bodies: CapacityLimiter) -> ResponseRequest:
    data = text.encode()
    if len(data) <= LARGE_BODY_BYTES:
        return _request(data)
    return await anyio.to_thread.run_sync(_request, data, limiter=large_bodies)


def _request(data: bytes) -> ResponseRequest:
    """The body of a `response.create` event; ApiError at anything else."""
    body = loads(data)
    if body.pop("type", None) != CREATE:
        raise invalid("type", f"it must be '{CREATE}'")
    if body.get("stream") is False or body.get("background"):
        name = "background" if body.get("background") else "stream"
        raise invalid(name, "over a WebSocket every response is told as it is made")
    return validated(ResponseRequest, {**body, "stream": True})


def _events(frames: bytes) -> Iterator[str]:
    """The JSON of server-sent events."""
    for frame in frames.split(b"\n\n"):
        if frame:
            yield frame.partition(b"\ndata: ")[2].decode()
