"""The short way of a text: from where the engine delivers it to the connection, without waking anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from engine.output.stream import RequestStream
from engine.types.events import Delta, Event
from engine.types.request import Request
from server.generation.requests import generate
from server.http.encoding import dumps
from server.http.stream_encoder import CONNECTION, encode_stream
from server.metrics import Metrics
from server.service import Service
from tests.server.fakes import FakeEngine, finished, settings


@dataclass
class Wire:
    """A connection that keeps what it is given."""

    writable: bool = True
    sending_chunks: bool = True
    written: list[bytes] = field(default_factory=list)

    def write(self, body: bytes) -> None:
        self.written.append(body)


class Letters:
    """Tells the texts, with the number of their choice."""

    def encode(self, choice: int, event: Event) -> bytes:
        return f"{choice}{event.text}".encode() if isinstance(event, Delta) else b"."

    async def close(self) -> bytes:
        return b"!"


@dataclass
class Border(FakeEngine):
    """An engine whose streams are real; the test delivers to them."""

    streams: list[RequestStream] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[RequestStream]:  # type: ignore[override]
        self.streams.append(RequestStream(request.id))
        yield self.streams[-1]


def run(wire: Wire, steps: list[Callable[[list[RequestStream]], object]], choices: int = 1) -> tuple[list[bytes], str]:
    """What the reader gets of these steps, and the metrics behind them."""
    engine = Border()
    metrics = Metrics(engine)  # type: ignore[arg-type]
    service = Service(engine, settings(), metrics)  # type: ignore[arg-type]
    requests = [Request(str(choice), (1,)) for choice in range(choices)]

    async def story() -> list[bytes]:
        got: list[bytes] = []

        async def read() -> None:
            scope = {"path": "/", "state": {CONNECTION: wire}}
            async with (
                generate(service, requests, "completions") as events,
                aclosing(encode_stream(events, Letters(), scope, dumps, b"end")) as frames,
            ):
                async for frame in frames:
                    got.append(frame)

        reader = asyncio.create_task(read())
        for step in steps:
            for _ in range(9):
                await asyncio.sleep(0)
            step(engine.streams)
        for stream in engine.streams:
            stream.deliver(finished(requests[0]))
        await reader
        return got

    return asyncio.run(story()), metrics.render().decode()


def say(text: str, choice: int = 0) -> Callable[[list[RequestStream]], object]:
    return lambda streams: streams[choice].deliver(Delta(text, (1,)))


def test_a_text_goes_straight_to_the_connection() -> None:
    """The reader gets the end only, and what was said is counted as if it had passed there."""
    wire = Wire()
    read, metrics = run(wire, [say("a"), say("b"), say("c")])

    assert [b"0a", b"0b", b"0c"] == wire.written
    assert [b".", b"!", b"end"] == read
    assert "cellar_time_to_first_token_seconds_count 1.0" in metrics
    assert "cellar_inter_token_latency_seconds_count 2.0" in metrics


def test_every_choice_has_the_short_way() -> None:
    """Texts of several choices need no reader either."""
    wire = Wire()
    read, _ = run(wire, [say("a", 1), say("b", 0), say("c", 1)], choices=2)

    assert [b"1a", b"0b", b"1c"] == wire.written
    assert [b".", b".", b"!", b"end"] == read


def test_what_waits_is_not_overtaken() -> None:
    """Where the client takes nothing the reader gets the text, and what comes before it has run joins that."""
    wire = Wire(writable=False)

    def more(streams: list[RequestStream]) -> None:
        say("b")(streams)
        wire.writable = True
        say("c")(streams)

    read, _ = run(wire, [say("a"), more, say("d")])

    assert [b"0d"] == wire.written
    assert [b"0a", b"0bc", b".", b"!", b"end"] == read


def test_no_connection_no_short_way() -> None:
    """An answer that goes out in one length, or a server that gives no connection, is read and sent."""
    wire = Wire(sending_chunks=False)
    read, _ = run(wire, [say("a"), say("b")])

    assert [] == wire.written
    assert [b"0a", b"0b", b".", b"!", b"end"] == read
