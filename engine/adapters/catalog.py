"""The adapters that requests can name: loaded ones, and those of a folder, which are loaded at their first request.

Names, limits and users are decided on the event loop; the engine thread gets commands in the order of the decisions, so
a request never arrives there before its adapter, or after it was unloaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.adapters.adapter import Adapter
from engine.adapters.checkpoint import least_bytes
from engine.adapters.folder import AdapterFolder
from engine.errors import AdapterLoaded, AdapterPathRefused, AdaptersFull, AdapterUnknown, Draining, InvalidRequest
from engine.types.status import AdapterInfo


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Most adapters that are loaded at run time, and their memory."""

    count: int
    bytes: int


@dataclass(slots=True, eq=False)
class _Resident:
    """A loaded adapter.

    origin  start: of the settings, outside of the limits; call: until it is unloaded by a call; request: until its
            memory is needed for another one
    users   open requests
    last_use  counts uses of all adapters
    """

    info: AdapterInfo
    origin: Literal["start", "call", "request"]
    users: int = 0
    last_use: int = 0

    def is_idle(self, *, evictable_name: str = "") -> bool:
        """Whether another adapter may take its memory: one with the name `evictable_name` too, whatever its origin."""
        return self.users == 0 and (self.origin == "request" or self.info.name == evictable_name)


