"""Direct writes: text deltas go from the engine's delivery callback to the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from engine.output.stream import RequestStream
from engine.types.events import Delta, Event
from engine.types.request import Request
from server import hosting
from server.configuration.settings import Settings
from server.generation.requests import generate
from server.http.direct_writer import CONNECTION
from server.http.encoding import dumps
from server.http.stream_encoder import encode_stream
from server.metrics.metrics import Metrics, render
from server.service import Service
from tests.server.fakes import WORDS, FakeEngine, finished, serve_in_thread, settings


@dataclass
class RecordingConnection:
    """A connection that records the bytes."""

    writable: bool = True
    sending_chunks: bool = True
    written: list[bytes] = field(default_factory=list)

    def write(self, body: bytes) -> None:
        self.written.append(body)


class ChoiceEncoder:
    """Encodes texts behind the number of their choice; the text "broken" raises."""

    def encode(self, choice: int, event: Event) -> bytes:
        if isinstance(event, Delta) and event.text == "broken":
            raise ValueError("broken")
        return f"{choice}{event.text}".encode() if isinstance(event, Delta) else b"."

    async def close(self) -> bytes:
        return b"!"


@dataclass
class StreamingEngine(FakeEngine):
    """An engine with real streams, to which the test delivers."""

    streams: list[RequestStream] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[RequestStream]:  # type: ignore[override]
        self.streams.append(RequestStream(request.id))
        yield self.streams[-1]


def run(
    connection: RecordingConnection, steps: list[Callable[[list[RequestStream]], object]], choices: int = 1
) -> tuple[list[bytes], str]:
    """The frames of the iterator after the steps, and the metrics."""
    engine = StreamingEngine()
    metrics = Metrics(engine, "fake")  # type: ignore[arg-type]
    service = Service(engine, settings(), metrics, "fake")  # type: ignore[arg-type]
    requests = [Request(str(choice), (1,)) for choice in range(choices)]

    async def respond() -> list[bytes]:
        frames_read: list[bytes] = []

        async def read() -> None:
            scope = {"path": "/", "state": {CONNECTION: connection}}
            async with (
                generate(service, requests, "completions") as events,
                aclosing(encode_stream(events, ChoiceEncoder(), scope, dumps, b"end")) as frames,
            ):
                async for frame in frames:
                    frames_read.append(frame)

        reader = asyncio.create_task(read())
        for step in steps:
            for _ in range(9):
                await asyncio.sleep(0)
            step(engine.streams)
        for stream in engine.streams:
            stream.deliver(finished(requests[0]))
        await reader
        return frames_read

    return asyncio.run(respond()), render([metrics.model_registry]).decode()


def deliver(text: str, choice: int = 0) -> Callable[[list[RequestStream]], object]:
    return lambda streams: streams[choice].deliver(Delta(text, (1,)))


def test_deltas_are_written_to_the_connection() -> None:
    """The iterator yields the end only; the metrics count the written deltas."""
    connection = RecordingConnection()
    read, metrics = run(connection, [deliver("a"), deliver("b"), deliver("c")])

    assert [b"0a", b"0b", b"0c"] == connection.written
    assert [b".", b"!", b"end"] == read
    assert 'cellar_time_to_first_token_seconds_count{model_name="fake"} 1.0' in metrics
    assert 'cellar_inter_token_latency_seconds_count{model_name="fake"} 2.0' in metrics


def test_deltas_of_all_choices_are_written() -> None:
    connection = RecordingConnection()
    read, _ = run(connection, [deliver("a", 1), deliver("b", 0), deliver("c", 1)], choices=2)

    assert [b"1a", b"0b", b"1c"] == connection.written
    assert [b".", b".", b"!", b"end"] == read


def test_a_queued_delta_is_not_overtaken() -> None:
    """While the connection is not writable, deltas are queued; later ones join the queue until it is empty."""
    connection = RecordingConnection(writable=False)

    def more(streams: list[RequestStream]) -> None:
        deliver("b")(streams)
        connection.writable = True
        deliver("c")(streams)

    read, _ = run(connection, [deliver("a"), more, deliver("d")])

    assert [b"0d"] == connection.written
    assert [b"0a", b"0bc", b".", b"!", b"end"] == read


def test_an_encoding_error_ends_its_stream_alone() -> None:
    """It is raised in the request's task, not in the delivery callback, and nothing is written after it."""
    connection = RecordingConnection()
    read, _ = run(connection, [deliver("a"), deliver("broken")])

    assert [b"0a"] == connection.written
    assert 1 == len(read)
    assert b"internal_error" in read[0]


def test_a_response_without_chunks_is_iterated() -> None:
    """A body with a content length, or a server without direct writes."""
    connection = RecordingConnection(sending_chunks=False)
    read, _ = run(connection, [deliver("a"), deliver("b")])

    assert [] == connection.written
    assert [b"0a", b"0b", b".", b"!", b"end"] == read


@pytest.mark.parametrize("direct_writes", [True, False])
def test_middleware_sees_all_bodies_without_direct_writes(direct_writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets the same bytes either way."""
    sent: list[bytes] = []
    create_app = hosting.create_app

    def create_wrapped(engine: Any, using: Settings) -> Any:
        app = create_app(engine, using)

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            async def record(message: Message) -> None:
                sent.append(message.get("body", b""))
                await send(message)

            await app(scope, receive, record)

        wrapped.state = app.state  # type: ignore[attr-defined]
        return wrapped

    monkeypatch.setattr(hosting, "create_app", create_wrapped)
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with serve_in_thread(FakeEngine(), settings(direct_writes=direct_writes)) as port:
        received = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body).content

    texts = [word.encode() for word in WORDS]
    assert all(text in received for text in texts)
    assert direct_writes == (received != b"".join(sent))
    assert direct_writes != all(any(text in part for part in sent) for text in texts)
