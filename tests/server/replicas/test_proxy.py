"""The middleware of Ray's proxy over a fake proxy: keys, retries, error events. Ray itself is not needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from server.affinity.keys import RequestKeys, keys_of_bytes, session_key
from server.http.sse import frame
from server.replicas import proxy
from server.replicas.proxy import ReplicaMiddleware
from server.replicas.routing_header import REPLICA_HEADER, decode_keys, encode_keys, requested_replica
from tests.server.fakes import Answer, call

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
SSE = {"content_type": "text/event-stream"}
Messages = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause before a retry."""
    monkeypatch.setattr(proxy, "RETRY_SECONDS", 0)


def head(status: int = 200, *, replica: bool = True, **headers: str) -> dict[str, Any]:
    """The head of a response, with the id of a replica unless Ray's proxy made it."""
    named = {**headers, **({REPLICA_HEADER: "r1"} if replica else {})}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class FakeProxy:
    """Plays one list of messages an attempt, and keeps the headers and bodies that it received."""

    def __init__(self, *attempts: Messages) -> None:
        self._attempts = iter(attempts)
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.bodies.append((await receive()).get("body", b""))
        for message in next(self._attempts):
            await send(message)


OK: Messages = [head(), part(b"{}")]


def ask(fake: FakeProxy, path: str = CHAT, **options: Any) -> Answer:
    return asyncio.run(call(ReplicaMiddleware(fake), "POST", path, **{"json_body": BODY, **options}))


def test_keys_travel_in_the_header_of_the_session() -> None:
    """With the session of the client and the scope of its API key in them."""
    fake = FakeProxy(OK)
    ask(fake, headers={"x-session-id": "mine", "authorization": "Bearer k"})

    expected = keys_of_bytes(json.dumps(BODY).encode(), session="mine", owner="Bearer k")
    assert expected == decode_keys(fake.headers[0]["x-session-id"])
    assert 1 == sum(name == "x-session-id" for name in fake.headers[0])


@pytest.mark.parametrize("keys", [RequestKeys(), RequestKeys("c1", ("p2", "p1")), RequestKeys("", ("p",))])
def test_keys_are_read_as_written(keys: RequestKeys) -> None:
    assert keys == decode_keys(encode_keys(keys))
    assert requested_replica(encode_keys(keys)) is None


def test_a_replica_can_be_named() -> None:
    """For its metrics."""
    fake = FakeProxy(OK)
    asyncio.run(call(ReplicaMiddleware(fake), "GET", "/metrics", headers={REPLICA_HEADER: "r1"}))

    assert "r1" == requested_replica(fake.headers[0]["x-session-id"])


@pytest.mark.parametrize(
    "header",
    [
        "X_Session_ID",
        "serve_multiplexed_model_id",
        "Serve-Multiplexed-Model-Id",
        "x-request-timeout-seconds",
        "X-Request-Disconnect-Disabled",
    ],
)
def test_clients_do_not_reach_the_headers_of_ray(header: str) -> None:
    """Ray decodes them as UTF-8, and would obey them."""
    fake = FakeProxy(OK)
    ask(fake, headers={header: "\xff"})

    assert header.lower() not in fake.headers[0]
    assert keys_of_bytes(json.dumps(BODY).encode()) == decode_keys(fake.headers[0]["x-session-id"])


@pytest.mark.parametrize(("id", "sent"), [("mine", "mine"), ("\xff", None), ("a" * 129, None)])
def test_request_ids_are_those_that_replicas_accept(id: str, sent: str | None) -> None:
    """And the response has one, though Ray's proxy adds another."""
    fake = FakeProxy(
        [{**(begin := head(x_request_id="a")), "headers": [*begin["headers"], (b"X-Request-ID", b"b")]}, part(b"")]
    )
    answer = ask(fake, headers={"x-request-id": id})

    assert sent == fake.headers[0].get("x-request-id")
    assert "a" == answer.headers["x-request-id"]


def test_a_replica_of_other_characters_is_unknown() -> None:
    fake = FakeProxy(OK)
    ask(fake, headers={REPLICA_HEADER: "\xff"})

    assert "\\xc3\\xbf" == requested_replica(fake.headers[0]["x-session-id"])


