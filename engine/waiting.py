"""How many requests are open at once: those that have a slot, and those that wait for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import Overloaded


class QueueLimit:
    """Counts open requests by owner. Belongs to the event loop's thread.

    most  requests that may wait, of all owners together. An owner that has less than an even share of all places is let
          in all the same, so that no owner can fill the room for the others.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._open_requests: Counter[str] = Counter()
        self._mean_seconds = 1.0

    def check(self, owner: str, slots: int) -> None:
        """Raise Overloaded, with the estimated wait, where no further request of the owner is taken."""
        waiting = self._open_requests.total() - slots
        share = (self._max_waiting + slots) // len({*self._open_requests, owner})
        if waiting >= self._max_waiting and self._open_requests[owner] >= share:
            raise Overloaded(waiting, min(max(self._mean_seconds * (waiting + 1) / slots, 1.0), 60.0))

    def record_duration(self, seconds: float) -> None:
        """A request took so long, from its admission to its end."""
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    @contextmanager
    def hold(self, owner: str) -> Iterator[None]:
        """A request of the owner is open for as long as the block lasts."""
        self._open_requests[owner] += 1
        try:
            yield
        finally:
            self._open_requests[owner] -= 1
            if not self._open_requests[owner]:
                del self._open_requests[owner]
