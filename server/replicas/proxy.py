"""ASGI middleware in Ray's HTTP proxy: routing keys from the body, retries, and error events of interrupted streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.errors import ENGINE_DEAD, INTERNAL_ERROR, ApiError, error_body, error_response
from server.http.middleware import UPLOAD_PATHS, replay
from server.http.sse import frame, named_frame
from server.http.stream_encoder import json_line
from server.replicas.routing_header import REPLICA_HEADER, RequestRoutes

logger = logging.getLogger("cellar.proxy")

# Statuses of Ray's proxy for a request that no replica has answered.
UNANSWERED = (INTERNAL_ERROR.status, ENGINE_DEAD.status)
# Attempts of a request, each on another replica unless only one is left.
ATTEMPTS = 4
RETRY_SECONDS = 0.25
# Longer bodies are passed on as they arrive, and not repeated.
MAX_REPEATED_BYTES = 8 * 2**20


def middlewares() -> list[Middleware]:
    """The middleware of Ray's proxy; RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function."""
    return [Middleware(ReplicaMiddleware)]


class ReplicaMiddleware:
    """Adds routing keys to requests, and repeats a request of which no byte was answered when its replica ended."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._routes = RequestRoutes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; WebSockets and uploads of files are passed on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http" or scope["path"] in UPLOAD_PATHS:
            await self.app(self._routes.route(scope, b"").scope, receive, send)
            return
        pieces, whole = await _read_body(receive)
        if pieces and pieces[-1]["type"] == "http.disconnect":
            return
        routed = self._routes.route(scope, b"".join(piece.get("body", b"") for piece in pieces))
        client = _ClientMessages(receive)
        for number in range(1, (ATTEMPTS if whole else 1) + 1):
            attempt = _Attempt(scope, send, partial(self._routes.record, routed))
            routed_scope = {**routed.scope, "headers": [*routed.scope["headers"]]}
            await self.app(routed_scope, replay(pieces, client.receive), attempt.send)
            if attempt.complete or client.disconnected:
                return
            if attempt.started:
                await attempt.end_with_error()
                return
            logger.warning("attempt %d of %s was not answered by a replica", number, scope["path"][:128])
            await asyncio.sleep(RETRY_SECONDS * number)
        await error_response(_lost("No replica could answer the request."), scope["path"])(scope, receive, send)


class _ClientMessages:
    """The messages of a client. Ray's proxy answers nothing after a disconnect, which is no reason for a repetition."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.disconnected = False

    async def receive(self) -> Message:
        """The next message."""
        message = await self._receive()
        self.disconnected = self.disconnected or message["type"] == "http.disconnect"
        return message


class _Attempt:
    """One attempt to answer a request. Responses of Ray's proxy itself, which no replica sent, are dropped.

    on_first  called with the first bytes of the body
    started   bytes were sent to the client
    complete  the response has ended
    """

    def __init__(self, scope: Scope, send: Send, on_first: Callable[[bytes], None]) -> None:
        self._scope, self._send, self._on_first = scope, send, on_first
        self.started = self.complete = False
        self._head: Message | None = None
        self._dropped = False

    async def send(self, message: Message) -> None:
        """Hold the head back until the first byte of the body."""
        if message["type"] == "http.response.start":
            unanswered = message["status"] in UNANSWERED and REPLICA_HEADER not in Headers(raw=message["headers"])
            self._head, self._dropped = {**message, "headers": _one_request_id(message["headers"])}, unanswered
            return
        if self._dropped or self._head is None:
            return
        more = bool(message.get("more_body"))
        if not self.started:
            if more and not message.get("body"):
                return
            await self._send(self._head)
            self.started = True
            self._on_first(message.get("body", b""))
        await self._send(message)
        self.complete = not more

    async def end_with_error(self) -> None:
        """End an interrupted stream with an error event; any other response stays incomplete, which clients detect."""
        assert self._head is not None, "a started response has a head"
        kind, path = Headers(raw=self._head["headers"]).get("content-type", ""), self._scope["path"]
        error = _lost("The replica that generated this response ended.")
        if kind.startswith("text/event-stream"):
            event = _error_event(error, path)
        elif kind.startswith("application/x-ndjson"):
            event = json_line(error_body(error, path))
        else:
            return
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _one_request_id(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers with the request id of the replica only: Ray's proxy adds another one."""
    all_headers = list(headers)
    ids = [header for header in all_headers if header[0].lower() == b"x-request-id"]
    return [header for header in all_headers if header not in ids] + ids[:1]


def _error_event(error: ApiError, path: str) -> bytes:
    if path.removeprefix("/v1").startswith("/responses"):
        return named_frame({"type": "error", "code": error.kind.code, "message": error.message, "param": None})
    body = error_body(error, path)
    return named_frame(body) if "type" in body else frame(body)


def _lost(message: str) -> ApiError:
    return ApiError(ENGINE_DEAD, message, headers={"Retry-After": "1"})


async def _read_body(receive: Receive) -> tuple[list[Message], bool]:
    """The messages of a body, and whether they are all."""
    pieces, size = [await receive()], 0
    while pieces[-1]["type"] == "http.request" and pieces[-1].get("more_body"):
        size += len(pieces[-1].get("body", b""))
        if size > MAX_REPEATED_BYTES:
            return pieces, False
        pieces.append(await receive())
    return pieces, True
