"""The open streams of an engine, in this process or in another one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from engine.output.stream import RequestStream
from engine.queue_limit import QueueLimit
from engine.types.events import Event, Failed

Key = TypeVar("Key")
# Events that are delivered in one iteration of the event loop. A write to a client releases the interpreter lock, and
# takes 1 ms while the engine's thread needs the lock: 512 writes in one iteration held probes for 100 ms.
EVENTS_PER_ITERATION = 8


class OpenStreams(Generic[Key]):
    """Streams by key. Belongs to the event loop's thread.

    cancel  called for a stream that is left, or fails, before its end
    """

    def __init__(self, limit: QueueLimit, cancel: Callable[[RequestStream], None]) -> None:
        self._limit, self._cancel = limit, cancel
        self._streams: dict[Key, RequestStream] = {}
        self._closed = asyncio.Event()
        self._events: deque[tuple[RequestStream, Event]] = deque()

    @property
    def streams(self) -> Iterable[RequestStream]:
        """All open streams."""
        return self._streams.values()

    def get(self, key: Key) -> RequestStream | None:
        """The open stream of a key; a stream that was left is not open any more."""
        return self._streams.get(key)

    @contextmanager
    def hold(self, key: Key, stream: RequestStream, owner: str) -> Iterator[None]:
        """Inside the block, the stream is open, and counts as a request of its owner."""
        self._streams[key] = stream
        try:
            with self._limit.hold(owner):
                yield
        finally:
            if not stream.finished:
                self._cancel(stream)
            del self._streams[key]
            self._closed.set()

    def deliver(self, events: Iterable[tuple[RequestStream, Event]]) -> None:
        """Deliver events in their order, many of them in several iterations of the event loop."""
        is_delivering = bool(self._events)
        self._events.extend(events)
        if not is_delivering:
            self._deliver_some()

    def _deliver_some(self) -> None:
        events = [self._events.popleft() for _ in range(min(len(self._events), EVENTS_PER_ITERATION))]
        if self._events:
            asyncio.get_running_loop().call_soon(self._deliver_some)
        for stream, event in events:
            stream.deliver(event)

    async def wait_closed(self, deadline: float) -> None:
        """Return when no stream is open, at the latest at a time of the event loop's clock."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._streams:
                    self._closed.clear()
                    await self._closed.wait()

    def fail(self, reason: str) -> None:
        """Cancel all streams, and deliver the failure to each, after the events before it."""
        while self._events:
            stream, event = self._events.popleft()
            stream.deliver(event)
        for stream in tuple(self._streams.values()):
            if not stream.finished:
                self._cancel(stream)
            stream.deliver(Failed(reason))
