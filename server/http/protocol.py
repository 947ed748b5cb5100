"""HTTP/1.1, strictly: uvicorn's h11 protocol with deadlines and without ambiguous forms.

h11 accepts Content-Length with Transfer-Encoding (request smuggling), folded headers, bare line feeds and any number
of headers, and uvicorn waits without limit for the rest of a request. All of them get an error envelope and a closed
connection here. A blocked send has a deadline, too.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode

from server.configuration.settings import ClientLimits
from server.http.auth import OWNER_KEY
from server.http.direct_writer import CONNECTION
from server.http.encoding import dumps
from server.http.errors import HEADERS_TOO_LARGE, INVALID_HTTP, REQUEST_TIMEOUT, ApiError
from server.http.lingering import LingeringTransport
from server.http.middleware import RESERVED
from server.http.paths import PROBE_PATHS, WEBSOCKET_PATHS
from server.http.refusal import Refusal, Refuse
from server.http.request_starts import RequestStarts

logger = logging.getLogger("cellar.http")

# Further connections for probes, as a share of all connections.
PROBE_SHARE = 1 / 64
# The share of all connections above which unfinished bodies of one client make room for other connections.
BODY_SHARE = 1 / 4
HEAD_END = b"\r\n\r\n"
CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
VERSIONS = (b" HTTP/1.1", b" HTTP/1.0")
# Probes do not wait for the starts of other requests.
_PROBES = tuple(f"{method} {path} ".encode() for method in ("GET", "HEAD") for path in PROBE_PATHS)
INVALID_MESSAGE = "This is not a valid HTTP/1.1 request."
TOO_LARGE_MESSAGE = "The request line and headers are too large."


class StrictConnection(h11.Connection):
    """h11 with checks of the raw head of every request before it is parsed."""

    def __init__(self, limits: ClientLimits) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._limits = limits
        self.error: ApiError | None = None
        # Whether a response in chunked transfer coding is being sent.
        self.sending_chunks = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """The bytes of an event. A chunk changes no state, so h11's state machine is skipped for it."""
        if self.sending_chunks and isinstance(event, h11.Data):
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        data = super().send(event)
        self.sending_chunks = isinstance(event, h11.Response) and data is not None and CHUNKED in data.lower()
        return data

    def next_event(self) -> Any:
        """The next event. Before it raises RemoteProtocolError, `error` is set to the response."""
        try:
            if self.their_state is h11.IDLE:
                _check_head(self.trailing_data[0], self._limits)
            event = super().next_event()
            return _in_origin_form(event) if isinstance(event, h11.Request) else event
        except h11.RemoteProtocolError as error:
            too_large = error.error_status_hint == HEADERS_TOO_LARGE.status
            kind = HEADERS_TOO_LARGE if too_large else INVALID_HTTP
            self.error = ApiError(kind, TOO_LARGE_MESSAGE if too_large else INVALID_MESSAGE)
            raise


