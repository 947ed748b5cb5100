"""The events of one request as an async iterator on the event loop.

The engine never waits for a client: events are queued, and a slow reader gets the deltas of several steps as one. For a
fast reader the `fast_path` callback takes a delta inside the delivery, without a wake-up of the reading task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from engine.types.events import Delta, Event, Failed, Finished

log = logging.getLogger("cellar.engine")

# Queued events from which on the output counts as unread.
UNREAD_EVENTS = 32


class RequestStream:
    """Yields Started, then deltas, then exactly one Finished or Failed. Owned by the event loop's thread.

    number     of the request among all of its engine, from 1 on: an id may return, the number does not
    finished   the last event was delivered
    on_unread  called with True when events are left unread, with False when they are read again
    fast_path  called with a delta that arrives while the reader waits; False queues the delta, an exception ends the
               stream with Failed
    """

    def __init__(self, request_id: str, number: int = 0, on_unread: Callable[[bool], None] = lambda _: None) -> None:
        self.id, self.number = request_id, number
        self.finished = False
        self.fast_path: Callable[[Delta], bool] | None = None
        self._on_unread, self._is_unread = on_unread, False
        self._events: deque[Event] = deque()
        self._wakeup: asyncio.Future[None] | None = None

    def deliver(self, event: Event) -> None:
        """Add an event from the engine; events after the last one are dropped."""
        if self.finished:
            return
        if self._wakeup is None or self._wakeup.done():
            self._queue(event)
        elif (queued := self._after_fast_path(event)) is not None:
            self._queue(queued)
            self._wakeup.set_result(None)

    def _after_fast_path(self, event: Event) -> Event | None:
        """The event to queue: none if the fast path took it."""
        try:
            taken = self.fast_path is not None and isinstance(event, Delta) and self.fast_path(event)
        except Exception as error:
            log.exception("a delta could not be delivered")
            return Failed(f"the output could not be delivered ({type(error).__name__})")
        return None if taken else event

    def _queue(self, event: Event) -> None:
        self.finished = isinstance(event, Finished | Failed)
        self._events.append(event)
        if len(self._events) == UNREAD_EVENTS and not self._is_unread:
            self._set_unread(True)

    def _set_unread(self, is_unread: bool) -> None:
        self._is_unread = is_unread
        if not self.finished:
            self._on_unread(is_unread)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self.finished:
                raise StopAsyncIteration
            if self._is_unread:
                self._set_unread(False)
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup
        event = self._events.popleft()
        return self._merged(event) if isinstance(event, Delta) else event

    def _merged(self, delta: Delta) -> Delta:
        """The delta merged with the deltas that directly follow it in the queue."""
        deltas = [delta]
        while self._events and isinstance(following := self._events[0], Delta):
            self._events.popleft()
            deltas.append(following)
        if len(deltas) == 1:
            return delta
        tokens = tuple(token for part in deltas for token in part.tokens)
        entries = tuple(entry for part in deltas for entry in part.logprobs)
        return Delta("".join(part.text for part in deltas), tokens, entries)
