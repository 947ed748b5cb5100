"""Entries of the disk cache by last use: an order that is kept, so that no write sorts or adds up all files."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TypeAlias

from kvcache.node import OffloadEntry

# Last use, descending start, and a unique number, before which no comparison ends at the entry.
_Key: TypeAlias = tuple[int, int, int, OffloadEntry]


class FileOrder:
    """Entries with a file, least recently used first; of entries used at the same time, the last of a path first.

    bytes  of all files
    """

    def __init__(self) -> None:
        self._keys: dict[OffloadEntry, _Key] = {}
        # Recently used entries are at its end, so that a use moves few of the others.
        self._sorted: list[_Key] = []
        self._numbers = itertools.count()
        self.bytes = 0

    def __contains__(self, entry: OffloadEntry) -> bool:
        """Whether the entry has been added."""
        return entry in self._keys

    def __iter__(self) -> Iterator[OffloadEntry]:
        """All entries; none may be added, removed or moved meanwhile."""
        return (entry for *_, entry in self._sorted)

    @property
    def oldest(self) -> OffloadEntry:
        """The least recently used entry; there must be one."""
        return self._sorted[0][-1]

    def add(self, entry: OffloadEntry) -> None:
        """Add an entry by its `last_used`."""
        self.bytes += entry.file_bytes
        self._insert(entry)

    def remove(self, entry: OffloadEntry) -> None:
        """Remove an entry that still has its size."""
        self.bytes -= entry.file_bytes
        self._delete(entry)

    def move(self, entry: OffloadEntry) -> None:
        """Follow a change of `last_used`."""
        self._delete(entry)
        self._insert(entry)

    def _insert(self, entry: OffloadEntry) -> None:
        key = self._keys[entry] = (entry.last_used, -entry.start, next(self._numbers), entry)
        insort(self._sorted, key)

    def _delete(self, entry: OffloadEntry) -> None:
        del self._sorted[bisect_left(self._sorted, self._keys.pop(entry))]
