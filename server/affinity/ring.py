"""Consistent hashing: a ring of replicas on which few keys move when replicas come and go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from hashlib import blake2b

# Points of each replica on the ring: their shares of the keys have a standard deviation of 1 / 8.
POINTS = 64


class HashRing:
    """Replicas on a ring of 64-bit positions, POINTS each."""

    def __init__(self, replicas: Collection[str] = ()) -> None:
        self._replicas: frozenset[str] = frozenset()
        self._positions: list[int] = []
        self._owners: list[str] = []
        self.replace(replicas)

    @property
    def replicas(self) -> frozenset[str]:
        """The replicas on the ring."""
        return self._replicas

    def replace(self, replicas: Collection[str]) -> None:
        """Change the replicas; O(n), and only keys of added and removed ones move."""
        present = frozenset(replicas)
        points = [point for point in zip(self._positions, self._owners, strict=True) if point[1] in present]
        points += [point for replica in present - self._replicas for point in points_of(replica)]
        points.sort()
        self._positions = [position for position, _ in points]
        self._owners = [owner for _, owner in points]
        self._replicas = present

    def walk(self, key: str) -> Iterator[str]:
        """The replicas in the order of their distance from a key, each once; O(log n) for the first."""
        start = bisect_right(self._positions, position(key))
        owners: set[str] = set()
        for index in range(start, start + len(self._owners)):
            owner = self._owners[index % len(self._owners)]
            if owner not in owners:
                owners.add(owner)
                yield owner


def points_of(replica: str) -> list[tuple[int, str]]:
    """The positions of a replica on the ring, each with its name."""
    return [(position(f"{replica}\0{number}"), replica) for number in range(POINTS)]


def position(key: str) -> int:
    """The position of a key: 64 bits of its hash."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