def response(id: str, *, stream: bool = False) -> Messages:
    """The answer that creates a response."""
    if not stream:
        return [head(), part(f'{{"id":"{id}","previous_response_id":"resp_0"}}'.encode())]
    event = f'event: response.created\ndata: {{"type":"response.created","response":{{"id":"{id}"}}}}\n\n'
    return [head(**SSE), part(event.encode(), more=True), part(b"data: end\n\n")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_belongs_to_the_conversation_that_it_continues(stream: bool) -> None:
    """As do requests for it by its ID; for another owner it is unknown."""
    fake = FakeProxy(*(response(f"resp_{number}", stream=stream) for number in (1, 2, 3, 3, 3)))
    middleware, mine = ReplicaMiddleware(fake), {"authorization": "Bearer mine"}

    async def ask_all() -> None:
        await call(middleware, "POST", "/v1/responses", json_body={"input": "hi"}, headers=mine)
        for previous in ("resp_1", "resp_2"):
            body = {"input": "go on", "previous_response_id": previous}
            await call(middleware, "POST", "/v1/responses", json_body=body, headers=mine)
        await call(middleware, "GET", "/v1/responses/resp_3", headers=mine)
        await call(middleware, "GET", "/v1/responses/resp_3", headers={"authorization": "Bearer other"})

    asyncio.run(ask_all())
    first, *same, other = [decode_keys(sent["x-session-id"]).conversation for sent in fake.headers]

    assert first
    assert [first] * 3 == same
    assert other != first


def test_a_response_without_a_message_of_the_user_can_be_continued() -> None:
    """Its conversation has a random key; that of an explicit session stays."""
    fake = FakeProxy(*(response(f"resp_{number}") for number in range(4)))
    middleware, path = ReplicaMiddleware(fake), "/v1/responses"

    async def ask_all() -> None:
        for _ in range(2):
            await call(middleware, "POST", path, json_body={"input": []})
        await call(middleware, "POST", path, json_body={"previous_response_id": "resp_1"})
        await call(
            middleware, "POST", path, json_body={"previous_response_id": "resp_1"}, headers={"x-session-id": "s"}
        )

    asyncio.run(ask_all())
    first, second, next_one, named = [decode_keys(sent["x-session-id"]).conversation for sent in fake.headers]

    assert "" != first != second == next_one
    assert session_key("s") == named


# What reaches the middleware when a replica ends before the first byte.
UNANSWERED: list[Messages] = [
    [],
    [head(**SSE)],
    [head(**SSE), part(b"", more=True)],
    [head(500, replica=False), part(b"Internal Server Error")],
    [head(503, replica=False), part(b"no replica")],
]


@pytest.mark.parametrize("unanswered", UNANSWERED)
def test_a_request_without_an_answered_byte_is_repeated(unanswered: Messages) -> None:
    fake = FakeProxy(unanswered, unanswered, OK)
    answer = ask(fake)

    assert (200, b"{}") == (answer.status, answer.body)
    assert [json.dumps(BODY).encode()] * 3 == fake.bodies


def test_the_attempts_are_few() -> None:
    """Then the client may retry."""
    answer = ask(FakeProxy(*[[]] * proxy.ATTEMPTS))

    assert (503, "engine_dead", "1") == (answer.status, answer.json["error"]["code"], answer.headers["retry-after"])


def test_a_request_of_a_client_that_left_is_not_repeated() -> None:
    """Ray's proxy answers it with nothing."""
    messages = [{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}]
    received: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.extend([(await receive())["type"], (await receive())["type"]])

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    asyncio.run(_served(app, receive, sent := []))
    assert ["http.request", "http.disconnect"] == received
    assert [] == sent


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_errors_of_a_replica_are_not_repeated(status: int) -> None:
    answer = ask(FakeProxy([head(status), part(b"{}")]))

    assert (status, b"{}") == (answer.status, answer.body)


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        (CHAT, "text/event-stream", b'data: {"error":{'),
        ("/v1/messages", "text/event-stream; charset=utf-8", b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", "text/event-stream", b'event: error\ndata: {"type":"error"'),
        ("/api/chat", "application/x-ndjson", b'{"error":"'),
    ],
)
def test_an_interrupted_stream_ends_with_one_error(path: str, kind: str, expected: bytes) -> None:
    """In the format of its API, and it is not repeated."""
    fake = FakeProxy([head(content_type=kind), part(b"data: 1\n\n", more=True)])
    answer = ask(fake, path)

    assert 200 == answer.status
    assert answer.body.startswith(b"data: 1\n\n" + expected)
    assert answer.body.endswith(b"\n")
    assert 1 == len(fake.bodies)


