"""Worker threads of requests with images or sounds, which wait for one subprocess: threads for text stay free."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from engine.errors import Overloaded
from server.http.auth import caller

# Fewer than the threads that requests of text share (40).
MAX_MEDIA_THREADS = 8
# Of one owner: two keep the subprocess busy, and the contents of other owners wait for two before them.
MAX_OWNER_THREADS = 2
# Of a request for a thread.
_MAX_WAIT_SECONDS = 60.0
_RETRY_SECONDS = 5.0

Result = TypeVar("Result")


class MediaThreads:
    """Runs at most `count` functions at once, `owner_count` of them for one owner. For one event loop.

    Others wait up to `max_wait_seconds`: owners take turns, and the requests of an owner keep their order.
    """

    def __init__(
        self,
        count: int = MAX_MEDIA_THREADS,
        max_wait_seconds: float = _MAX_WAIT_SECONDS,
        owner_count: int = MAX_OWNER_THREADS,
    ) -> None:
        self._free, self._owner_count, self._max_wait_seconds = count, owner_count, max_wait_seconds
        self._running: Counter[str] = Counter()
        # Requests without a thread by owner, in the order of the owners' turns.
        self._waiting: OrderedDict[str, deque[anyio.Event]] = OrderedDict()

    @property
    def running(self) -> int:
        """Functions with a thread."""
        return self._running.total()

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of a function in a worker thread. Raises Overloaded if no thread becomes free in time."""
        owner = caller().owner
        await self._acquire(owner)
        try:
            return await anyio.to_thread.run_sync(work)
        finally:
            self._release(owner)

    async def _acquire(self, owner: str) -> None:
        admitted = anyio.Event()
        self._waiting.setdefault(owner, deque()).append(admitted)
        self._admit()
        is_complete = False
        try:
            with anyio.fail_after(self._max_wait_seconds):
                await admitted.wait()
            is_complete = True
        except TimeoutError:
            raise Overloaded(sum(map(len, self._waiting.values())), _RETRY_SECONDS) from None
        finally:
            # A wait may be cancelled after its thread was given.
            if not is_complete:
                self._withdraw(owner, admitted)

    def _withdraw(self, owner: str, admitted: anyio.Event) -> None:
        if admitted.is_set():
            self._release(owner)
        else:
            self._remove(owner, admitted)

    def _release(self, owner: str) -> None:
        self._free += 1
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._admit()

    def _admit(self) -> None:
        """Give free threads to the owners with the fewest, of equal ones to the first."""
        while self._free:
            owners = [owner for owner in self._waiting if self._running[owner] < self._owner_count]
            if not owners:
                return
            owner = min(owners, key=lambda owner: self._running[owner])
            self._free -= 1
            self._running[owner] += 1
            admitted = self._waiting[owner][0]
            self._waiting.move_to_end(owner)
            self._remove(owner, admitted)
            admitted.set()

    def _remove(self, owner: str, admitted: anyio.Event) -> None:
        self._waiting[owner].remove(admitted)
        if not self._waiting[owner]:
            del self._waiting[owner]


async def run_in_thread(threads: MediaThreads | None, work: Callable[[], Result]) -> Result:
    """The result of a function in a thread for images and sounds, or, without `threads`, in one for all requests."""
    return await (anyio.to_thread.run_sync(work) if threads is None else threads.run(work))
