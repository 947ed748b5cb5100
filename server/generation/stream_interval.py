"""Combines deltas of a stream, for clients that request fewer chunks."""

from __future__ import annotations

from collections.abc import Iterator

from engine.types.events import Delta, Event
from server.http.stream_encoder import StreamEncoder


def with_interval(encoder: StreamEncoder, interval: int | None) -> StreamEncoder:
    """An encoder that combines deltas of a choice up to `interval` tokens; the first delta is not delayed."""
    return encoder if interval is None else _IntervalEncoder(encoder, interval)


class _IntervalEncoder:
    def __init__(self, encoder: StreamEncoder, interval: int) -> None:
        self._encoder, self._interval = encoder, interval
        self._pending: dict[int, Delta] = {}
        self._started: set[int] = set()

    def encode(self, choice: int, event: Event) -> bytes:
        """Encode the events that are due."""
        return b"".join(self._encoder.encode(choice, ready) for ready in self._ready(choice, event))

    async def close(self) -> bytes:
        """The encoding after all events; no delta is pending then."""
        return await self._encoder.close()

    def _ready(self, choice: int, event: Event) -> Iterator[Event]:
        pending = self._pending.pop(choice, None)
        if isinstance(event, Delta):
            if pending is not None:
                event = Delta(
                    pending.text + event.text, pending.tokens + event.tokens, pending.logprobs + event.logprobs
                )
            if choice in self._started and len(event.tokens) < self._interval:
                self._pending[choice] = event
                return
            self._started.add(choice)
        elif pending is not None:
            yield pending
        yield event
