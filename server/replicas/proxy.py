"""ASGI middleware of a proxy, Ray's or that of `cellar route`: routing keys from the body, retries, resumed streams.

A stream that cannot be resumed ends with an error event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.errors import ENGINE_DEAD, INTERNAL_ERROR, QUEUE_FULL, ApiError, error_body, error_response
from server.http.middleware import UPLOAD_PATHS, replay
from server.http.sse import frame, named_frame
from server.http.stream_encoder import json_line
from server.replicas.resumable_stream import ResumableStream
from server.replicas.routing_header import REPLICA_HEADER, RequestRoutes

logger = logging.getLogger("cellar.proxy")

SUCCESS = 200
# Statuses of Ray's proxy for a request that no replica has answered.
UNANSWERED = (INTERNAL_ERROR.status, ENGINE_DEAD.status)
# Attempts of a request, each on another replica unless only one is left; a stream with new tokens has as many again.
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
        body = b"".join(piece.get("body", b"") for piece in pieces)
        routed = self._routes.route(scope, body)
        stream = ResumableStream.of_request(scope["path"], body) if whole else None
        client = _ClientMessages(receive)
        answer = _Answer(scope, send, partial(self._routes.record, routed), stream)
        failures = 0
        while failures < (ATTEMPTS if whole else 1):
            tokens = answer.begin_attempt()
            if stream is not None:
                pieces = [{"type": "http.request", "body": stream.request_body()}]
            await self.app(_attempt_scope(routed.scope, pieces), replay(pieces, client.receive), answer.send)
            if answer.complete or client.disconnected:
                return
            if answer.started and not answer.can_continue:
                break
            failures = failures + 1 if answer.tokens == tokens else 1
            logger.warning("attempt %d of %s was not answered by a replica", failures, scope["path"][:128])
            await asyncio.sleep(RETRY_SECONDS * failures)
        if answer.started:
            await answer.end_with_error()
        else:
            await error_response(_lost("No replica could answer the request."), scope["path"])(scope, receive, send)


def _attempt_scope(scope: Scope, pieces: list[Message]) -> Scope:
    """The scope of one attempt: headers of its own, with the length of its body."""
    headers = [*scope["headers"]]
    if len(pieces) == 1 and not pieces[0].get("more_body"):
        length = str(len(pieces[0].get("body", b""))).encode()
        headers = [(name, length if name == b"content-length" else value) for name, value in headers]
    return {**scope, "headers": headers}


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


class _Answer:
    """The answer to a request, of one or more attempts. Responses of the proxy, which no replica sent, are dropped.

    on_first  called with the first bytes of the body
    stream    continues after an interruption; None: an answer that has begun cannot be repeated
    started   bytes were sent to the client
    complete  the response has ended
    """

    def __init__(
        self, scope: Scope, send: Send, on_first: Callable[[bytes], None], stream: ResumableStream | None
    ) -> None:
        self._scope, self._send, self._on_first, self._stream = scope, send, on_first, stream
        self.started = self.complete = False
        self._head: Message | None = None
        self._dropped = self._refused = False

    @property
    def can_continue(self) -> bool:
        """Whether another attempt sends the rest of an answer that has begun."""
        return self._stream is not None and self._stream.can_continue and not self._refused

    @property
    def tokens(self) -> int:
        """Tokens of the stream so far."""
        return len(self._stream.tokens) if self._stream is not None else 0

    def begin_attempt(self) -> int:
        """Forget the attempt before, except what the client has got: the tokens of it."""
        # Until a head arrives, and after the end of a response.
        self._dropped = True
        return self.tokens

    async def send(self, message: Message) -> None:
        """Hold the head back until the first byte of the body."""
        if message["type"] == "http.response.start":
            self._begin(message)
        elif not self._dropped:
            await self._send_body(message.get("body", b""), more=bool(message.get("more_body")))

    def _begin(self, head: Message) -> None:
        status = head["status"]
        if self.started:
            self._dropped = status != SUCCESS
            self._refused = SUCCESS < status < INTERNAL_ERROR.status and status != QUEUE_FULL.status
            return
        self._dropped = status in UNANSWERED and REPLICA_HEADER not in Headers(raw=head["headers"])
        self._head = {**head, "headers": _one_request_id(head["headers"])}

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        assert self._head is not None, "a body follows its head"
        if self._stream is not None and self._head["status"] == SUCCESS:
            body = self._stream.relay(body)
            self._dropped = self._stream.interrupted
            # The end of a connection is not that of the stream.
            more = more or not self._stream.complete
        if more and not body:
            return
        if not self.started:
            await self._send(self._head)
            self.started = True
            self._on_first(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
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
