"""Streams on the wire: exact framing, keep-alive comments, errors after the first byte, disconnects, blocked sends."""

from __future__ import annotations

import json
import time
from typing import Any, cast

import pytest

from engine.types.events import Delta, Event, Failed, Started, TokenLogprob
from engine.types.request import Request
from server.app import create_app
from tests.server.fakes import (
    HERMES,
    WORDS,
    FakeEngine,
    FakeTokenizer,
    Gate,
    ask,
    entry,
    finished,
    serve_in_thread,
    settings,
)
from tests.server.wire import CHAT, connected, get, post, read_all, read_until, status

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
STREAM = {**MESSAGES, "stream": True}
TEXT = "/v1/completions"


def chunks(body: bytes) -> bytes:
    """The body of a chunked response."""
    data, rest = b"", body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        data, rest = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return data


def test_the_framing_is_exact() -> None:
    """`data: `, compact ASCII JSON, two line feeds; [DONE] at the end."""
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]

    body = ask(app, "POST", TEXT, json_body={"prompt": "a", "stream": True}).body

    first = json.loads(body[6 : body.index(b"\n")])
    head = json.dumps(
        {key: first[key] for key in ("id", "object", "created", "model", "system_fingerprint", "service_tier")},
        separators=(",", ":"),
    )[:-1]
    last = body.split(b"\n\n")[3]
    expected = "".join(
        f'data: {head},"choices":[{{"index":0,"text":"{text}","logprobs":null,"finish_reason":null}}]}}\n\n'
        for text in ("Hello", " wor", "ld")
    )
    assert (expected.encode() + last + b"\n\ndata: [DONE]\n\n") == body


def test_the_headers_of_a_stream() -> None:
    """No cache, no proxy buffering, UTF-8."""
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]

    headers = ask(app, "POST", CHAT, json_body=STREAM).headers

    assert ("text/event-stream; charset=utf-8", "no-cache", "no") == (
        headers["content-type"],
        headers["cache-control"],
        headers["x-accel-buffering"],
    )
    assert "x-request-id" in headers


def test_no_text_can_break_the_framing() -> None:
    """Line ends of every kind are escaped in JSON."""
    nasty = 'a\nb\r\nc\rd\u2028e\u2029f\x85g\x0bh\x00i\U0001f600"\\'

    def script(request: Request) -> list[Event]:
        return [Delta(nasty, (1,)), Delta(nasty, (2,)), Delta("\0", (3,)), finished(request)]

    app = create_app(FakeEngine(script), settings())  # type: ignore[arg-type]
    body = ask(app, "POST", TEXT, json_body={"prompt": "a", "stream": True}).body

    lines = [line for line in body.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:3]]
    assert [nasty, nasty, "\0"] == texts


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_all_text_chunks_have_one_encoding(path: str) -> None:
    """The template of a stream's chunks equals their separate encoding."""

    def script(request: Request) -> list[Event]:
        return [Delta(text, (1,)) for text in ("<think>", "why ", "not</think>", "a", " b\n", "c")] + [
            finished(request)
        ]

    engine = FakeEngine(script, tokenizer=FakeTokenizer(HERMES))
    app = create_app(engine, settings())  # type: ignore[arg-type]
    asked = {"prompt": "a"} if path == TEXT else MESSAGES
    plain, whole = (
        ask(app, "POST", path, json_body={**asked, "stream": True, "request_id": "same", **more}).events[:-1]
        for more in ({}, {"timings_per_token": True})
    )
    kept = [[{**event, "created": 0, "timings": None} for event in events] for events in (plain, whole)]

    assert kept[1] == kept[0]


def test_silent_streams_get_comments() -> None:
    """In the queue and during prefill, by the clock, after the headers."""
    gate = Gate()

    def script(request: Request) -> list[Event | Gate]:
        return [gate, Started(1, 0, 0), Delta("x", (1,)), finished(request)]

    engine = FakeEngine(script)
    with serve_in_thread(engine, settings(limits={"ping_seconds": 0.05})) as port, connected(port) as client:
        client.sendall(post(CHAT, STREAM, "Connection: close"))
        silent = read_until(client, b": keep-alive\n\n\r\n")
        assert b"data: " not in silent
        gate.open()
        rest = read_all(client)

    text = chunks((silent + rest).partition(b"\r\n\r\n")[2])
    assert text.startswith(b": keep-alive\n\n")
    assert text.endswith(b"data: [DONE]\n\n")
    assert {b": keep-alive", b""} == {part for part in text.split(b"\n\n") if not part.startswith(b"data: ")}


@pytest.mark.parametrize(
    ("phase", "alive", "code"),
    [("ready", True, "generation_failed"), ("draining", True, "server_draining"), ("dead: x", False, "engine_dead")],
)
def test_an_error_after_the_first_byte_is_an_event(phase: str, alive: bool, code: str) -> None:
    """The error is the last event, without [DONE]."""
    engine = FakeEngine()

    def script(request: Request) -> Any:
        yield Delta("Hel", (1,))
        engine.phase, engine.alive = phase, alive
        yield Failed("broken")

    engine.script = script
    answer = ask(create_app(engine, settings()), "POST", CHAT, json_body=STREAM)  # type: ignore[arg-type]

    assert 200 == answer.status
    assert code == answer.events[-1]["error"]["code"]
    assert {"message", "type", "param", "code"} <= answer.events[-1]["error"].keys()
    assert ["", "Hel"] == [event["choices"][0]["delta"]["content"] for event in answer.events[:-1]]


