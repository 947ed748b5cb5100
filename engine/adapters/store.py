"""The loaded adapters of a model: slots by name, and how many running sequences use each slot."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from engine.adapters.adapter import Adapter, LowRank
from engine.types.request import Request
from engine.types.status import AdapterInfo

# The slot of sequences without an adapter; those of adapters count from 1.
NO_ADAPTER = 0


class AdaptedLayers(Protocol):
    """Layers that compute the products of adapters."""

    def set(self, slot: int, factors: Mapping[str, LowRank]) -> None:
        """Set the factors of a slot, by the names of layers."""
        ...

    def clear(self, slot: int) -> None:
        """Remove the factors of a slot."""
        ...


class AdapterStore:
    """Adapters by the name of requests. Belongs to the engine thread.

    A slot is free again when its name is unloaded and no running sequence uses it.
    """

    def __init__(self, *layers: AdaptedLayers) -> None:
        """`layers` of each runner of the model; without any it has no adapters."""
        self._layers = layers
        self._adapters: dict[int, Adapter] = {}
        self._slots: dict[str, int] = {}
        self._users: Counter[int] = Counter()

    @property
    def count(self) -> int:
        """The number of adapters that requests can name."""
        return len(self._slots)

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests can name, in the order of their loads."""
        return tuple(self._adapters[slot].info for slot in self._slots.values())

    @property
    def bytes(self) -> int:
        """Memory of all adapters, also of unloaded ones that running sequences use."""
        return sum(adapter.bytes for adapter in self._adapters.values())

    def load(self, adapter: Adapter) -> int:
        """The slot of a new adapter under its name, from now on."""
        assert self._layers, "a model without adaptable layers loads no adapter"
        slot = next(slot for slot in range(1, len(self._adapters) + 2) if slot not in self._adapters)
        for layers in self._layers:
            layers.set(slot, adapter.layers)
        self._adapters[slot] = adapter
        before = self._slots.pop(adapter.name, None)
        self._slots[adapter.name] = slot
        if before is not None:
            self._free(before)
        return slot

    def unload(self, name: str) -> None:
        """Forget a name; running sequences keep its adapter. KeyError for an unknown name."""
        self._free(self._slots.pop(name))

    def with_salt(self, request: Request) -> Request:
        """The request with a salt of its adapter's own: cached prefixes and outputs are of one version of it."""
        if not request.adapter:
            return request
        digest = self._adapters[self._slots[request.adapter]].digest
        return replace(request, salt=hashlib.sha256(f"adapter {digest} ".encode() + request.salt).digest())

    def acquire(self, name: str) -> int:
        """The slot of an adapter, used by one more sequence; of "" NO_ADAPTER."""
        if not name:
            return NO_ADAPTER
        slot = self._slots[name]
        self._users[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """A sequence of `acquire` has ended."""
        if slot == NO_ADAPTER:
            return
        self._users[slot] -= 1
        if slot not in self._slots.values():
            self._free(slot)

    def _free(self, slot: int) -> None:
        """Free a slot without a name, unless it is in use."""
        if self._users[slot] == 0 and slot in self._adapters:
            for layers in self._layers:
                layers.clear(slot)
            del self._adapters[slot], self._users[slot]
