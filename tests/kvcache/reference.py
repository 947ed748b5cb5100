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


class Store:
    """The content of the layers of one attention range, in `cells` cells."""

    def __init__(self, reach: AttentionRange, slots: int, cells: int) -> None:
        self.reach, self.cells = reach, cells
        self.slots: list[Entries] = [[] for _ in range(slots)]
        self.tree: dict[Path, Entry | None] = {}

    @property
    def free(self) -> int:
        """Cells without a reference."""
        return self.cells - len({entry.atom for entry in self.owned()})

    @property
    def idle(self) -> int:
        """Cells of the tree alone."""
        return self.cells - self.free - len({entry.atom for slot in self.slots for entry in slot if entry})

    def owned(self) -> list[Entry]:
        """Every reference of slots and tree."""
        held = [entry for slot in self.slots for entry in slot] + list(self.tree.values())
        return [entry for entry in held if entry]

    def shared(self, entries: Iterable[Entry]) -> list[bool]:
        """Whether each entry has more than one reference."""
        owners = Counter(entry.atom for entry in self.owned())
        return [owners[entry.atom] > 1 for entry in entries]

    def goes_on(self, entries: Sequence[Entry | None], length: int) -> bool:
        """Whether a token at `length` attends to no hole."""
        return None not in entries[oldest(self.reach, length) : length]

    def faded(self, slot: int, start: int) -> Entries:
        """The slot's entries with holes where tokens from `start` on do not attend."""
        unseen = oldest(self.reach, start)
        return [None] * unseen + self.slots[slot][unseen:]

    def load_shortfall(self, spans: Mapping[int, int]) -> int:
        """By how much a number of rows for each of some slots does not fit once they released what they do not see."""
        after = self.without_unseen(spans)
        return max(sum(spans.values()) - after.free, 0)

    def without_unseen(self, slots: Iterable[int]) -> Store:
        """The store after some slots have released the cells out of reach."""
        after = Store(self.reach, 0, self.cells)
        after.tree, after.slots = self.tree, list(self.slots)
        for slot in slots:
            after.slots[slot] = self.faded(slot, len(self.slots[slot]))
        return after

    def moved(self, slot: int, keep: int, drop: int) -> Entries | None:
        """The slot's entries after a shift; None if its new end would attend to a hole."""
        entries = self.faded(slot, len(self.slots[slot]))
        moved = entries[:keep] + entries[keep + drop :]
        return moved if self.goes_on(moved, len(moved)) else None


class Ledger:
    """The expected content of every slot."""

    def __init__(self, slots: int, capacity: int, pools: Mapping[AttentionRange, int], *, shiftable: bool) -> None:
        self.capacity, self.shiftable = capacity, shiftable
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        self.stores = {reach: Store(reach, slots, cells) for reach, cells in pools.items()}
        self._time = 0

    def fresh(self, count: int, start: int = 0, variant: int = 0) -> list[Entry]:
        """New tokens for the positions from `start` on, in storage of their own.

        There is one text for each variant, so that slots often compute equal tokens.
        """
        times = range(self._time, self._time + count)
        self._time += count
        tokens = [(start + at) * 7 % 5 + 5 * variant for at in range(count)]
        return [Entry(token, serial=time, atom=time) for token, time in zip(tokens, times, strict=True)]

    def load_shortfall(self, spans: Mapping[int, int]) -> int:
        """Rows of the spans that do not fit, in the store that has the fewest cells for them."""
        return max(store.load_shortfall(spans) for store in self.stores.values())

    def append(self, slot: int, entries: Sequence[Entry]) -> None:
        """Add kept tokens; cells out of their reach are released, even if there are no tokens."""
        self.texts[slot] += [entry.token for entry in entries]
        for store in self.stores.values():
            store.slots[slot] = store.faded(slot, len(store.slots[slot])) + list(entries)

    def release_out_of_reach(self) -> None:
        """Every slot releases what it does not see from its end."""
        for slot in range(len(self.texts)):
            self.append(slot, [])

    def standing(self, slot: int, length: int) -> int:
        """The largest length, at most the one asked for, at which the slot can resume."""
        lengths = range(min(length, len(self.texts[slot])), -1, -1)
        stores = self.stores.values()
        return next(at for at in lengths if all(store.goes_on(store.slots[slot], at) for store in stores))

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Share the source's first tokens with the target."""
        standing = self.standing(source, length)
        self.texts[target] = self.texts[source][:standing]
        for store in self.stores.values():
            store.slots[target] = store.slots[source][:standing]
        return standing

    def rewind(self, slot: int, length: int) -> int:
        """Drop the tokens behind `length`."""
        return self.copy_prefix(slot, slot, length)

    def shift_invariant(self, slot: int, keep: int, drop: int) -> bool:
        """Whether a shift moves what follows, rather than leave it to be computed."""
        return self.shiftable and all(store.moved(slot, keep, drop) is not None for store in self.stores.values())

    def shift_lacks(self, slot: int, keep: int, drop: int) -> bool:
        """Whether the private copies of a shift do not fit."""
        for store in self.stores.values():
            after = store.without_unseen([slot])
            dropped = [entry for entry in after.slots[slot][keep : keep + drop] if entry]
            moved = [entry for entry in after.slots[slot][keep + drop :] if entry]
            if after.shared(moved).count(True) > after.free + after.shared(dropped).count(False):
                return True
        return False

    def shift(self, slot: int, keep: int, drop: int) -> int:
        """Drop [keep, keep + drop); later tokens move, out of shared storage."""
        if not self.shift_invariant(slot, keep, drop):
            return self.rewind(slot, keep)
        copies = [entry.atom for entry in self.fresh(len(self.texts[slot]))]
        del self.texts[slot][keep : keep + drop]
        for store in self.stores.values():
            moved = store.moved(slot, keep, drop)
            assert moved is not None
            store.slots[slot] = store.faded(slot, len(store.slots[slot]))
            owners = Counter(entry.atom for entry in store.owned())
            store.slots[slot] = [
                replace(entry, atom=atom) if at >= keep and entry and owners[entry.atom] > 1 else entry
                for at, (entry, atom) in enumerate(zip(moved, copies, strict=False))
            ]
        return len(self.texts[slot])

    def recall(self, slot: int, tokens: Sequence[int]) -> int:
        """Extend a slot by the tree's tokens, as far as every store can resume."""
        longest = {reach: self._extended(store, slot, tokens) for reach, store in self.stores.items()}
        lengths = range(min(len(entries) for entries in longest.values()), len(self.texts[slot]), -1)
        stores = self.stores.items()
        fits = (at for at in lengths if all(store.goes_on(longest[reach], at) for reach, store in stores))
        length = next(fits, len(self.texts[slot]))
        self.texts[slot] = list(tokens[:length])
        for reach, store in stores:
            store.slots[slot] = longest[reach][:length]
        return length

    def _extended(self, store: Store, slot: int, tokens: Sequence[int]) -> Entries:
        entries = list(store.slots[slot])
        while len(entries) < len(tokens) and (path := tuple(tokens[: len(entries) + 1])) in store.tree:
            entries.append(store.tree[path])
        return entries