def test_an_exception_after_the_first_byte_is_an_event() -> None:
    """In the error envelope, without details."""

    def script(request: Request) -> Any:
        yield Delta("Hel", (1,))
        raise RuntimeError("/home/secret")

    answer = ask(create_app(FakeEngine(script), settings()), "POST", CHAT, json_body=STREAM)  # type: ignore[arg-type]

    assert "internal_error" == answer.events[-1]["error"]["code"]
    assert b"secret" not in answer.body


@pytest.mark.parametrize(("path", "begin"), [(CHAT, 2), (TEXT, 1)], ids=["chat", "text"])
def test_an_exception_in_delivery_ends_its_stream_alone(path: str, begin: int) -> None:
    """DirectWriter passes the exception to the request's task."""

    def script(request: Request) -> Any:
        yield Started(1, 0, 0)
        yield Delta("Hel", (1,), (entry(1, "Hel", 0),))
        yield Delta("lo", (2,), (cast(TokenLogprob, "none"),))
        yield finished(request)

    asked = {"prompt": "a", "logprobs": 0} if path == TEXT else {**MESSAGES, "logprobs": True}
    with serve_in_thread(FakeEngine(script)) as port, connected(port) as client:
        client.sendall(post(path, {**asked, "stream": True}, "Connection: close"))
        text = chunks(read_all(client).partition(b"\r\n\r\n")[2])

    *reply, last, rest = text.split(b"\n\n")
    assert begin == len(reply)
    assert b"internal_error" in last
    assert b"" == rest


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_events_are_the_same_for_http_1_0_and_1_1(version: str) -> None:
    """Chunked, or up to the end of the connection; with and without direct writes."""
    with serve_in_thread(FakeEngine()) as port, connected(port) as client:
        asked = post(TEXT, {"prompt": "a", "stream": True}, "Connection: close")
        client.sendall(asked.replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        head, _, body = read_all(client).partition(b"\r\n\r\n")

    text = chunks(body) if b"chunked" in head.lower() else body
    assert (version == "1.1") == (b"chunked" in head.lower())
    events = [json.loads(line[6:]) for line in text.split(b"\n\n")[:-2]]
    assert [*WORDS, ""] == [event["choices"][0]["text"] for event in events]
    assert text.endswith(b"data: [DONE]\n\n")


def test_a_slow_client_gets_all_text() -> None:
    """While the send buffer is full, text is queued in order."""
    texts = [f"{number:05d}" * 20_000 for number in range(60)]

    def script(request: Request) -> Any:
        yield from (Delta(text, (1,)) for text in texts)
        yield finished(request)

    with serve_in_thread(FakeEngine(script)) as port, connected(port) as client:
        client.sendall(post(TEXT, {"prompt": "a", "stream": True}, "Connection: close"))
        time.sleep(0.2)
        body = chunks(read_all(client).partition(b"\r\n\r\n")[2])

    events = [json.loads(part[6:]) for part in body.split(b"\n\n")[:-2]]
    assert "".join(texts) == "".join(event["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("body", [STREAM, MESSAGES], ids=["stream", "in one piece"])
def test_a_disconnect_cancels_the_request(body: dict[str, Any]) -> None:
    """As soon as the socket closes, with and without streaming."""
    gate = Gate()
    engine = FakeEngine(lambda request: [Delta("x", (1,)), gate])
    with serve_in_thread(engine) as port:
        with connected(port) as client:
            client.sendall(post(CHAT, body))
            assert gate.reached.wait(20)
            assert 1 == len(engine.running)

        assert engine.left.wait(20)
        assert set() == engine.running


def test_a_disconnect_cancels_all_prompts() -> None:
    """Also requests without a first token."""
    gate = Gate()
    engine = FakeEngine(lambda request: [gate])
    with serve_in_thread(engine) as port:
        with connected(port) as client:
            client.sendall(post(TEXT, {"prompt": ["a", "b", "c"], "stream": True}))
            assert gate.reached.wait(20)
        while engine.running:
            assert engine.left.wait(20)
            engine.left.clear()

    assert 3 == len(engine.requests)


@pytest.mark.parametrize("body", [STREAM, {**MESSAGES, "logprobs": True}], ids=["stream", "in one piece"])
def test_a_blocked_send_closes_the_connection(body: dict[str, Any]) -> None:
    """After the deadline the connection is reset and its request cancelled; others are served meanwhile."""

    def script(request: Request) -> Any:
        for _ in range(400):
            yield Delta("x" * 100_000, (1,))
        yield finished(request)

    engine = FakeEngine(script)
    with serve_in_thread(engine, settings(limits={"write_seconds": 0.3})) as port, connected(port) as frozen:
        frozen.sendall(post(CHAT, body))
        begin = time.monotonic()
        assert engine.left.wait(20)
        with connected(port) as other:
            other.sendall(get("/health", "Connection: close"))
            assert 200 == status(read_all(other))
        received = read_all(frozen)

    assert time.monotonic() - begin < 15
    assert len(received) < 40_000_000
    assert b"[DONE]" not in received


def test_hundreds_of_streams_come_and_go() -> None:
    """Disconnects at any time leave no request in the engine."""
    gate = Gate()
    engine = FakeEngine(lambda request: [Delta("x", (1,)), gate])
    with serve_in_thread(engine) as port:
        for _ in range(100):
            with connected(port) as client:
                client.sendall(post(CHAT, STREAM))
        with connected(port) as client:
            client.sendall(post(CHAT, STREAM))
            read_until(client, b'"x"')
        while engine.running:
            assert engine.left.wait(20)
            engine.left.clear()

    assert set() == engine.running