def test_an_interrupted_response_in_one_piece_stays_incomplete() -> None:
    """Half a JSON object gets no end, which clients detect by its length."""
    answer = asyncio.run(_messages(FakeProxy([head(content_length="9"), part(b'{"a"', more=True)])))

    assert [b'{"a"'] == [message["body"] for message in answer[1:]]
    assert answer[-1]["more_body"]


async def _messages(fake: FakeProxy) -> Messages:
    sent: Messages = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    await ReplicaMiddleware(fake)(scope, receive, send)
    return sent


def test_a_long_body_is_passed_on_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_REPEATED_BYTES", 3)
    pieces = [{"type": "http.request", "body": b"abcd", "more_body": True}, {"type": "http.request", "body": b"ef"}]
    received: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.extend([(await receive())["body"], (await receive())["body"]])

    async def receive() -> dict[str, Any]:
        return pieces.pop(0)

    asyncio.run(_served(app, receive, sent := []))
    assert [b"abcd", b"ef"] == received
    assert 503 == sent[0]["status"]


async def _served(app: Any, receive: Any, sent: Messages) -> None:
    async def send(message: Any) -> None:
        sent.append(message)

    await ReplicaMiddleware(app)({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send)


CHUNK = {"id": "a", "created": 1, "model": "m", "choices": [{"text": "x", "finish_reason": None, "token_ids": [5]}]}
NEXT = {**CHUNK, "id": "b", "choices": [{"text": "y", "finish_reason": "stop", "token_ids": [6]}]}
STREAM = {**BODY, "stream": True}
BEGUN: Messages = [head(**SSE), part(frame({**CHUNK, "seed": 9}), more=True)]
REST: Messages = [head(**SSE), part(frame(NEXT) + b"data: [DONE]\n\n", more=True), part(b"")]
LOST = part(frame({"error": {"code": "engine_dead", "message": "m"}}))


@pytest.mark.parametrize("lost", [[], [part(b"")], [LOST], [part(b"data: {", more=True)]])
@pytest.mark.parametrize(
    "refused", [[], [[head(503), part(b"{}")]], [[head(429), part(b"{}")], [head(500, replica=False)]]]
)
def test_an_interrupted_stream_goes_on_at_another_replica(lost: Messages, refused: list[Messages]) -> None:
    """As one stream with one id; a replica that cannot go on is passed over."""
    fake = FakeProxy([*BEGUN, *lost], *refused, REST)
    answer = ask(fake, json_body=STREAM, headers={"content-length": str(len(json.dumps(STREAM)))})
    texts = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n")[:2]]

    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert [("a", "x"), ("a", "y")] == [(text["id"], text["choices"][0]["text"]) for text in texts]
    assert b"error" not in answer.body
    continued = json.loads(fake.bodies[-1])
    assert (9, {"tokens": [5]}) == (continued["seed"], continued["continue_from"])
    assert [str(len(body)) for body in fake.bodies] == [sent["content-length"] for sent in fake.headers]


@pytest.mark.parametrize(
    ("attempts", "count"), [([[head(400), part(b"{}")]], 2), ([[]] * proxy.ATTEMPTS, proxy.ATTEMPTS)]
)
def test_a_stream_that_no_replica_continues_ends_with_one_error(attempts: list[Messages], count: int) -> None:
    fake = FakeProxy(BEGUN, *attempts)
    answer = ask(fake, json_body=STREAM)

    assert answer.body.split(b"\n\n")[1].startswith(b'data: {"error":{')
    assert 1 == answer.body.count(b'error":{')
    assert count == len(fake.bodies)


def test_a_stream_goes_on_as_often_as_it_gets_tokens() -> None:
    """A rolling restart may interrupt a long one more than four times."""
    token = [head(**SSE), part(frame(CHUNK), more=True)]
    answer = ask(FakeProxy(BEGUN, *[token] * 2 * proxy.ATTEMPTS, REST), json_body=STREAM)

    assert 2 * proxy.ATTEMPTS + 1 == answer.body.count(b'"text":"x"')
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_a_refused_stream_is_answered_with_its_status() -> None:
    answer = ask(FakeProxy([head(400), part(b'{"error":1}')]), json_body=STREAM)

    assert (400, b'{"error":1}') == (answer.status, answer.body)
