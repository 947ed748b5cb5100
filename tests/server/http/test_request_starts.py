"""Requests that arrive at once begin in several iterations of the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from server.configuration.settings import ClientLimits
from server.http.protocol import strict_protocol
from server.http.request_starts import STARTS_PER_ITERATION, RequestStarts
from tests.server.wire import get

CLIENTS = 5 * STARTS_PER_ITERATION
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Iterations:
    """Counts the iterations of the running event loop, up to the first one after `stop`."""

    def __init__(self) -> None:
        self.number, self._is_over = 0, False
        self._next()

    def stop(self) -> None:
        self._is_over = True

    def _next(self) -> None:
        self.number += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._next)


@asynccontextmanager
async def connections(app: App, count: int) -> AsyncIterator[list[socket.socket]]:
    """Clients of a server with this app; both run in this event loop."""
    loop, config = asyncio.get_running_loop(), Config(app, lifespan="off", log_config=None)
    config.load()
    protocol: Callable[..., asyncio.Protocol] = strict_protocol(ClientLimits(), None)
    factory = partial(protocol, config, ServerState(), {})
    clients = []
    for _ in range(count):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        await loop.connect_accepted_socket(factory, theirs)
        clients.append(ours)
    try:
        yield clients
    finally:
        for client in clients:
            client.close()
        # The server sees the closed connections.
        await asyncio.sleep(0.01)


async def answer_to(client: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 4096), 10)


async def begun(paths: list[str]) -> list[tuple[str, int]]:
    """Send a request on a connection each, all at once: paths in the order of their starts, with the iteration."""
    requests: list[tuple[str, int]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        requests.append((scope["path"], iterations.number))
        await Response(scope["path"])(scope, receive, send)

    async with connections(app, len(paths)) as clients:
        iterations = Iterations()
        for client, path in zip(clients, paths, strict=True):
            client.send(get(path))
        answers = await asyncio.gather(*map(answer_to, clients))
        iterations.stop()
    assert [path.encode() for path in paths] == [answer.rpartition(b"\r\n\r\n")[2] for answer in answers]
    return requests


def test_an_iteration_starts_a_bounded_number_of_requests() -> None:
    """All of them are answered."""
    requests = asyncio.run(begun([f"/{number}" for number in range(CLIENTS)]))

    assert STARTS_PER_ITERATION >= max(Counter(iteration for _, iteration in requests).values())


def test_a_probe_begins_before_the_requests_that_wait() -> None:
    """Though it arrived last."""
    requests = asyncio.run(begun([*(f"/{number}" for number in range(CLIENTS)), "/health"]))

    first = requests[0][1]
    assert first == dict(requests)["/health"]


def test_a_client_that_leaves_before_its_start_is_forgotten() -> None:
    """The others are answered."""
    paths: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        await Response(b"")(scope, receive, send)

    async def leave() -> list[bytes]:
        async with connections(app, CLIENTS) as clients:
            for number, client in enumerate(clients):
                client.send(get(f"/{number}"))
            clients[-1].close()
            return await asyncio.gather(*map(answer_to, clients[:-1]))

    assert [200] * (CLIENTS - 1) == [int(answer.split(b" ")[1]) for answer in asyncio.run(leave())]
    assert {f"/{number}" for number in range(CLIENTS - 1)} <= set(paths)


def test_the_second_request_of_a_connection_may_wait_too() -> None:
    """Each connection is answered twice, in the order of its requests."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(scope["path"])(scope, receive, send)

    async def ask_twice() -> None:
        async with connections(app, CLIENTS) as clients:
            for path in ("/first", "/second"):
                for client in clients:
                    client.send(get(path))
                answers = await asyncio.gather(*map(answer_to, clients))
                assert [path.encode()] * CLIENTS == [answer.rpartition(b"\r\n\r\n")[2] for answer in answers]

    asyncio.run(ask_twice())


def test_starts_wait_behind_those_that_wait() -> None:
    """Nothing overtakes, and a free loop starts at once."""

    async def start() -> None:
        starts, started = RequestStarts(), list[int]()
        for number in range(2 * STARTS_PER_ITERATION + 1):
            starts.wait(partial(started.append, number))
        for iteration in (1, 2):
            assert starts.is_full
            await asyncio.sleep(0)
            assert list(range(iteration * STARTS_PER_ITERATION)) == started
        await asyncio.sleep(0)
        assert list(range(2 * STARTS_PER_ITERATION + 1)) == started
        await asyncio.sleep(0)
        assert not starts.is_full

    asyncio.run(start())
