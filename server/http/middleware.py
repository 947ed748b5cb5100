"""ASGI middleware in front of FastAPI.

`OriginsMiddleware` is the outermost layer (CORS: the origins whose pages may call this server from a browser).
`BoundaryMiddleware` follows: request id, host, content type, unexpected exceptions.
`BodyLimitMiddleware` follows the authentication, so that a client without a key cannot fill the memory with bodies.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import Draining
from server.configuration.settings import ClientLimits
from server.http.access_log import AccessRecord, RefusalLog, begin
from server.http.errors import (
    HOST_NOT_ALLOWED,
    ORIGIN_NOT_ALLOWED,
    QUEUE_FULL,
    SWITCHING_PROTOCOLS,
    TOO_MANY_CONNECTIONS,
    UNSUPPORTED_MEDIA_TYPE,
    ApiError,
    body_too_large,
    error_response,
    from_engine_error,
    unexpected_error,
)
from server.http.key_limits import LIMIT_HEADERS
from server.http.parsing import TEXT_LIMIT
from server.http.paths import PROBE_PATHS, ServedPaths
from server.metrics.metrics import Metrics
from server.metrics.traces import TRACE_HEADERS

logger = logging.getLogger("cellar.http")

_host_and_port = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(?::[0-9]*)?")
_request_id = re.compile(r"[\x21-\x7e]{1,128}")
# The live view of the web page requests the last one several times a second.
_paths_logged_at_debug = PROBE_PATHS | {"/v1/engine"}
# ASGI messages that start a response, of HTTP and of WebSockets.
_start_messages = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
# DELETE: Ollama's clients name the model in its body.
_methods_with_body = frozenset({"POST", "PUT", "PATCH", "DELETE"})
# Ollama's examples send JSON by `curl -d`, which announces a form. Pages of other origins may send this type without a
# preflight request, but always with an Origin header.
_OLLAMA_PREFIX, _CURL_TYPES = "/api/", frozenset({"", "application/x-www-form-urlencoded"})
# Paths with forms of files. Pages of other origins may send forms without a preflight request, too.
UPLOAD_PATHS, _FORM = frozenset({"/v1/files"}), "multipart/form-data"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
# Paths with forms that are buffered: a sound, and fields.
AUDIO_PATHS = frozenset({TRANSCRIPTIONS, TRANSLATIONS})
MAX_AUDIO_BYTES = 25 * 2**20
# Of the parts of a form besides its file.
FORM_BYTES = 2**17
# The key of a request's state that tells that its connection is reserved for probes.
RESERVED = "reserved"
CONNECTION_RETRY_SECONDS = 10
MEDIA_RETRY_SECONDS = 5
# Paths with bodies that may have images and sounds.
MEDIA_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/v1/chat/completions/render"),
        *("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"),
        *("/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate"),
        *("/v1/tokenize", "/tokenize", "/v1/apply-template", "/apply-template"),
    }
)
METHODS = ("GET", "HEAD", "POST", "DELETE")
# Characters of a method in a log line; a request line may have 16 KiB of it.
MAX_LOGGED_METHOD = 16
# Characters of a host or origin in an error message.
MAX_NAMED_HOST = 128
# Response headers that pages may read only if the server exposes them.
EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-should-retry", *LIMIT_HEADERS)
# Origins of pages and desktop applications of the browser's own machine: Ollama's defaults, and Tauri's on Windows.
LOCAL_ORIGINS = (
    r"https?://(localhost|tauri\.localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(:[0-9]{1,5})?"
    r"|(app|file|tauri|vscode-file|vscode-webview)://[^/?#*\s]*"
)
_local_origin = re.compile(LOCAL_ORIGINS)


class OriginsMiddleware(CORSMiddleware):
    """The outermost layer, so that allowed pages can read every response, errors included.

    Requests still need an API key: browsers do not add it by themselves, unlike cookies.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_origin_regex=LOCAL_ORIGINS,
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight request, or add the headers of CORS to the response for a page."""
        is_page = scope["type"] == "http" and "origin" in Headers(scope=scope)
        await (super().__call__ if is_page else self.app)(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        """The response to a preflight request; an error for an origin that is not allowed."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        origin = request_headers["origin"]
        if self.is_allowed_origin(origin):
            return error_response(ApiError(ORIGIN_NOT_ALLOWED, "Pages may not use this method."), "")
        return error_response(origin_error(origin), "")


