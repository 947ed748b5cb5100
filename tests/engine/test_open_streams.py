"""Events of many streams: delivered in order, with other work of the event loop between them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from engine.open_streams import EVENTS_PER_ITERATION, OpenStreams
from engine.output.stream import RequestStream
from engine.queue_limit import QueueLimit
from engine.types.events import Delta, Failed, Finished, Timings, Usage

COUNT = 8 * EVENTS_PER_ITERATION
END = Finished("length", None, Usage(1, 3, 0), Timings(0.0, 0.0, 0.0))


@contextmanager
def opened(streams: OpenStreams[int]) -> Iterator[list[RequestStream]]:
    """COUNT open streams."""
    with ExitStack() as stack:
        made = [RequestStream(str(number)) for number in range(COUNT)]
        for number, stream in enumerate(made):
            stack.enter_context(streams.hold(number, stream, ""))
        yield made


def open_streams() -> OpenStreams[int]:
    """A table without streams."""
    return OpenStreams(QueueLimit(COUNT), lambda _: None)


async def read(stream: RequestStream) -> tuple[str, type]:
    """The text, and the type of the last event."""
    events = [event async for event in stream]
    return "".join(event.text for event in events if isinstance(event, Delta)), type(events[-1])


def test_other_work_runs_between_the_events_of_a_step() -> None:
    async def story() -> list[int]:
        """Deltas that were delivered in each iteration of the event loop."""
        streams, delivered = open_streams(), 0

        def take(_: Delta) -> bool:
            nonlocal delivered
            delivered += 1
            return True

        with opened(streams) as made:
            reading = [asyncio.create_task(read(stream)) for stream in made]
            await asyncio.sleep(0)
            for stream in made:
                stream.fast_path = take
            streams.deliver((stream, Delta("a", ())) for stream in made)
            counts = [delivered]
            while delivered < COUNT:
                await asyncio.sleep(0)
                counts.append(delivered - sum(counts))
            streams.fail("the engine stopped")
            await asyncio.gather(*reading)
        return counts

    assert asyncio.run(story()) == [EVENTS_PER_ITERATION] * 8


def test_events_of_later_steps_do_not_overtake() -> None:
    async def story() -> list[tuple[str, type]]:
        streams = open_streams()
        with opened(streams) as made:
            reading = [asyncio.create_task(read(stream)) for stream in made]
            for text in "abc":
                streams.deliver((stream, Delta(text, ())) for stream in made)
                await asyncio.sleep(0)
            streams.deliver((stream, END) for stream in made)
            return await asyncio.gather(*reading)

    assert asyncio.run(story()) == [("abc", Finished)] * COUNT


def test_a_failure_follows_the_events_before_it() -> None:
    async def story() -> list[tuple[str, type]]:
        streams = open_streams()
        with opened(streams) as made:
            streams.deliver((stream, Delta("a", ())) for stream in made)
            streams.fail("the engine stopped")
            return [await read(stream) for stream in made]

    assert asyncio.run(story()) == [("a", Failed)] * COUNT
