"""The reference of the cache: plain lists and dictionaries with tokens and sharing, without cells.

Each attention range has a store of its own. A dictionary stands for the prefix tree: for all tokens up to a
position, the entry of that position. None is a hole: an entry released because no later token attends to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvcache.spec import AttentionRange


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of a slot; its position is its index in the list.

    serial  when the token was written; kept by copies
    atom    identity of the storage: two entries share a cell exactly if their atoms are equal
    """

    token: int
    serial: int
    atom: int


Path: TypeAlias = tuple[int, ...]
Entries: TypeAlias = list[Entry | None]


def oldest(reach: AttentionRange, position: int) -> int:
    """The first position that a query attends to, by trying all."""
    if reach.kind == "full":
        return 0
    if reach.kind == "window":
        return min(at for at in range(position + 1) if position - at < reach.size)
    return min(at for at in range(position + 1) if at // reach.size == position // reach.size)


class ReferenceStore:
    """The content of the layers of one attention range, in `cells` cells."""

    def __init__(self, reach: AttentionRange, slots: int, cells: int) -> None:
        self.reach, self.cells = reach, cells
        self.slots: list[Entries] = [[] for _ in range(slots)]
        self.tree: dict[Path, Entry | None] = {}

    @property
    def free(self) -> int:
        """Cells without a reference."""
        return self.cells - len({entry.atom for entry in self.entries()})

    @property
    def evictable(self) -> int:
        """Cells of the tree alone."""
        return self.cells - self.free - len({entry.atom for slot in self.slots for entry in slot if entry})

    def entries(self) -> list[Entry]:
        """Every reference of slots and tree."""
        held = [entry for slot in self.slots for entry in slot] + list(self.tree.values())
        return [entry for entry in held if entry]

    def shared(self, entries: Iterable[Entry]) -> list[bool]:
        """Whether each entry has more than one reference."""
        owners = Counter(entry.atom for entry in self.entries())
        return [owners[entry.atom] > 1 for entry in entries]

    def can_resume(self, entries: Sequence[Entry | None], length: int) -> bool:
        """Whether a token at `length` attends to no hole."""
        return None not in entries[oldest(self.reach, length) : length]

    def with_holes(self, slot: int, start: int) -> Entries:
        """The slot's entries with holes where tokens from `start` on do not attend."""
        unseen = oldest(self.reach, start)
        return [None] * unseen + self.slots[slot][unseen:]

    def missing_cells(self, spans: Mapping[int, int]) -> int:
        """Missing cells for new tokens of some slots, after each has released the cells out of reach."""
        after = self.without_unseen(spans)
        return max(sum(spans.values()) - after.free, 0)

    def without_unseen(self, slots: Iterable[int]) -> ReferenceStore:
        """The store after some slots have released the cells out of reach."""
        after = ReferenceStore(self.reach, 0, self.cells)
        after.tree, after.slots = self.tree, list(self.slots)
        for slot in slots:
            after.slots[slot] = self.with_holes(slot, len(self.slots[slot]))
        return after

    def shifted_entries(self, slot: int, keep: int, drop: int) -> Entries | None:
        """The slot's entries after a shift; None if its new end would attend to a hole."""
        entries = self.with_holes(slot, len(self.slots[slot]))
        shifted_entries = entries[:keep] + entries[keep + drop :]
        return shifted_entries if self.can_resume(shifted_entries, len(shifted_entries)) else None


class ReferenceCache:
    """The expected content of every slot."""

    def __init__(self, slots: int, capacity: int, pools: Mapping[AttentionRange, int], *, shiftable: bool) -> None:
        self.capacity, self.shiftable = capacity, shiftable
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        self.stores = {reach: ReferenceStore(reach, slots, cells) for reach, cells in pools.items()}
        self._time = 0

    def new_entries(self, count: int, start: int = 0, variant: int = 0) -> list[Entry]:
        """New tokens for the positions from `start` on, in storage of their own.

        There is one text for each variant, so that slots often compute equal tokens.
        """
        times = range(self._time, self._time + count)
        self._time += count
        tokens = [(start + at) * 7 % 5 + 5 * variant for at in range(count)]
        return [Entry(token, serial=time, atom=time) for token, time in zip(tokens, times, strict=True)]

    def missing_cells(self, spans: Mapping[int, int]) -> int:
        """Missing cells of the spans, in the store with the fewest."""
        return max(store.missing_cells(spans) for store in self.stores.values())

    def append(self, slot: int, entries: Sequence[Entry]) -> None:
        """Add kept tokens; cells out of their reach are released, even if there are no tokens."""
        self.texts[slot] += [entry.token for entry in entries]
        for store in self.stores.values():
            store.slots[slot] = store.with_holes(slot, len(store.slots[slot])) + list(entries)

    def release_out_of_reach(self) -> None:
        """Release the cells out of reach of every slot."""
        for slot in range(len(self.texts)):
            self.append(slot, [])

    def resume_length(self, slot: int, length: int) -> int:
        """The largest length, at most the one asked for, at which the slot can resume."""
        lengths = range(min(length, len(self.texts[slot])), -1, -1)
        stores = self.stores.values()
        return next(at for at in lengths if all(store.can_resume(store.slots[slot], at) for store in stores))

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Share the source's first tokens with the target."""
        cached_length = self.resume_length(source, length)
        self.texts[target] = self.texts[source][:cached_length]
        for store in self.stores.values():
            store.slots[target] = store.slots[source][:cached_length]
        return cached_length

    def rewind(self, slot: int, length: int) -> int:
        """Drop the tokens behind `length`."""
        return self.copy_prefix(slot, slot, length)

    def can_shift(self, slot: int, keep: int, drop: int) -> bool:
        """Whether a shift moves tokens instead of leaving them to be recomputed."""
        return self.shiftable and all(
            store.shifted_entries(slot, keep, drop) is not None for store in self.stores.values()
        )

    def shift_runs_out(self, slot: int, keep: int, drop: int) -> bool:
        """Whether the private copies of a shift do not fit."""
        for store in self.stores.values():
            after = store.without_unseen([slot])
            dropped = [entry for entry in after.slots[slot][keep : keep + drop] if entry]
            shifted_entries = [entry for entry in after.slots[slot][keep + drop :] if entry]
            if after.shared(shifted_entries).count(True) > after.free + after.shared(dropped).count(False):
                return True
        return False

    def shift(self, slot: int, keep: int, drop: int) -> int:
        """Drop [keep, keep + drop); later tokens move, out of shared storage."""
        if not self.can_shift(slot, keep, drop):
            return self.rewind(slot, keep)
        copies = [entry.atom for entry in self.new_entries(len(self.texts[slot]))]
        del self.texts[slot][keep : keep + drop]
        for store in self.stores.values():
            shifted_entries = store.shifted_entries(slot, keep, drop)
            assert shifted_entries is not None
            store.slots[slot] = store.with_holes(slot, len(store.slots[slot]))
            owners = Counter(entry.atom for entry in store.entries())
            store.slots[slot] = [
                replace(entry, atom=atom) if at >= keep and entry and owners[entry.atom] > 1 else entry
                for at, (entry, atom) in enumerate(zip(shifted_entries, copies, strict=False))
            ]
        return len(self.texts[slot])

    def reuse(self, slot: int, tokens: Sequence[int]) -> int:
        """Extend a slot by the tree's tokens, as far as every store can resume."""
        longest = {reach: self._extended(store, slot, tokens) for reach, store in self.stores.items()}
        lengths = range(min(len(entries) for entries in longest.values()), len(self.texts[slot]), -1)
        stores = self.stores.items()
        fits = (at for at in lengths if all(store.can_resume(longest[reach], at) for reach, store in stores))
        length = next(fits, len(self.texts[slot]))
        self.texts[slot] = list(tokens[:length])
        for reach, store in stores:
            store.slots[slot] = longest[reach][:length]
        return length

    def _extended(self, store: ReferenceStore, slot: int, tokens: Sequence[int]) -> Entries:
        entries = list(store.slots[slot])
        while len(entries) < len(tokens) and (path := tuple(tokens[: len(entries) + 1])) in store.tree:
            entries.append(store.tree[path])
        return entries
