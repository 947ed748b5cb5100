"""Admission before the body is received."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.errors import Overloaded
from engine.types.request import Request
from server.app import create_app
from server.http.refusal import EARLY_PATHS, EarlyRefusal, Refusal
from tests.server.fakes import FakeEngine, PlayedStream, ask, serve_in_thread, settings
from tests.server.wire import connected, exchange, get, post, read_all, read_until, status

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/infill": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/compact": {"input": "hi"},
    "/v1/messages": {**CHAT, "model": "fake", "max_tokens": 9},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/v1/decisions": {"input": "hi"},
    "/api/chat": {**CHAT, "model": "fake"},
    "/api/generate": {"model": "fake", "prompt": "hi"},
    "/api/embed": {"model": "fake", "input": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_full_queue_refuses_before_anything_is_rendered(path: str) -> None:
    """In the error format of each API; no text is tokenized."""
    engine = FakeEngine(refusal=Overloaded(9, 3.0))
    answer = ask(create_app(engine, settings()), "POST", path, json_body=BODIES[path])  # type: ignore[arg-type]

    assert answer.status == 429
    assert "retry-after" in answer.headers
    assert "9 requests are waiting already." in str(answer.json["error"]).replace('"', "")
    assert engine.tokenizer.rendered == []
    assert engine.admissions == [""]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_refused_body_is_not_parsed(path: str) -> None:
    answer = ask(create_app(FakeEngine(refusal=Overloaded(9, 3.0)), settings()), "POST", path, body=b"{")  # type: ignore[arg-type]

    assert answer.status == 429


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tokenize", {"prompt": "hi"}),
        ("/v1/chat/completions/render", CHAT),
        ("/v1/messages/count_tokens", {**CHAT, "model": "fake"}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/api/chat", {"model": "fake", "messages": []}),
        ("/api/generate", {"model": "fake"}),
    ],
)
def test_requests_without_a_generation_ignore_the_queue(path: str, body: Any) -> None:
    """Counts of tokens, and Ollama's requests to load a model."""
    engine = FakeEngine(refusal=Overloaded(9, 3.0))

    assert ask(create_app(engine, settings()), "POST", path, json_body=body).status == 200  # type: ignore[arg-type]


class OrderedEngine(FakeEngine):
    """Logs when requests are counted as waiting, and opened."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    @contextmanager
    def reserve(self, owner: str) -> Iterator[None]:
        self.steps.append("reserved")
        with super().reserve(owner):
            yield
        self.steps.append("released")

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[PlayedStream]:
        self.steps.append("opened")
        async with super().open(request) as stream:
            yield stream


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"]
)
def test_a_request_counts_as_waiting_while_it_is_prepared(path: str) -> None:
    """Others that arrive meanwhile are refused before they are tokenized. The engine counts it once it is open."""
    engine = OrderedEngine()
    ask(create_app(engine, settings()), "POST", path, json_body=BODIES[path])  # type: ignore[arg-type]

    assert engine.steps == ["reserved", "released", "opened"]


@pytest.mark.parametrize("body", [b"{", b'{"model": "unknown", "messages": []}'])
def test_an_invalid_request_does_not_stay_in_the_queue(body: bytes) -> None:
    engine = OrderedEngine()
    assert ask(create_app(engine, settings()), "POST", "/v1/chat/completions", body=body).status >= 400  # type: ignore[arg-type]

    assert engine.steps == ["reserved", "released"]


def test_a_slow_upload_does_not_wait_in_the_queue() -> None:
    """It would keep others from being admitted until the deadline of the body."""
    engine = OrderedEngine()
    request = post("/v1/chat/completions", CHAT)
    with serve_in_thread(engine, settings()) as port, connected(port) as client:
        client.sendall(request[:-5])
        exchange(port, get("/health", "Connection: close"))
        assert engine.steps == []
        client.sendall(request[-5:])
        assert status(read_until(client, b"}}")) == 200
    assert engine.steps == ["reserved", "released", "opened"]


def test_admission_knows_the_owner() -> None:
    """The queue has a share for each owner."""
    engine = FakeEngine()
    app = create_app(engine, settings(keys=("wine:one", "cheese:two")))  # type: ignore[arg-type]
    for key in ("one", "two", "one"):
        ask(app, "POST", "/v1/chat/completions", json_body=CHAT, headers={"authorization": f"Bearer {key}"})

    assert engine.admissions == [request.owner for request in engine.requests]
    assert len(set(engine.admissions)) == 2


FULL = Overloaded(9, 3.0)
KEYED = "Authorization: Bearer one"


@pytest.fixture(scope="module")
def full() -> Iterator[tuple[FakeEngine, int]]:
    """A server with a full queue, and its port."""
    engine = FakeEngine(refusal=FULL)
    with serve_in_thread(engine, settings(keys=("wine:one",))) as port:
        yield engine, port


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each request was refused before the app."""
    refused, refuse = [], EarlyRefusal.__call__

    def watched(self: EarlyRefusal, *arguments: Any) -> Refusal | None:
        answer = refuse(self, *arguments)
        refused.append(answer is not None)
        return answer

    monkeypatch.setattr(EarlyRefusal, "__call__", watched)
    return refused