class BoundaryMiddleware:
    """Adds a request id, rejects other hosts, origins and media types, answers exceptions and logs one line.

    has_keys  whether requests need an API key. No web page has one, so none has to be kept off by its host or, where
              browsers ask before they send a request, by its origin.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str],
        origins: Collection[str],
        has_keys: bool,
        metrics: Metrics,
        refusals: RefusalLog,
        paths: ServedPaths,
    ) -> None:
        self.app, self.hosts, self.origins, self.has_keys = app, frozenset(hosts), frozenset(origins), has_keys
        self.metrics, self.refusals, self.paths = metrics, refusals, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an HTTP request or a WebSocket; pass on any other scope."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        scope = self.paths.normalise(scope)
        answer = _ResponseLog(scope, send)
        try:
            _check_connection(scope)
            self._check_host(scope)
            self._check_origin(scope)
            if (reason := _media_type_error(scope)) and self.paths.serves(scope):
                raise ApiError(UNSUPPORTED_MEDIA_TYPE, reason)
            await self.app(scope, receive, answer.send)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, answer.send)
        except asyncio.CancelledError:
            # The process ends, and this request has had its time.
            if answer.status is None and scope["type"] == "http":
                await error_response(from_engine_error(Draining(), scope["path"]), scope["path"])(
                    scope, receive, answer.send
                )
            raise
        except Exception as error:
            # The HTTP boundary: an unexpected exception fails one request, under its id in the log.
            shown = unexpected_error(error, f"request {answer.id}")
            if answer.status is not None:
                raise
            await error_response(shown, scope["path"])(scope, receive, answer.send)
        finally:
            answer.log(self.metrics, self.refusals)

    def _check_host(self, scope: Scope) -> None:
        # Probes of Kubernetes and scrapes of Prometheus have the pod's address as Host, which is not known in advance.
        if "*" in self.hosts or scope["path"] in PROBE_PATHS:
            return
        host = host_of(Headers(scope=scope))
        if host not in self.hosts:
            raise ApiError(HOST_NOT_ALLOWED, _host_message(host))

    def _check_origin(self, scope: Scope) -> None:
        """The Origin header names the page: browsers let any page open a WebSocket or send a form to any server."""
        headers = Headers(scope=scope)
        origin = headers.get("origin", "").lower()
        is_checked = not self.has_keys or scope["type"] == "websocket" or _is_upload(scope)
        if not origin or not is_checked or scope["path"] in PROBE_PATHS:
            return
        is_own_page = origin.partition("://")[2] == headers.get("host", "").lower()
        if not (is_own_page or origin in self.origins or _local_origin.fullmatch(origin)):
            raise origin_error(origin)


class BodyLimitMiddleware:
    """Buffers the body up to a limit and replays it to the app; BoundaryMiddleware answers its ApiError.

    A body with images or sounds may be larger, if its length is announced; of all such bodies at the same time a
    bounded number of bytes is buffered. Their texts are limited after parsing (`TEXT_LIMIT` of the request's state).

    reads_media  whether the model reads images or sounds
    """

    def __init__(self, app: ASGIApp, limits: ClientLimits, reads_media: Callable[[], bool]) -> None:
        self.app, self.limits, self.reads_media = app, limits, reads_media
        self._buffered_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a body above the limit by its Content-Length, or else while it arrives."""
        if scope["type"] != "http" or scope["method"] not in _methods_with_body:
            await self.app(scope, receive, send)
            return
        announced = int(Headers(scope=scope).get("content-length", "0"))
        if _is_upload(scope):
            _check_size(announced, self.limits.file_bytes)
            await self.app(scope, _limited(receive, self.limits.file_bytes), send)
            return
        limit = self._limit(scope, announced)
        _check_size(announced, limit)
        scope["state"][TEXT_LIMIT] = self.limits.body_bytes
        with self._buffering(announced):
            body = await self._read(receive, limit)
            # None: the client disconnected during the body.
            if body is not None:
                await self.app(scope, replay(body, receive), send)

    def _limit(self, scope: Scope, announced: int) -> int:
        if scope["path"] in AUDIO_PATHS and announced:
            return MAX_AUDIO_BYTES + FORM_BYTES
        is_large = announced > self.limits.body_bytes and scope["path"] in MEDIA_PATHS
        return self.limits.media_body_bytes if is_large and self.reads_media() else self.limits.body_bytes

    @contextmanager
    def _buffering(self, announced: int) -> Iterator[None]:
        """Count a large body until its request ends; ApiError if there are too many."""
        size = announced if announced > self.limits.body_bytes else 0
        if size and self._buffered_bytes + size > self.limits.media_buffer_bytes:
            message = "Too many large bodies are being received."
            raise ApiError(
                QUEUE_FULL, message, headers={"Retry-After": str(MEDIA_RETRY_SECONDS), "Connection": "close"}
            )
        self._buffered_bytes += size
        try:
            yield
        finally:
            self._buffered_bytes -= size

    async def _read(self, receive: Receive, limit: int) -> list[Message] | None:
        pieces: list[Message] = []
        size = 0
        while (message := await receive())["type"] == "http.request":
            pieces.append(message)
            size += len(message.get("body", b""))
            _check_size(size, limit)
            if not message.get("more_body", False):
                return pieces
        return None


class _ResponseLog:
    """Adds the request id to the response and keeps the status for the log."""

    def __init__(self, scope: Scope, send: Send) -> None:
        headers = Headers(scope=scope)
        self.id = request_id(headers)
        self.status: int | None = None
        self._scope, self._send = scope, send
        scope.setdefault("state", {})["request_id"] = self.id
        client = scope.get("client") or ("",)
        trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        method = scope.get("method", "WEBSOCKET")[:MAX_LOGGED_METHOD]
        self._record = AccessRecord(self.id, method, client[0], trace)
        begin(self._record)
        if (task := asyncio.current_task()) is not None:
            # For the warning about a callback that holds the event loop.
            task.set_name(f"request {self.id} ({method})")

    async def send(self, message: Message) -> None:
        if message["type"] in _start_messages:
            self.status = message.get("status", SWITCHING_PROTOCOLS)
            headers = [*message.get("headers", []), (b"x-request-id", self.id.encode("ascii"))]
            message = {**message, "headers": headers}
        await self._send(message)

    def log(self, metrics: Metrics, refusals: RefusalLog) -> None:
        # The route's template, never the path: clients choose paths, which go into log lines and label values.
        route = getattr(self._scope.get("route"), "path", "none")
        status = self.status if self.status is not None else 0
        metrics.count_response(route, status)
        if status == QUEUE_FULL.status:
            refusals.log(self._record, route, status)
            return
        level = logging.DEBUG if route in _paths_logged_at_debug else logging.INFO
        self._record.log(level, route, status)


def _check_connection(scope: Scope) -> None:
    """Raise ApiError if the request came on a connection reserved for probes and is none."""
    if scope["state"].get(RESERVED) and scope["path"] not in PROBE_PATHS:
        headers = {"Retry-After": str(CONNECTION_RETRY_SECONDS), "Connection": "close"}
        raise ApiError(TOO_MANY_CONNECTIONS, "All connections of the server are in use.", headers=headers)


def _media_type_error(scope: Scope) -> str:
    """The reason why the headers exclude a JSON body; "" if they do not."""
    if scope["type"] != "http" or scope["method"] not in _methods_with_body:
        return ""
    headers = Headers(scope=scope)
    if "content-encoding" in headers:
        return "Send the body without a Content-Encoding."
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if _is_upload(scope) or scope["path"] in AUDIO_PATHS:
        return "" if kind == _FORM else f"Send the file as Content-Type: {_FORM}."
    if kind == "application/json" or _has_no_body(headers):
        return ""
    if kind in _CURL_TYPES and scope["path"].startswith(_OLLAMA_PREFIX) and "origin" not in headers:
        return ""
    return "Send the body as Content-Type: application/json."


def _has_no_body(headers: Headers) -> bool:
    """Whether neither a body nor a content type is announced; some clients cancel a response with such a POST."""
    announced = "content-type" in headers or "transfer-encoding" in headers
    return not announced and headers.get("content-length", "0") == "0"


def origin_error(origin: str) -> ApiError:
    """The error for a page of a refused origin; it names the option that allows it."""
    if "://" not in origin:
        return ApiError(
            ORIGIN_NOT_ALLOWED, "Pages without an origin, such as sandboxed frames, may not call this server."
        )
    named = origin[:MAX_NAMED_HOST]
    message = (
        f"Pages of the origin '{named}' may not call this server. Start it with --allowed-host {named} to allow them."
    )
    return ApiError(ORIGIN_NOT_ALLOWED, message)


def _host_message(host: str) -> str:
    if not host:
        return "The Host header is missing or invalid."
    named = host[:MAX_NAMED_HOST]
    return (
        f"The Host header names '{named}', which this server does not know. Start it with --allowed-host {named}, "
        "or with --api-key: a server with keys accepts any name."
    )


def request_id(headers: Mapping[str, str]) -> str:
    """The X-Request-Id of a request if it is safe to log, or a new one."""
    requested = headers.get("x-request-id", "")
    return requested if _request_id.fullmatch(requested) else f"req_{uuid.uuid4().hex}"


def host_of(headers: Mapping[str, str]) -> str:
    """The Host header without its port; "" if it is invalid."""
    match = _host_and_port.fullmatch(headers.get("host", "").lower())
    return match[1] if match else ""


def _is_upload(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in UPLOAD_PATHS


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise body_too_large(limit)


def _limited(receive: Receive, limit: int) -> Receive:
    size = 0

    async def limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        _check_size(size, limit)
        return message

    return limited


def replay(pieces: Iterable[Message], receive: Receive) -> Receive:
    """Messages that were read already, then messages of `receive`."""
    remaining = iter(pieces)

    async def replayed() -> Message:
        return next(remaining, None) or await receive()

    return replayed
