"""Answers told in larger pieces, for clients that ask for fewer."""

from __future__ import annotations

from collections.abc import Iterator

from engine.types.events import Delta, Event
from server.http.stream_encoder import StreamEncoder


def with_interval(teller: StreamEncoder, interval: int | None) -> StreamEncoder:
    """The teller, where texts of a choice wait until they have so many tokens together; the first comes at once."""
    return teller if interval is None else _IntervalEncoder(teller, interval)


class _IntervalEncoder:
    def __init__(self, teller: StreamEncoder, interval: int) -> None:
        self._teller, self._interval = teller, interval
        self._held: dict[int, Delta] = {}
        self._begun: set[int] = set()

    def encode(self, choice: int, event: Event) -> bytes:
        """What the events that need not wait any more become."""
        return b"".join(self._teller.encode(choice, ready) for ready in self._ready(choice, event))

    async def close(self) -> bytes:
        """What follows all events; by then none waits."""
        return await self._teller.close()

    def _ready(self, choice: int, event: Event) -> Iterator[Event]:
        held = self._held.pop(choice, None)
        if isinstance(event, Delta):
            if held is not None:
                event = Delta(held.text + event.text, held.tokens + event.tokens, held.logprobs + event.logprobs)
            if choice in self._begun and len(event.tokens) < self._interval:
                self._held[choice] = event
                return
            self._begun.add(choice)
        elif held is not None:
            yield held
        yield event
