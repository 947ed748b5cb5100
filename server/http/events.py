"""The events of all choices of one response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from engine.types.events import Delta, Event, Started

# Takes a delta of a choice; False: the delta goes through the iterator.
DeltaSink = Callable[[int, Delta], bool]
SetSink = Callable[[DeltaSink], None]
# Of an answer that is continued, parsed on the event loop: each takes 10 microseconds.
MAX_INLINE_DELTAS = 256


class ChoiceEvents:
    """Pairs of a choice and its event, in order.

    iterator  yields them; closing it ends the subscription
    set_sink  sets the sink of deltas that arrive while the iterator waits: the engine's delivery callback calls it
    """

    def __init__(self, iterator: AsyncGenerator[tuple[int, Event], None], set_sink: SetSink) -> None:
        self.iterator, self.set_sink = iterator, set_sink

    def __aiter__(self) -> AsyncGenerator[tuple[int, Event], None]:
        return self.iterator


def is_long(event: Event) -> bool:
    """Whether an event has so many deltas that a worker thread parses it."""
    return isinstance(event, Started) and len(event.earlier) > MAX_INLINE_DELTAS