class StrictProtocol(H11Protocol):
    """One connection. At most one deadline of each direction runs: for the head or the body, and for a blocked send.

    idle    connections without a request, shared by all connections, the longest idle first
    bodies  connections with an unfinished body, shared by all connections, the longest first
    starts  the starts of requests, shared by all connections
    refuse  answers a request without the app while the queue is full; None: the app answers all requests
    """

    def __init__(
        self,
        limits: ClientLimits,
        idle: dict[StrictProtocol, None],
        bodies: dict[StrictProtocol, None],
        starts: RequestStarts,
        direct_writes: bool,
        refuse: Refuse | None,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        state = {**app_state, CONNECTION: self} if direct_writes else app_state
        super().__init__(config, server_state, state, _loop)
        self.conn = self._connection = StrictConnection(limits)
        self._limits, self._idle, self._bodies, self._starts, self._refuse = limits, idle, bodies, starts, refuse
        self.writable, self._upgraded = True, False
        # Bytes of the body of a refused request that are still to come; they are discarded.
        self._unread_bytes = 0
        self._read_deadline = _Deadline(self.loop, self._read_timed_out)
        self._write_deadline = _Deadline(self.loop, self._write_timed_out)

    @property
    def sending_chunks(self) -> bool:
        """Whether a response is being sent that `write` can add chunks to."""
        return self._connection.sending_chunks

    def write(self, body: bytes) -> None:
        """Send a chunk of the response without ASGI's `send` (direct_writer.py)."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection. Above the limit the longest idle connection is closed.

        If none is idle, it is the longest unfinished body of a client with more than its share of them. If there is
        none, the connection is one of those that are reserved for probes, or closed if all of these are in use.
        """
        self._lingering = LingeringTransport(transport, self.loop, self._is_sending_body)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        if len(self.connections) > self._limits.connections and not self._make_room():
            return
        self._set_read_deadline()

    def _make_room(self) -> bool:
        """Close another connection, or reserve this one for probes, or close it; whether it stays open."""
        reserved = max(int(self._limits.connections * PROBE_SHARE), 1)
        is_within_reserve = len(self.connections) <= self._limits.connections + reserved
        evicted = next(iter(self._idle), None) or self._longest_body_above_share()
        if evicted is None and not is_within_reserve:
            evicted = self
        if evicted is None:
            self.app_state = {**self.app_state, RESERVED: True}
            return True
        evicted.transport.abort()
        self._idle.pop(evicted, None)
        self._bodies.pop(evicted, None)
        return evicted is not self

    def _longest_body_above_share(self) -> StrictProtocol | None:
        """The longest unfinished body of the client with the most, if these are more than its share."""
        clients = Counter(connection._sender for connection in self._bodies)
        client, count = max(clients.items(), key=lambda item: item[1], default=("", 0))
        if count <= max(int(self._limits.connections * BODY_SHARE), 1):
            return None
        return next(connection for connection in self._bodies if connection._sender == client)

    @property
    def _sender(self) -> str:
        """The owner of the request's key, or the address of the client."""
        owner = "" if self.scope is None else self.scope["state"].get(OWNER_KEY, "")
        return str(owner or (self.client[0] if self.client else ""))

    def _use_free_connection(self) -> None:
        """Serve every request on a reserved connection once there are fewer connections than the limit."""
        if RESERVED in self.app_state and len(self.connections) <= self._limits.connections:
            self.app_state = {name: value for name, value in self.app_state.items() if name != RESERVED}

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadlines."""
        self._idle.pop(self, None)
        self._bodies.pop(self, None)
        self._read_deadline.stop()
        self._write_deadline.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; after the last response they are discarded."""
        if self._lingering.is_closing():
            return
        if self._unread_bytes and not (data := self._discard_body(data)):
            return
        if self not in self._idle or self.conn.trailing_data[0]:
            self._receive(data)
        elif self._starts.is_full and not data.startswith(_PROBES):
            self._wait_for_start(data)
        else:
            self._starts.count()
            self._start(data)

    def _wait_for_start(self, data: bytes) -> None:
        """Start a request in a later iteration; until then the connection is not idle and nothing is read from it."""
        del self._idle[self]
        self._unset_keepalive_if_required()
        self.flow.pause_reading()
        self._starts.wait(functools.partial(self._start_late, data))

    def _start_late(self, data: bytes) -> None:
        if not self._lingering.is_closing():
            self._idle[self] = None
            self.flow.resume_reading()
            self._start(data)

    def _start(self, data: bytes) -> None:
        """Refuse a request, or pass its first bytes on."""
        if self._refuse is not None:
            client = self.client[0] if self.client else ""
            refusal = self._refuse(data, client, self.server_state.default_headers)
            if refusal is not None:
                self._send_refusal(refusal)
                return
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        self._use_free_connection()
        super().data_received(data)

    def handle_events(self) -> None:
        """Handle received events and set the deadline for the next ones."""
        super().handle_events()
        self._set_read_deadline()

    def _should_upgrade(self) -> bool:
        is_endpoint = self.scope["path"] in WEBSOCKET_PATHS and RESERVED not in self.app_state
        return is_endpoint and super()._should_upgrade()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to the WebSocket protocol, which has its own deadlines."""
        self.transport = self._lingering.transport
        super().handle_websocket_upgrade(event)
        self._upgraded = True

    def pause_writing(self) -> None:
        """The send buffer is full: start the deadline."""
        super().pause_writing()
        self.writable = False
        self._write_deadline.start("write", self._limits.write_seconds)

    def resume_writing(self) -> None:
        """The send buffer has space again: stop the deadline."""
        self._write_deadline.stop()
        self.writable = True
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Send the error that the connection has found, and close it; uvicorn calls this for every protocol error."""
        self._reject(self._connection.error or ApiError(INVALID_HTTP, INVALID_MESSAGE))

    def _set_read_deadline(self) -> None:
        state = self.conn.their_state
        self._idle.pop(self, None)
        if self._upgraded or self.transport.is_closing() or state is not h11.SEND_BODY:
            self._bodies.pop(self, None)
        if self._upgraded or self.transport.is_closing():
            self._read_deadline.stop()
            return
        if state is h11.IDLE:
            self._idle[self] = None
        if state is h11.SEND_BODY:
            self._bodies[self] = None
            self._read_deadline.start("body", self._body_seconds())
        elif state is h11.IDLE and (self.scope is None or self.conn.trailing_data[0]):
            self._read_deadline.start("head", self._limits.head_seconds)
        else:
            # uvicorn's keep-alive timeout covers the time between requests; during a response the client sends nothing.
            self._read_deadline.stop()

    def _is_sending_body(self) -> bool:
        """Whether the client may be in the middle of a request."""
        return self._unread_bytes > 0 or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _body_seconds(self) -> float:
        """The time for the body: a file of 200 MB takes longer than a request."""
        announced = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        large = min(max(announced - self._limits.body_bytes, 0), self._limits.file_bytes)
        return self._limits.body_seconds + large / self._limits.upload_rate

    def _read_timed_out(self) -> None:
        # A refused request has its response already.
        if self._unread_bytes or (self.scope is None and not self.conn.trailing_data[0]):
            self.transport.close()
        else:
            self._reject(ApiError(REQUEST_TIMEOUT, "The request took too long to arrive."))

    def _write_timed_out(self) -> None:
        state = {} if self.scope is None else self.scope["state"]
        logger.info("%s send blocked for too long, connection closed", state.get("request_id"))
        # close() would wait for the send buffer, which never empties.
        self.transport.abort()

    def _reject(self, error: ApiError) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(error)
        self.transport.close()

    def _send_refusal(self, refusal: Refusal) -> None:
        """Answer a request; the connection stays idle, so it can be evicted, while the rest of the body arrives."""
        self.transport.write(refusal.response)
        self._unread_bytes = refusal.unread_bytes
        # To the end: it is the one that was idle for the shortest time.
        del self._idle[self]
        self._idle[self] = None
        if self._unread_bytes:
            self._unset_keepalive_if_required()
            self._read_deadline.start("body", self._limits.body_seconds)
        else:
            self._end_refusal()

    def _discard_body(self, data: bytes) -> bytes:
        """Discard received bytes of a refused body; the bytes after it."""
        discarded = min(self._unread_bytes, len(data))
        self._unread_bytes -= discarded
        if not self._unread_bytes:
            self._end_refusal()
        return data[discarded:]

    def _end_refusal(self) -> None:
        """Wait for the next request."""
        self.on_response_complete()
        self._read_deadline.stop()

    def _send_error(self, error: ApiError) -> None:
        body = dumps(error.body)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("x-request-id", f"req_{uuid.uuid4().hex}"),
        ]
        reason = HTTPStatus(error.kind.status).phrase
        response = h11.Response(status_code=error.kind.status, headers=headers, reason=reason)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


class StrictWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket connection with the deadline of `StrictProtocol` for a blocked send."""

    def __init__(
        self,
        limits: ClientLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        # close() would wait for the send buffer, which never empties.
        self._write_deadline = _Deadline(self.loop, lambda: self.transport.abort())

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadline."""
        self._write_deadline.stop()
        super().connection_lost(exc)

    def send_receive_event_to_app(self) -> None:
        """Pass a message to the app; a text that is not UTF-8 closes the connection, without uvicorn's traceback."""
        if self.curr_msg_data_type == "text" and not _is_utf8(b"".join(self.frames)):
            self.conn.send_close(CloseCode.INVALID_DATA)
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()

    def pause_writing(self) -> None:
        """The send buffer is full: start the deadline."""
        super().pause_writing()
        self._write_deadline.start("write", self._limits.write_seconds)

    def resume_writing(self) -> None:
        """The send buffer has space again: stop the deadline."""
        self._write_deadline.stop()
        super().resume_writing()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class _Deadline:
    """A timer with a name; a second start under the same name does not reset it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[], None]) -> None:
        self._loop, self._expire = loop, expire
        self._name: str | None = None
        self._handle: asyncio.TimerHandle | None = None

    def start(self, name: str, seconds: float) -> None:
        if name != self._name:
            self.stop()
            self._name, self._handle = name, self._loop.call_later(seconds, self._expire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._name = self._handle = None


def strict_protocol(
    limits: ClientLimits, refuse: Refuse | None, *, direct_writes: bool = True
) -> type[asyncio.Protocol]:
    """The value of uvicorn's setting `http`; uvicorn only calls it, for each connection."""
    return functools.partial(StrictProtocol, limits, {}, {}, RequestStarts(), direct_writes, refuse)  # type: ignore[return-value]


