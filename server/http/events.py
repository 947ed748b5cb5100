"""The events of all choices of one response."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable

from engine.types.events import Delta, Event, PromptScored, Started

# Takes a delta of a choice; False: the delta goes through the iterator.
DeltaSink = Callable[[int, Delta], bool]
SetSink = Callable[[DeltaSink], None]
# Of an answer that is continued, parsed on the event loop: each takes 10 microseconds; and scored tokens of a prompt
# that are encoded there: 80 microseconds with 20 log-probabilities each.
MAX_INLINE_DELTAS = MAX_INLINE_SCORES = 256
# Deltas of an answer that is not streamed, for which its task is woken up once.
BATCHED_DELTAS = 32


class ChoiceEvents:
    """Pairs of a choice and its event, in order.

    iterator  yields them; closing it ends the subscription
    set_sink  sets the sink of deltas that arrive while the iterator waits: the engine's delivery callback calls it
    """

    def __init__(self, iterator: AsyncGenerator[tuple[int, Event], None], set_sink: SetSink) -> None:
        self.iterator, self.set_sink = iterator, set_sink

    def __aiter__(self) -> AsyncGenerator[tuple[int, Event], None]:
        return self.iterator


def in_batches(events: ChoiceEvents) -> ChoiceEvents:
    """The same events, for an answer as a whole: its task is woken up once for BATCHED_DELTAS deltas of a choice.

    A wake-up for every token costs a tenth of the event loop's time.
    """
    waiting: defaultdict[int, list[Delta]] = defaultdict(list)

    def keep(choice: int, delta: Delta) -> bool:
        is_kept = len(waiting[choice]) < BATCHED_DELTAS - 1
        if is_kept:
            waiting[choice].append(delta)
        return is_kept

    async def batches() -> AsyncGenerator[tuple[int, Event], None]:
        async for choice, event in events:
            for delta in waiting.pop(choice, ()):
                yield choice, delta
            yield choice, event

    events.set_sink(keep)
    return ChoiceEvents(batches(), events.set_sink)


def is_long(event: Event) -> bool:
    """Whether an event has so many deltas or scores that a worker thread parses and encodes it."""
    match event:
        case Started():
            return len(event.earlier) > MAX_INLINE_DELTAS
        case PromptScored():
            return len(event.entries) > MAX_INLINE_SCORES
        case _:
            return False
