"""What encoders computed: keys and values of cross attention, written once, found by the digest of what was encoded.

A store beside the slots and no component in them: an entry has no length, so appending, rewinding, copying and shifting
a slot leave it as it is. Whoever attends to an entry pins it; the others stay until their room is wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class EncoderEntry:
    """One encoded thing: by cross layer its keys [heads, length, key_width] and values [heads, length, value_width]."""

    digest: bytes
    layers: Mapping[int, tuple[Tensor, Tensor]]

    @property
    def bytes(self) -> int:
        """What the entry takes."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers.values())


class EncoderCache:
    """Entries of at most `budget_bytes` together. Belongs to the thread that owns the cache."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        # In the order of their last use.
        self._entries: dict[bytes, EncoderEntry] = {}
        self._pins: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Entries that are there, pinned or not."""
        return len(self._entries)

    @property
    def pinned_bytes(self) -> int:
        """What cannot be given up now."""
        return sum(self._entries[digest].bytes for digest in self._pins)

    def pin(self, digest: bytes) -> EncoderEntry | None:
        """The entry of a digest, which stays until it is unpinned as often as it was pinned; None: it is not there."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self._entries[digest] = entry
            self._pins[digest] += 1
        return entry

    def unpin(self, digest: bytes) -> None:
        """Take back one `pin` or `put`."""
        assert self._pins[digest] > 0, "an entry is unpinned more often than it was pinned"
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]

    def evict_for(self, size_bytes: int) -> int:
        """Give up unpinned entries, least recently used first, until so much fits; the bytes still lacking.

        Where something is lacking nothing was given up.
        """
        lacking = self.pinned_bytes + size_bytes - self.budget_bytes
        if lacking > 0:
            return lacking
        for digest in [digest for digest in self._entries if digest not in self._pins]:
            if self.used_bytes + size_bytes <= self.budget_bytes:
                break
            self.used_bytes -= self._entries.pop(digest).bytes
        return 0

    def put(self, entry: EncoderEntry) -> None:
        """Store an entry that is not there, pinned once; `evict_for` has made room for it."""
        assert entry.digest not in self._entries, "an entry is written once"
        self._entries[entry.digest] = entry
        self._pins[entry.digest] += 1
        self.used_bytes += entry.bytes