def refused_twice(port: int, path: str, *headers: str) -> list[tuple[list[bytes], bytes]]:
    """The answers before the app and by the app, which gets a request with a header twice: fields and body."""
    twice = [*headers, "X-Twice: 1", "X-Twice: 2"]
    answers = []
    with connected(port) as client:
        for sent in (headers, twice):
            client.sendall(post(path, BODIES.get(path, CHAT), KEYED, *sent))
            head, _, body = read_until(client, b"}").partition(b"\r\n\r\n")
            fields = [re.sub(rb"(date|retry-after|x-request-id): .*", rb"\1", line) for line in head.split(b"\r\n")]
            answers.append((fields, body.rstrip(b"}")))
    return answers


@pytest.mark.parametrize("path", sorted(EARLY_PATHS))
def test_an_early_refusal_is_the_same_response(path: str, full: tuple[FakeEngine, int], early: list[bool]) -> None:
    """In the format of each API, on a connection that stays open."""
    before_app, by_app = refused_twice(full[1], path)

    assert before_app == by_app
    assert before_app[0][0] == b"HTTP/1.1 429 Too Many Requests"
    assert early == [True, False]


def test_an_early_refusal_has_what_is_left_of_the_limits_of_its_key(tmp_path: Path, early: list[bool]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nkey = "one"\ntokens_per_minute = 9\n')
    with serve_in_thread(FakeEngine(refusal=FULL), settings(key_file=str(path))) as port:
        before_app, by_app = refused_twice(port, "/v1/completions")

    assert sorted(before_app[0]) == sorted(by_app[0])
    assert b"x-ratelimit-remaining-tokens: 9" in before_app[0]
    assert early == [True, False]


def test_an_early_refusal_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with serve_in_thread(FakeEngine(refusal=FULL), settings(keys=("wine:one",))) as port:
        check_log_and_count(port, caplog)


def check_log_and_count(port: int, caplog: pytest.LogCaptureFixture) -> None:
    counted = 'http_responses_total{model_name="fake",route="/v1/completions",status="429"}'

    def count() -> float:
        text = exchange(port, get("/metrics", KEYED, "Connection: close")).decode()
        return float(next((line.split()[-1] for line in text.splitlines() if counted in line), 0))

    before = count()
    with caplog.at_level(logging.INFO, "cellar.http"):
        refused_twice(port, "/v1/completions", "X-Request-Id: mine")
        # The middleware logs after the response; another response makes sure that it has.
        assert count() - before == 2
    lines = [re.sub(r"[\d.]+ms", "ms", line) for line in caplog.messages]
    # The next line has the count of those that follow.
    assert lines == ["mine POST /v1/completions 429 ms client=127.0.0.1 key=wine"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (post("/v1/completions", CHAT), 401),
        (post("/v1/completions", CHAT, "Authorization: Bearer two"), 401),
        (post("/v1/completions", CHAT, KEYED, "X-Api-Key: two"), 401),
        (post("/v1/completions", CHAT, KEYED).replace(b"application/json", b"text/plain"), 415),
        (post("/v1/completions", CHAT, KEYED, "Content-Length: 3"), 400),
        (post("/v1/completions", CHAT, KEYED, "Content-Length : 3"), 400),
        (post("/v1/completions", CHAT, KEYED, "Transfer-Encoding: chunked"), 400),
        (post("/v1/completions", CHAT, KEYED, "Content-Encoding: gzip"), 415),
        (post("/v1/completions", CHAT, KEYED).replace(b"Length: 4", b"Length: 9999994"), 429),
        (post("/v1/completions", CHAT, KEYED, "Origin: https://example.com"), 429),
        (post("/v1/completions", CHAT, KEYED).replace(b"POST", b"GET"), 405),
        (post("/completions", CHAT, KEYED), 429),
        (post("/v1/completions?a=b", CHAT, KEYED), 429),
        (post("/v1/completions", CHAT, KEYED).replace(b"HTTP/1.1", b"HTTP/1.0"), 429),
        (post("/v1/completions", CHAT, KEYED, "Expect: 100-continue").partition(b"{")[0], 429),
        (post("/v1/nothing", CHAT, KEYED), 404),
    ],
    ids=lambda value: repr(value[-160:]) if isinstance(value, bytes) else "",
)
def test_unusual_requests_get_their_own_error(
    data: bytes, expected: int, full: tuple[FakeEngine, int], early: list[bool]
) -> None:
    """They pass the middleware, also while the queue is full."""
    with connected(full[1]) as client:
        client.sendall(data)

        assert status(read_until(client, b"}")) == expected
    assert early == [False]


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_refusal_does_not_wait_for_the_body(cut: int, full: tuple[FakeEngine, int], early: list[bool]) -> None:
    """Exactly the body is discarded: the next request may come with its end."""
    request = post("/v1/completions", CHAT, KEYED)
    start = request.index(b"{") + cut
    with connected(full[1]) as client:
        client.sendall(request[:start])
        assert status(read_until(client, b"}}")) == 429
        client.sendall(request[start : start + 1])
        client.sendall(request[start + 1 :] + request[:start])
        assert status(read_until(client, b"}}")) == 429
        client.sendall(request[start:] + get("/health", "Connection: close"))
        assert status(read_all(client)) == 200
    assert early == [True, True, False]


