"""The limit of open requests: which of them are admitted when the queue is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import Overloaded


class QueueLimit:
    """Limits open requests, running and waiting ones. Belongs to the event loop's thread.

    max_waiting  of all owners together. An owner with less than an even share of slots and queue is admitted all the
                 same, so that no owner can fill the queue for the others.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._open_requests: Counter[str] = Counter()

    def check(self, owner: str, slots: int, free_place_seconds: float) -> None:
        """Raise Overloaded, with the predicted wait for a place, if no further request of the owner is admitted."""
        waiting = self._open_requests.total() - slots
        share = (self._max_waiting + slots) // len({*self._open_requests, owner})
        if waiting >= self._max_waiting and self._open_requests[owner] >= share:
            raise Overloaded(waiting, min(max(free_place_seconds, 1.0), 60.0))

    @contextmanager
    def hold(self, owner: str) -> Iterator[None]:
        """Count a request of the owner as open inside the block."""
        self._open_requests[owner] += 1
        try:
            yield
        finally:
            self._open_requests[owner] -= 1
            if not self._open_requests[owner]:
                del self._open_requests[owner]
