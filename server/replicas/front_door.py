"""The app of `cellar route`: passes each request on to a replica. Repetitions and resumed streams are proxy.py's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence

import httpx
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.affinity.keys import SESSION_HEADER
from server.http.errors import ENGINE_DEAD, UNKNOWN_REPLICA, ApiError, error_response
from server.replicas.proxy import ReplicaMiddleware
from server.replicas.replica_pool import ReplicaPool
from server.replicas.routing_header import REPLICA_HEADER, requested_replica

CONNECT_SECONDS = 3.0
# Of one connection, not of the path from end to end.
_HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
# A machine that vanished is noticed after 25 seconds, where the system has these options.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def front_door(urls: Sequence[str]) -> ASGIApp:
    """The app for the base URLs of replicas, without /v1."""
    return ReplicaMiddleware(FrontDoor(ReplicaPool(urls)))


class ClientLeft(Exception):
    """The client closed its connection."""


class FrontDoor:
    """Passes requests on. One without an answer stays without one: its caller repeats it."""

    def __init__(self, pool: ReplicaPool, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._pool = pool
        self._client = httpx.AsyncClient(
            transport=transport or _transport(),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            # httpx would accept compressed answers for clients that accept none.
            headers={"accept-encoding": "identity"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan. WebSockets are refused."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await self._serve(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self._pool.poll(self._client)
        polling = asyncio.create_task(self._pool.keep_polling(self._client))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        polling.cancel()
        await self._client.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = Headers(scope=scope).get(SESSION_HEADER, "")
        name = self._pool.choose(session)
        if name is None:
            if requested_replica(session) is not None:
                missing = ApiError(UNKNOWN_REPLICA, f"There is no replica of {REPLICA_HEADER}.")
                await error_response(missing, scope["path"])(scope, receive, send)
            return
        body = _Body(receive)
        with self._pool.request(name):
            forwarding = asyncio.create_task(self._forward(scope, body, send, name))
            leaving = asyncio.create_task(body.wait_until_left())
            try:
                # A replica frees the slot of a client that left.
                await asyncio.wait((forwarding, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (forwarding, leaving):
                    task.cancel()
                results = await asyncio.gather(forwarding, leaving, return_exceptions=True)
        _raise_unexpected(results[0])

    async def _forward(self, scope: Scope, body: _Body, send: Send, name: str) -> None:
        path = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = [(key, value) for key, value in scope["headers"] if key not in _HOP_HEADERS]
        url = self._pool.urls[name] + (path.partition(b"?")[0] + query).decode("latin-1")
        content = body.pieces() if _has_body(scope) else None
        if content is None:
            body.skip()
        try:
            async with self._client.stream(scope["method"], url, headers=headers, content=content) as answer:
                if answer.status_code == ENGINE_DEAD.status:
                    self._pool.exclude(name)
                    return
                await send(_head(answer, name))
                async for data in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (httpx.ConnectError, httpx.ConnectTimeout):
            self._pool.exclude(name)


class _Body:
    """The body of a request, and then the client's disconnect."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read = asyncio.Event()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The bytes as they arrive. Raises ClientLeft."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            more = bool(message.get("more_body"))
            if message.get("body"):
                yield message["body"]
        self._read.set()

    def skip(self) -> None:
        """The request has none."""
        self._read.set()

    async def wait_until_left(self) -> None:
        """Return when the client has left after its body."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _transport() -> httpx.AsyncHTTPTransport:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    options += [
        (socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _KEEP_ALIVE if hasattr(socket, name)
    ]
    return httpx.AsyncHTTPTransport(
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
        socket_options=options,
        trust_env=False,
    )


def _head(answer: httpx.Response, name: str) -> Message:
    headers = [(key.lower(), value) for key, value in answer.headers.raw]
    headers = [(key, value) for key, value in headers if key not in _HOP_HEADERS and key != REPLICA_HEADER.encode()]
    headers.append((REPLICA_HEADER.encode(), name.encode()))
    return {"type": "http.response.start", "status": answer.status_code, "headers": headers}


def _raise_unexpected(result: object) -> None:
    """Errors of the connection leave a request without an answer, which its caller sees."""
    expected = (httpx.HTTPError, ClientLeft, asyncio.CancelledError)
    if isinstance(result, BaseException) and not isinstance(result, expected):
        raise result
