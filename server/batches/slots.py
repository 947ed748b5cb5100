"""The share of the slots that batches may use."""

from __future__ import annotations

import asyncio


class SlotShare:
    """Slots for the requests of all batches, granted in order of arrival: so concurrent batches take turns."""

    def __init__(self, slots: int) -> None:
        self._slots, self._free, self._queue = slots, asyncio.Semaphore(slots), asyncio.Lock()

    async def acquire(self, count: int) -> int:
        """Wait for `count` slots, or for all if there are fewer; returns their number."""
        count, held = min(count, self._slots), 0
        async with self._queue:
            try:
                while held < count:
                    await self._free.acquire()
                    held += 1
            except asyncio.CancelledError:
                self.release(held)
                raise
        return held

    def release(self, count: int) -> None:
        """Return slots."""
        for _ in range(count):
            self._free.release()
