"""`cellar route` over replicas that httpx plays: choice, health, headers, disconnects.

Real ones are in tests/benchmarks/test_kills.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from server.commands.route import check_addresses
from server.replicas import proxy
from server.replicas.front_door import FrontDoor
from server.replicas.proxy import ReplicaMiddleware
from server.replicas.replica_pool import ReplicaPool
from tests.server.fakes import Answer, call

URLS = ("http://one:1", "http://two:2/", "http://three:3")
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause before a retry."""
    monkeypatch.setattr(proxy, "RETRY_SECONDS", 0)


class Replicas:
    """Replicas by their host: each answers by a function; those without one refuse connections."""

    def __init__(self, **handlers: Handler) -> None:
        self.handlers = handlers
        self.requests: list[httpx.Request] = []
        self.pool = ReplicaPool(URLS)
        self.door = FrontDoor(self.pool, httpx.MockTransport(self._answer))
        self.app = ReplicaMiddleware(self.door)
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        handler = self.handlers.get(request.url.host)
        if handler is None:
            raise httpx.ConnectError("refused")
        if request.url.path == "/ready":
            return httpx.Response(200)
        await request.aread()
        self.requests.append(request)
        return handler(request)

    def ask(
        self,
        body: bytes = json.dumps(BODY).encode(),
        *,
        poll: bool = True,
        path: str = CHAT,
        method: str = "POST",
        **options: Any,
    ) -> Answer:
        headers = {"content-length": str(len(body)), **options.pop("headers", {})}

        async def asked() -> Answer:
            if poll:
                await self.pool.poll(self.client)
            return await call(self.app, method, path, body=body, headers=headers, **options)

        return asyncio.run(asked())


def reply(status: int = 200, *parts: bytes, **headers: str) -> httpx.Response:
    """A response whose body is read from its connection."""

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    raw = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=raw, content=body())


def named(request: httpx.Request) -> httpx.Response:
    return reply(200, (request.url.host or "").encode())


def encoded(**fields: Any) -> bytes:
    return json.dumps({**BODY, **fields}).encode()


def test_requests_are_passed_on_with_their_bytes() -> None:
    """Path, query, body and headers, but those of one connection."""
    replicas = Replicas(one=lambda request: reply(201, b"t", x_a="b", connection="close"))
    headers = {"authorization": "Bearer k", "connection": "x", "x-session-id": "mine"}
    answer = replicas.ask(b"\0\xff", path="/v1/files%20a", query="a=b%20c", headers=headers)
    sent = replicas.requests[0]

    assert (201, b"t", "b", "1") == (
        answer.status,
        answer.body,
        answer.headers["x-a"],
        answer.headers["x-cellar-replica"],
    )
    assert "connection" not in answer.headers
    assert (b"\0\xff", "localhost", "Bearer k") == (sent.content, sent.headers["host"], sent.headers["authorization"])
    assert "identity" == sent.headers["accept-encoding"]
    assert str(sent.url).endswith("?a=b%20c")


def test_only_ready_replicas_get_requests() -> None:
    replicas = Replicas(two=named)

    assert {b"two"} == {replicas.ask(encoded(user=str(number))).body for number in range(8)}
    assert frozenset({"2"}) == replicas.pool.ready


def test_turns_of_a_conversation_meet_one_replica() -> None:
    replicas = Replicas(one=named, two=named, three=named)
    turns = [[*BODY["messages"], *[{"role": "assistant", "content": "a"}] * count] for count in range(5)]
    first, *others = [replicas.ask(encoded(messages=messages)).body for messages in turns]

    assert [first] * 4 == others


def test_a_replica_that_is_gone_is_passed_over() -> None:
    """At once, not only after the next look at it."""
    replicas = Replicas(one=named, two=named, three=named)
    home = replicas.ask().body.decode()
    del replicas.handlers[home]

    assert replicas.ask(poll=False).body.decode() in replicas.handlers
    assert 2 == len(replicas.pool.ready)


def test_a_draining_replica_is_passed_over() -> None:
    replicas = Replicas(one=named, two=named)
    home = replicas.ask().body.decode()
    replicas.handlers[home] = lambda request: reply(503, b"{}")
    answer = replicas.ask(poll=False)

    assert (200, {"one", "two"} - {home}) == (answer.status, {answer.body.decode()})


def test_without_any_replica_the_client_may_retry() -> None:
    answer = Replicas().ask()

    assert (503, "engine_dead", "1") == (answer.status, answer.json["error"]["code"], answer.headers["retry-after"])


@pytest.mark.parametrize("status", [400, 404, 429, 500])
def test_other_errors_are_passed_on(status: int) -> None:
    replicas = Replicas(one=lambda request: reply(status, b"e"))

    assert (status, b"e") == ((answer := replicas.ask()).status, answer.body)
    assert 1 == len(replicas.requests)


def test_a_replica_can_be_named() -> None:
    """For its metrics."""
    replicas = Replicas(one=named, two=named)

    for name, host in (("1", b"one"), ("2", b"two")):
        assert host == replicas.ask(method="GET", path="/metrics", headers={"x-cellar-replica": name}).body
    missing = replicas.ask(method="GET", path="/metrics", headers={"x-cellar-replica": "9"})
    assert (404, "unknown_replica") == (missing.status, missing.json["error"]["code"])


def chunk(id: str, text: str, token: int, **fields: Any) -> bytes:
    choice = {"text": text, "finish_reason": None, "token_ids": [token]}
    return b"data: %b\n\n" % json.dumps({"id": id, "created": 1, "model": "m", "choices": [choice], **fields}).encode()


def test_a_stream_goes_on_where_its_replica_ended() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield chunk("a", "x", 5, seed=9)
        raise httpx.ReadError("reset")

    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        if "continue_from" not in asked:
            replicas.handlers.pop(request.url.host or "")
            return httpx.Response(200, content=broken())
        assert (9, [5]) == (asked["seed"], asked["continue_from"]["tokens"])
        return reply(200, chunk("b", "y", 6), b"data: [DONE]\n\n")

    replicas = Replicas(one=answer, two=answer)
    streamed = replicas.ask(encoded(stream=True))
    events = [json.loads(line[6:]) for line in streamed.body.decode().split("\n\n")[:-2]]

    assert [("a", "x"), ("a", "y")] == [(event["id"], event["choices"][0]["text"]) for event in events]
    assert streamed.body.endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves_ends_its_request() -> None:
    """And frees the slot of the replica; it is not repeated."""
    ended: list[bool] = []

    async def endless() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    replicas = Replicas(one=lambda request: httpx.Response(200, content=endless()))
    incoming: list[dict[str, Any]] = [{"type": "http.request", "body": b"{}"}]

    async def left() -> None:
        await replicas.pool.poll(replicas.client)
        begun = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                begun.set()

        headers = [(b"content-length", b"2")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
        async with asyncio.timeout(20):
            await replicas.app(scope, receive, send)

    asyncio.run(left())
    assert [True] == ended
    assert 1 == len(replicas.requests)


def test_websockets_are_refused() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/responses", "headers": []}
    asyncio.run(Replicas().app(scope, receive, send))
    assert [{"type": "websocket.close"}] == sent


@pytest.mark.parametrize("urls", [(), ("127.0.0.1:8001",), ("http://one/v1",), ("ftp://one",), ("http://one", "two:2")])
def test_wrong_addresses_are_refused_by_name(urls: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="cellar route needs addresses such as http://127.0.0.1:8001"):
        check_addresses(urls)
