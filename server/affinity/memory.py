"""Estimates which replica has which prefix in its cache, from the routed requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

# Keys of one replica: a conversation has up to ten.
KEYS_PER_REPLICA = 1024


class PrefixMemory:
    """The replicas that were sent a key, the most recent last; the least recent keys of a replica are dropped."""

    def __init__(self, keys_per_replica: int = KEYS_PER_REPLICA) -> None:
        self._limit = keys_per_replica
        self._keys: dict[str, OrderedDict[str, None]] = {}
        self._holders: dict[str, list[str]] = {}

    def holders(self, key: str) -> Sequence[str]:
        """The replicas with a key, in the order in which they got it first."""
        return self._holders.get(key, ())

    def add(self, replica: str, keys: Iterable[str]) -> None:
        """Record that a replica has keys."""
        replica_keys = self._keys.setdefault(replica, OrderedDict())
        for key in keys:
            if key in replica_keys:
                replica_keys.move_to_end(key)
            else:
                replica_keys[key] = None
                self._holders.setdefault(key, []).append(replica)
        while len(replica_keys) > self._limit:
            self._drop(replica, replica_keys.popitem(last=False)[0])

    def move(self, replica: str, key: str) -> None:
        """Record that a replica has a key, and that no other one has it."""
        for other in [holder for holder in self.holders(key) if holder != replica]:
            del self._keys[other][key]
            self._drop(other, key)
        self.add(replica, (key,))

    def remove(self, replica: str) -> None:
        """Drop the keys of a replica."""
        for key in self._keys.pop(replica, ()):
            self._drop(replica, key)

    def __len__(self) -> int:
        return sum(len(replica_keys) for replica_keys in self._keys.values())

    def _drop(self, replica: str, key: str) -> None:
        holders = self._holders[key]
        holders.remove(replica)
        if not holders:
            del self._holders[key]