def strict_websocket(limits: ClientLimits) -> type[asyncio.Protocol]:
    """The value of uvicorn's setting `ws`."""
    return functools.partial(StrictWebSocket, limits)  # type: ignore[return-value]


def _check_head(data: bytes, limits: ClientLimits) -> None:
    """Raise RemoteProtocolError for a head that is too large or that another parser might read differently."""
    end = data.find(HEAD_END)
    head = data if end < 0 else data[:end]
    if len(head) > limits.head_bytes:
        raise h11.RemoteProtocolError("head too large", HEADERS_TOO_LARGE.status)
    lines = head.split(b"\r\n")
    if any(b"\n" in line or b"\r" in line[:-1] for line in lines):
        raise h11.RemoteProtocolError("bare line end")
    if any(line.startswith((b" ", b"\t")) for line in lines[1:]):
        raise h11.RemoteProtocolError("folded header")
    if len(lines) - 1 > limits.headers:
        raise h11.RemoteProtocolError("too many headers", HEADERS_TOO_LARGE.status)
    if end >= 0 and not lines[0].endswith(VERSIONS):
        raise h11.RemoteProtocolError("another version")
    _check_framing(lines[1:], chunks=not lines[0].endswith(b" HTTP/1.0"))


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with a path as its target, if the target is a URL of the request's own host (RFC 9112, 3.2.2)."""
    if request.target.startswith(b"/"):
        return request
    scheme, _, url = request.target.partition(b"://")
    host, _, path = url.partition(b"/")
    if scheme.lower() not in (b"http", b"https") or (b"host", host) not in request.headers:
        return request
    return h11.Request(
        method=request.method,
        target=b"/" + path,
        headers=request.headers.raw_items(),
        http_version=request.http_version,
    )


def _check_framing(lines: list[bytes], *, chunks: bool) -> None:
    """Raise RemoteProtocolError unless the body's length is given at most once, in a form of the HTTP version."""
    framing = [line.lower() for line in lines if line.lower().startswith((b"content-length:", b"transfer-encoding:"))]
    if len(framing) > 1 or any(b"," in line for line in framing):
        raise h11.RemoteProtocolError("more than one length")
    # RFC 9112, 6.1: HTTP/1.0 has no chunks, and a proxy of that version would read another body.
    if not chunks and any(line.startswith(b"transfer-encoding:") for line in framing):
        raise h11.RemoteProtocolError("chunks in HTTP/1.0")
