"""The replicas behind `cellar route`: which are ready, how many requests each has, and the choice of one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from server.affinity.chooser import ReplicaChooser
from server.replicas.routing_header import decode_keys, requested_replica

# Between two looks at a replica, and the longest one.
POLL_SECONDS, POLL_TIMEOUT_SECONDS = 1.0, 5.0


class ReplicaPool:
    """Replicas by their names: "1", "2", ... in the order of their addresses. Belongs to one event loop."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = {str(number): url.rstrip("/") for number, url in enumerate(urls, 1)}
        self._chooser = ReplicaChooser(self.urls)
        self._running: Counter[str] = Counter()
        self._ready: set[str] = set()

    @property
    def ready(self) -> frozenset[str]:
        """Replicas that answered the last look at /ready with 200."""
        return frozenset(self._ready)

    def choose(self, session: str) -> str | None:
        """A ready replica for the routing keys in a header value, or the one that it names; None if there is none."""
        if (requested := requested_replica(session)) is not None:
            return requested if requested in self.urls else None
        keys = decode_keys(session)
        chosen = self._chooser.choose(keys, {name: float(self._running[name]) for name in self._ready})
        if not chosen:
            return None
        self._chooser.record(keys, chosen[0])
        return chosen[0]

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Inside the block, a replica has one request more."""
        self._running[name] += 1
        try:
            yield
        finally:
            self._running[name] -= 1

    def exclude(self, name: str) -> None:
        """A replica refused a connection, drains or has no engine: it gets no request until it is ready again."""
        self._ready.discard(name)

    async def poll(self, client: httpx.AsyncClient) -> None:
        """Look at all replicas once."""
        await asyncio.gather(*(self._look(client, name) for name in self.urls))

    async def keep_polling(self, client: httpx.AsyncClient) -> None:
        """Look at each replica every POLL_SECONDS, for ever."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.poll(client)

    async def _look(self, client: httpx.AsyncClient, name: str) -> None:
        try:
            answer = await client.get(f"{self.urls[name]}/ready", timeout=POLL_TIMEOUT_SECONDS)
            is_ready = answer.status_code == httpx.codes.OK
        except httpx.HTTPError:
            is_ready = False
        (self._ready.add if is_ready else self._ready.discard)(name)
