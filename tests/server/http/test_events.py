"""The events of an answer as a whole: its task is woken up once for many tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine.output.stream import RequestStream
from engine.types.events import Delta, Event, Finished
from engine.types.request import Request
from server.generation.requests import generate
from server.http.events import BATCHED_DELTAS, in_batches
from server.metrics.metrics import Metrics, render
from server.service import Service
from tests.server.fakes import FakeEngine, finished, settings


class CountedStream(RequestStream):
    """Counts the wake-ups of its reader, without the one for the end."""

    wakeups = 0

    def _queue(self, event: Event) -> None:
        self.wakeups += not isinstance(event, Finished)
        super()._queue(event)


@dataclass
class CountingEngine(FakeEngine):
    """An engine with real streams, to which the test delivers."""

    streams: list[CountedStream] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[CountedStream]:  # type: ignore[override]
        self.streams.append(CountedStream(request.id))
        yield self.streams[-1]


def collect(tokens: int, choices: int = 1) -> tuple[list[tuple[int, Event]], list[int], str]:
    """All events after so many steps, the wake-ups of each choice, and the metrics."""
    engine = CountingEngine()
    metrics = Metrics(engine, "fake")
    service = Service(engine, settings(), metrics, "fake")
    requests = [Request(str(choice), (1,)) for choice in range(choices)]

    async def read() -> list[tuple[int, Event]]:
        async with generate(service, requests, "completions") as events:
            return [pair async for pair in in_batches(events)]

    async def run() -> list[tuple[int, Event]]:
        reader = asyncio.create_task(read())
        for token in range(tokens):
            for _ in range(9):
                await asyncio.sleep(0)
            for number, stream in enumerate(engine.streams):
                stream.deliver(Delta(f"{number}.{token}", (token,)))
        for stream in engine.streams:
            stream.deliver(finished(requests[0]))
        return await reader

    events = asyncio.run(run())
    return events, [stream.wakeups for stream in engine.streams], render([metrics.model_registry]).decode()


def texts(events: list[tuple[int, Event]], choice: int) -> list[str]:
    return [event.text for number, event in events if number == choice and isinstance(event, Delta)]


def test_a_batch_of_tokens_wakes_the_task_up_once() -> None:
    """Every token comes in a delta of its own, in its order, and the metrics count each."""
    tokens = 2 * BATCHED_DELTAS + 5
    events, wakeups, metrics = collect(tokens)

    assert [f"0.{token}" for token in range(tokens)] == texts(events, 0)
    assert isinstance(events[-1][1], Finished)
    assert [2] == wakeups
    assert f'cellar_inter_token_latency_seconds_count{{model_name="fake"}} {tokens - 1}.0' in metrics


def test_choices_are_batched_each_for_itself() -> None:
    """The deltas of a choice come before its end."""
    events, wakeups, _ = collect(BATCHED_DELTAS + 1, choices=2)

    for choice in range(2):
        assert [f"{choice}.{token}" for token in range(BATCHED_DELTAS + 1)] == texts(events, choice)
        assert isinstance([event for number, event in events if number == choice][-1], Finished)
    assert [1, 1] == wakeups