def test_bytes_after_a_refused_body_are_a_request(full: tuple[FakeEngine, int], early: list[bool]) -> None:
    """Of a client that announced too few bytes."""
    head, _, body = post("/v1/completions", CHAT, KEYED).partition(b"{")
    with connected(full[1]) as client:
        client.sendall(head)
        assert status(read_until(client, b"}}")) == 429
        client.sendall(b"{" + body + b"more\r\n\r\n")
        assert status(read_all(client)) == 400
    assert early == [True, False]


def test_a_request_with_another_one_behind_it_passes_the_middleware(
    full: tuple[FakeEngine, int], early: list[bool]
) -> None:
    request = post("/v1/completions", CHAT, KEYED)
    with connected(full[1]) as client:
        client.sendall(request + get("/health", "Connection: close"))
        assert re.findall(rb"HTTP/1.1 (\d+)", read_all(client)) == [b"429", b"200"]
    assert early == [False]


def test_a_refused_body_that_never_comes_ends_the_connection() -> None:
    """At the deadline of bodies, without a second response."""
    request = post("/v1/chat/completions", CHAT)
    with serve_in_thread(FakeEngine(refusal=FULL), settings(limits={"body_seconds": 0.3})) as port:
        for sent in (request[:-1], request[: request.index(b"{")]):
            with connected(port) as client:
                client.sendall(sent)
                assert status(read_until(client, b"}}")) == 429
                assert client.recv(1) == b""


def test_a_connection_with_a_refused_body_makes_room_for_others() -> None:
    engine = FakeEngine(refusal=FULL)
    with (
        serve_in_thread(engine, settings(limits={"connections": 1})) as port,
        connected(port) as silent,
    ):
        silent.sendall(post("/v1/chat/completions", CHAT)[:-1])
        read_until(silent, b"}}")

        assert status(exchange(port, get("/health", "Connection: close"))) == 200
        assert read_all(silent) == b""


def test_a_connection_with_refusals_is_kept_open() -> None:
    """The deadline of a first request is over after its refusal."""
    engine = FakeEngine(refusal=FULL)
    with serve_in_thread(engine, settings(limits={"head_seconds": 0.2})) as port, connected(port) as client:
        for refusal in (FULL, None):
            engine.refusal = refusal
            client.sendall(post("/v1/chat/completions", CHAT))
            answer = read_until(client, b"}}")
            assert status(answer) == (200 if refusal is None else 429)
            client.settimeout(0.4)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(20)
