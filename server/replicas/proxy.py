"""ASGI middleware in Ray's HTTP proxy: routing keys from the body, retries, and error events of interrupted streams.

A router sees the headers of a request only, so the keys of its body travel in the header of Ray's session id.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.affinity.keys import SESSION_HEADER, RequestKeys, keys_of_bytes
from server.http.errors import ENGINE_DEAD, INTERNAL_ERROR, ApiError, error_body, error_response
from server.http.middleware import UPLOAD_PATHS, replay
from server.http.sse import frame, named_frame
from server.http.stream_encoder import json_line

logger = logging.getLogger("cellar.proxy")

# Of every response of a replica: its id. In a request: the id of the replica that has to answer, for its /metrics.
REPLICA_HEADER = "x-cellar-replica"
# Statuses of Ray's proxy for a request that no replica has answered.
UNANSWERED = (INTERNAL_ERROR.status, ENGINE_DEAD.status)
# Attempts of a request, each on another replica unless only one is left.
ATTEMPTS = 4
RETRY_SECONDS = 0.25
# Longer bodies are passed on as they arrive, and not repeated.
MAX_REPEATED_BYTES = 8 * 2**20
# A request for a replica by its id, in place of routing keys.
_TO_REPLICA = "replica:"


def middlewares() -> list[Middleware]:
    """The middleware of Ray's proxy; RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function."""
    return [Middleware(ReplicaMiddleware)]


def encode_keys(keys: RequestKeys) -> str:
    """The keys as a header value."""
    return ",".join((keys.conversation, *keys.prefixes))


def decode_keys(value: str) -> RequestKeys:
    """The keys of a header value."""
    conversation, *prefixes = value.split(",")
    return RequestKeys(conversation, tuple(prefixes))


def requested_replica(value: str) -> str | None:
    """The replica of a header value without keys."""
    return value.removeprefix(_TO_REPLICA) if value.startswith(_TO_REPLICA) else None


class ReplicaMiddleware:
    """Adds routing keys to requests, and repeats a request of which no byte was answered when its replica ended."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; WebSockets and uploads of files are passed on."""
        if scope["type"] != "http" or scope["path"] in UPLOAD_PATHS:
            await self.app(scope, receive, send)
            return
        pieces, whole = await _read_body(receive)
        if pieces and pieces[-1]["type"] == "http.disconnect":
            return
        routed = _with_keys(scope, b"".join(piece.get("body", b"") for piece in pieces))
        for number in range(1, (ATTEMPTS if whole else 1) + 1):
            attempt = _Attempt(scope, send)
            await self.app({**routed, "headers": [*routed["headers"]]}, replay(pieces, receive), attempt.send)
            if attempt.complete:
                return
            if attempt.started:
                await attempt.end_with_error()
                return
            logger.warning("attempt %d of %s was not answered by a replica", number, scope["path"])
            await asyncio.sleep(RETRY_SECONDS * number)
        await error_response(_lost("No replica could answer the request."), scope["path"])(scope, receive, send)


class _Attempt:
    """One attempt to answer a request. Responses of Ray's proxy itself, which no replica sent, are dropped.

    started   bytes were sent to the client
    complete  the response has ended
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.started = self.complete = False
        self._head: Message | None = None
        self._dropped = False

    async def send(self, message: Message) -> None:
        """Hold the head back until the first byte of the body."""
        if message["type"] == "http.response.start":
            unanswered = message["status"] in UNANSWERED and REPLICA_HEADER not in Headers(raw=message["headers"])
            self._head, self._dropped = message, unanswered
            return
        if self._dropped or self._head is None:
            return
        more = bool(message.get("more_body"))
        if not self.started:
            if more and not message.get("body"):
                return
            await self._send(self._head)
            self.started = True
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


def _with_keys(scope: Scope, body: bytes) -> Scope:
    """The scope with routing keys in place of the client's session."""
    headers = MutableHeaders(raw=[*scope["headers"]])
    replica = headers.get(REPLICA_HEADER)
    if replica:
        value = f"{_TO_REPLICA}{replica}"
    elif body:
        owner = headers.get("authorization", "") or headers.get("x-api-key", "")
        value = encode_keys(keys_of_bytes(body, session=headers.get(SESSION_HEADER, ""), owner=owner))
    else:
        value = ""
    del headers[SESSION_HEADER]
    if value:
        headers[SESSION_HEADER] = value
    return {**scope, "headers": headers.raw}
