"""The encoder cache: cross-attention keys and values, or rows of contents, by the digest of the encoder's input.

It is no component of the slots: an entry has no length, so append, rewind, copy and shift do not touch it. A sequence
pins the entry that it attends to; unpinned entries are evicted when their memory is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor


class CacheEntry(Protocol):
    """What an encoder returns for one input, by the digest of that input."""

    @property
    def digest(self) -> bytes:
        """The key."""

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""


Entry = TypeVar("Entry", bound=CacheEntry)


@dataclass(frozen=True, slots=True)
class EncoderEntry:
    """One encoder output: keys [heads, length, key_width] and values [heads, length, value_width] by layer."""

    digest: bytes
    layers: Mapping[int, tuple[Tensor, Tensor]]

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers.values())


class EncoderCache(Generic[Entry]):
    """Entries of at most `budget_bytes` in total. Owned by the thread that owns the cache."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        # Least recently used first.
        self._entries: dict[bytes, Entry] = {}
        self._pins: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Entries, pinned or not."""
        return len(self._entries)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned entries."""
        return sum(self._entries[digest].bytes for digest in self._pins)

    def pin(self, digest: bytes) -> Entry | None:
        """Pin and return the entry of a digest; None if there is none. Each pin needs one `unpin`."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self._entries[digest] = entry
            self._pins[digest] += 1
        return entry

    def unpin(self, digest: bytes) -> None:
        """Undo one `pin` or `put`."""
        assert self._pins[digest] > 0, "more unpins than pins"
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]

    def remove(self, digest: bytes) -> None:
        """Remove an entry that is not pinned."""
        if digest not in self._pins:
            self.used_bytes -= self._entries.pop(digest).bytes

    def evict_for(self, size_bytes: int) -> int:
        """Evict unpinned entries, least recently used first, until `size_bytes` fit; the missing bytes (0: they fit).

        If bytes are missing, no entry was evicted.
        """
        missing = self.pinned_bytes + size_bytes - self.budget_bytes
        if missing > 0:
            return missing
        for digest in [digest for digest in self._entries if digest not in self._pins]:
            if self.used_bytes + size_bytes <= self.budget_bytes:
                break
            self.used_bytes -= self._entries.pop(digest).bytes
        return 0

    def put(self, entry: Entry) -> None:
        """Add a new entry, pinned once, after `evict_for`."""
        assert entry.digest not in self._entries, "an entry is written once"
        self._entries[entry.digest] = entry
        self._pins[entry.digest] += 1
        self.used_bytes += entry.bytes
