"""Worker threads of requests with images or sounds, which wait for one subprocess: threads for text stay free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio import CapacityLimiter

from engine.errors import Overloaded

# Fewer than the threads that requests of text share (40).
MAX_MEDIA_THREADS = 8
# Of a request for a thread.
_MAX_WAIT_SECONDS = 60.0
_RETRY_SECONDS = 5.0

Result = TypeVar("Result")


class MediaThreads:
    """Runs at most `count` functions at once; others wait in order of arrival, up to `max_wait_seconds`."""

    def __init__(self, count: int = MAX_MEDIA_THREADS, max_wait_seconds: float = _MAX_WAIT_SECONDS) -> None:
        self._limiter = CapacityLimiter(count)
        self._max_wait_seconds = max_wait_seconds

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of a function in a worker thread. Raises Overloaded if no thread becomes free in time."""
        borrower = object()
        try:
            with anyio.fail_after(self._max_wait_seconds):
                await self._limiter.acquire_on_behalf_of(borrower)
        except TimeoutError:
            raise Overloaded(self._limiter.statistics().tasks_waiting + 1, _RETRY_SECONDS) from None
        try:
            return await anyio.to_thread.run_sync(work)
        finally:
            self._limiter.release_on_behalf_of(borrower)


async def run_in_thread(threads: MediaThreads | None, work: Callable[[], Result]) -> Result:
    """The result of a function in a thread for images and sounds, or, without `threads`, in one for all requests."""
    return await (anyio.to_thread.run_sync(work) if threads is None else threads.run(work))
