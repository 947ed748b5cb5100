"""RequestStream: events in order, merged deltas for slow readers, one end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.output.stream import UNREAD_EVENTS, RequestStream
from engine.types.events import Delta, Event, Failed, Finished, Started, Timings, Usage

END = Finished("stop", None, Usage(1, 2, 0), Timings(0.0, 0.0, 0.0))
EVENTS = [Started(1, 0, 5), Delta("a", (1,)), Delta("b", (2, 3)), Delta("", (4,)), END]


async def read(stream: RequestStream) -> list[Event]:
    """All events up to the end."""
    return [event async for event in stream]


def late(events: Sequence[Event]) -> list[Event]:
    """The events of a reader that starts after the last event."""

    async def story() -> list[Event]:
        stream = RequestStream("one")
        for event in events:
            stream.deliver(event)
        return await read(stream)

    return asyncio.run(story())


def test_a_slow_reader_gets_deltas_merged() -> None:
    assert [EVENTS[0], Delta("ab", (1, 2, 3, 4)), END] == late(EVENTS)


def test_output_that_is_left_unread_is_reported_once() -> None:
    """And that it is read again; the end of the stream is not."""

    async def story() -> list[bool]:
        reported: list[bool] = []
        stream = RequestStream("one", on_unread=reported.append)
        reader = asyncio.create_task(read(stream))
        stream.deliver(Started(1, 0, 5))
        for _ in range(3 * UNREAD_EVENTS):
            stream.deliver(Delta("a", (1,)))
        assert [True] == reported
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [True, False] == reported
        for event in [*[Delta("a", (1,))] * (2 * UNREAD_EVENTS), END]:
            stream.deliver(event)
        await reader
        return reported

    assert [True, False, True] == asyncio.run(story())


def test_a_fast_reader_gets_every_event() -> None:
    async def story() -> list[Event]:
        stream, got = RequestStream("one"), []
        for event in EVENTS:
            stream.deliver(event)
            got.append(await anext(stream))
        return got

    assert EVENTS == asyncio.run(story())


def test_a_waiting_reader_wakes_up() -> None:
    async def story() -> list[Event]:
        stream = RequestStream("one")
        reader = asyncio.create_task(read(stream))
        for event in EVENTS:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            stream.deliver(event)
        return await reader

    assert EVENTS == asyncio.run(story())


def test_the_fast_path_takes_deltas_of_a_waiting_reader() -> None:
    taken: list[Delta] = []

    def fast_path(delta: Delta) -> bool:
        if delta.text != "refused":
            taken.append(delta)
        return delta.text != "refused"

    async def story() -> list[Event]:
        stream = RequestStream("one")
        stream.fast_path = fast_path
        stream.deliver(Delta("early", (1,)))
        reader = asyncio.create_task(read(stream))
        for step in ([], ["a", "b"], ["refused", "late"], ["c"]):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for text in step:
                stream.deliver(Delta(text, (2,)))
        await asyncio.sleep(0)
        stream.deliver(END)
        return await reader

    events = asyncio.run(story())

    assert [Delta("early", (1,)), Delta("refusedlate", (2, 2)), END] == events
    assert ["a", "b", "c"] == [delta.text for delta in taken]


def test_a_fast_path_that_raises_ends_its_stream() -> None:
    async def run() -> list[Event]:
        def fast_path(delta: Delta) -> bool:
            raise MemoryError

        stream = RequestStream("one")
        stream.fast_path = fast_path
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        stream.deliver(Delta("a", (1,)))
        stream.deliver(Delta("b", (2,)))
        return await reading

    assert [Failed("the output could not be delivered (MemoryError)")] == asyncio.run(run())


def test_the_fast_path_is_off_after_the_reader_left() -> None:
    taken: list[Delta] = []

    def fast_path(delta: Delta) -> bool:
        taken.append(delta)
        return True

    async def story() -> list[Event]:
        stream = RequestStream("one")
        stream.fast_path = fast_path
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        reader.cancel()
        stream.deliver(Delta("a", (1,)))
        stream.deliver(END)
        return await read(stream)

    assert [Delta("a", (1,)), END] == asyncio.run(story())
    assert [] == taken


def test_events_after_the_end_are_dropped() -> None:
    assert [Failed("broken")] == late([Failed("broken"), Delta("late", (1,)), END])


def test_only_the_first_end_counts() -> None:
    async def story() -> tuple[list[Event], list[Event]]:
        stream = RequestStream("one")
        stream.deliver(END)
        stream.deliver(Failed("late"))
        return await read(stream), await read(stream)

    assert ([END], []) == asyncio.run(story())