class AdapterCatalog:
    """Loaded adapters by name. Belongs to the thread of the event loop.

    read          an adapter of a folder; blocks, for worker threads; raises AdapterUnsupported
    load, unload  send commands to the engine thread
    """

    def __init__(
        self,
        infos: Sequence[AdapterInfo],
        limits: AdapterLimits,
        folder: AdapterFolder | None,
        *,
        read: Callable[[str, Path], Adapter],
        load: Callable[[Adapter], None],
        unload: Callable[[str], None],
    ) -> None:
        self.infos = tuple(infos)
        self._limits, self._folder = limits, folder
        self._read, self._load, self._unload = read, load, unload
        self._residents = {info.name: _Resident(info, "start") for info in infos}
        # Without a name, until their last request ends.
        self._leaving: set[_Resident] = set()
        self._reading, self._waiting = asyncio.Lock(), asyncio.Lock()
        self._changed = asyncio.Event()
        self._retiring: str | None = None
        self._closed, self._uses = False, 0

    @property
    def bytes(self) -> int:
        """Memory of the adapters that were loaded at run time."""
        return sum(resident.info.bytes for resident in self._counted())

    def has(self, name: str) -> bool:
        """Whether requests can name an adapter."""
        return name in self._residents or self._find(name) is not None

    def check(self, name: str) -> None:
        """Raise InvalidRequest unless requests can name the adapter; "" is none."""
        if name and not self.has(name):
            raise InvalidRequest("model", f"there is no adapter {name[:128]!r}")

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter below the folder; `in_place`: in place of an adapter with that name, which running requests
        keep. Raises AdapterLoaded, AdapterPathRefused, AdapterUnsupported, AdaptersFull.
        """
        if self._folder is None:
            raise AdapterPathRefused
        folder = self._folder.resolve(path)
        self._check_new(name, in_place=in_place)
        adapter = await self._read_in_thread(name, folder)
        self._check_new(name, in_place=in_place)
        kept = [other for other in self._counted() if not other.is_idle(evictable_name=name)]
        self._require_fit(adapter.bytes, kept)
        self._evict_idle(adapter.bytes, replaced=name)
        self._put(adapter, "call")

    def unload(self, name: str) -> None:
        """Forget an adapter at once; running requests keep it. Raises AdapterUnknown."""
        if name not in self._residents:
            raise AdapterUnknown(name)
        self._remove(name)
        self._unload(name)

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Inside the block the adapter is in use; one of the folder is loaded first, and the block waits for memory.

        Raises InvalidRequest, AdapterUnsupported, AdaptersFull; Draining while it waits.
        """
        if not name:
            yield
            return
        resident = self._residents.get(name)
        if resident is None or name == self._retiring:
            resident = await self._load_for_request(name)
        self._uses += 1
        resident.users, resident.last_use = resident.users + 1, self._uses
        try:
            yield
        finally:
            resident.users -= 1
            if resident.users == 0:
                self._leaving.discard(resident)
                self._changed.set()

    def close(self) -> None:
        """End the waits of `hold` with Draining."""
        self._closed = True
        self._changed.set()

    async def _load_for_request(self, name: str) -> _Resident:
        # Requests that wait for memory do so in the order of their arrival.
        async with self._waiting:
            if name not in self._residents:
                path = self._find(name)
                if path is None:
                    raise InvalidRequest("model", f"there is no adapter {name[:128]!r}")
                adapter = await self._read_in_thread(name, path)
                await self._make_room(adapter.bytes)
                # A call may have loaded it meanwhile.
                if name not in self._residents:
                    self._put(adapter, "request")
            return self._residents[name]

    async def _make_room(self, size: int) -> None:
        """Wait until `size` bytes fit. Meanwhile requests to the least recently used adapter are queued after this
        one, so that its memory becomes free.
        """
        try:
            while True:
                self._require_fit(size, [other for other in self._residents.values() if other.origin == "call"])
                self._evict_idle(size)
                if self._fits(size, self._counted()):
                    return
                self._retiring = next((other.info.name for other in self._evictable()), None)
                self._changed.clear()
                await self._changed.wait()
                if self._closed:
                    raise Draining
        finally:
            self._retiring = None

    async def _read_in_thread(self, name: str, path: Path) -> Adapter:
        # A file that can never fit is not read into memory.
        self._require_fit(await asyncio.to_thread(least_bytes, path), ())
        async with self._reading:
            return await asyncio.to_thread(self._read, name, path)

    def _find(self, name: str) -> Path | None:
        return None if self._folder is None else self._folder.find(name)

    def _check_new(self, name: str, *, in_place: bool) -> None:
        if name in self._residents and not in_place:
            raise AdapterLoaded(name)

    def _counted(self) -> list[_Resident]:
        """The adapters that the limits apply to."""
        return [other for other in (*self._residents.values(), *self._leaving) if other.origin != "start"]

    def _fits(self, size: int, others: Iterable[_Resident]) -> bool:
        sizes = [other.info.bytes for other in others]
        return len(sizes) < self._limits.count and sum(sizes) + size <= self._limits.bytes

    def _require_fit(self, size: int, kept: Sequence[_Resident]) -> None:
        """Raise AdaptersFull unless `size` bytes fit beside the adapters that stay."""
        if not self._fits(size, kept):
            used = sum(other.info.bytes for other in kept)
            raise AdaptersFull(size, used, self._limits.bytes, len(kept), self._limits.count)

    def _evictable(self) -> list[_Resident]:
        """The adapters that requests loaded, the least recently used first."""
        evictable = (other for other in self._residents.values() if other.origin == "request")
        return sorted(evictable, key=lambda other: other.last_use)

    def _evict_idle(self, size: int, replaced: str = "") -> None:
        """Unload idle adapters until `size` bytes fit, with those of an idle adapter `replaced`."""
        for other in self._evictable():
            staying = [kept for kept in self._counted() if kept.users or kept.info.name != replaced]
            if other.users == 0 and other.info.name != replaced and not self._fits(size, staying):
                self.unload(other.info.name)

    def _put(self, adapter: Adapter, origin: Literal["call", "request"]) -> None:
        if adapter.name in self._residents:
            self._remove(adapter.name)
        self._uses += 1
        self._residents[adapter.name] = _Resident(adapter.info, origin, last_use=self._uses)
        self.infos = tuple(resident.info for resident in self._residents.values())
        self._load(adapter)

    def _remove(self, name: str) -> None:
        resident = self._residents.pop(name)
        if resident.users:
            self._leaving.add(resident)
        self.infos = tuple(other.info for other in self._residents.values())
        self._changed.set()
