"""The client's end of a request: events in order, deltas merged for slow readers, and an end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.output.stream import RequestStream
from engine.types.events import Delta, Event, Failed, Finished, Started, Timings, Usage

END = Finished("stop", None, Usage(1, 2, 0), Timings(0.0, 0.0, 0.0))
EVENTS = [Started(1, 0, 5), Delta("a", (1,)), Delta("b", (2, 3)), Delta("", (4,)), END]


async def read(stream: RequestStream) -> list[Event]:
    """Everything until the end."""
    return [event async for event in stream]


def late(events: Sequence[Event]) -> list[Event]:
    """What a reader gets who comes when all has happened."""

    async def story() -> list[Event]:
        stream = RequestStream("one")
        for event in events:
            stream.deliver(event)
        return await read(stream)

    return asyncio.run(story())


def test_a_slow_reader_gets_deltas_merged() -> None:
    """All deltas that wait are one, with all their tokens; other events stay as they are."""
    assert [EVENTS[0], Delta("ab", (1, 2, 3, 4)), END] == late(EVENTS)


def test_a_fast_reader_gets_every_event() -> None:
    """Who reads after every event gets each delta alone."""

    async def story() -> list[Event]:
        stream, got = RequestStream("one"), []
        for event in EVENTS:
            stream.deliver(event)
            got.append(await anext(stream))
        return got

    assert EVENTS == asyncio.run(story())


def test_a_waiting_reader_wakes_up() -> None:
    """A reader that came too early gets what comes later."""

    async def story() -> list[Event]:
        stream = RequestStream("one")
        reader = asyncio.create_task(read(stream))
        for event in EVENTS:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            stream.deliver(event)
        return await reader

    assert EVENTS == asyncio.run(story())


def test_a_shortcut_takes_deltas_from_a_reader_that_waits() -> None:
    """Only deltas, only while nothing is on its way to the reader, and only those that it wants; none is lost."""
    taken: list[Delta] = []

    def shortcut(delta: Delta) -> bool:
        if delta.text != "refused":
            taken.append(delta)
        return delta.text != "refused"

    async def story() -> list[Event]:
        stream = RequestStream("one")
        stream.fast_path = shortcut
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

    told = asyncio.run(story())

    assert [Delta("early", (1,)), Delta("refusedlate", (2, 2)), END] == told
    assert ["a", "b", "c"] == [delta.text for delta in taken]


def test_a_shortcut_takes_nothing_from_a_reader_that_has_left() -> None:
    """What comes when a reader was cancelled waits for another one."""
    taken: list[Delta] = []

    def shortcut(delta: Delta) -> bool:
        taken.append(delta)
        return True

    async def story() -> list[Event]:
        stream = RequestStream("one")
        stream.fast_path = shortcut
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        reader.cancel()
        stream.deliver(Delta("a", (1,)))
        stream.deliver(END)
        return await read(stream)

    assert [Delta("a", (1,)), END] == asyncio.run(story())
    assert [] == taken


def test_nothing_comes_after_the_end() -> None:
    """Events behind the last one are dropped, and a stream that is over stays over."""
    assert [Failed("broken")] == late([Failed("broken"), Delta("late", (1,)), END])


def test_two_ends_do_not_happen() -> None:
    """The first end is the end."""

    async def story() -> tuple[list[Event], list[Event]]:
        stream = RequestStream("one")
        stream.deliver(END)
        stream.deliver(Failed("late"))
        return await read(stream), await read(stream)

    assert ([END], []) == asyncio.run(story())
