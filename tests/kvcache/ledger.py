"""The reference of the cache: plain lists and a dictionary. It knows tokens and who shares what, and nothing of cells.

The dictionary stands for the prefix tree: under all tokens up to a position, the entry of that position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of a slot. Its position is its place in the list.

    serial  when the token was written; a copy keeps it
    atom    the storage: two entries are one cell exactly if their atoms are equal
    """

    token: int
    serial: int
    atom: int


class Ledger:
    """What every slot must hold."""

    def __init__(self, slots: int, capacity: int, cells: int, *, shiftable: bool) -> None:
        self.capacity, self.cells, self.shiftable = capacity, cells, shiftable
        self.slots: list[list[Entry]] = [[] for _ in range(slots)]
        self.tree: dict[tuple[int, ...], Entry] = {}
        self._time = 0

    def fresh(self, count: int, start: int = 0, variant: int = 0) -> list[Entry]:
        """New tokens for the positions from `start` on, each in storage of its own.

        Of each variant there is one text, so that slots often compute the same tokens, at other times.
        """
        times = range(self._time, self._time + count)
        self._time += count
        tokens = [(start + at) * 7 % 5 + 5 * variant for at in range(count)]
        return [Entry(token, serial=time, atom=time) for token, time in zip(tokens, times, strict=True)]

    @property
    def free(self) -> int:
        """Cells that nobody needs."""
        return self.cells - len({entry.atom for entry in self.owned()})

    @property
    def idle(self) -> int:
        """Cells that only the tree needs."""
        return self.cells - self.free - len({entry.atom for slot in self.slots for entry in slot})

    def owned(self) -> list[Entry]:
        """Every reference, by slots and by the tree."""
        return [entry for slot in self.slots for entry in slot] + list(self.tree.values())

    def tokens(self, slot: int) -> list[int]:
        """What a slot holds."""
        return [entry.token for entry in self.slots[slot]]

    def shared(self, entries: Sequence[Entry]) -> list[bool]:
        """Which entries have more than one owner."""
        owners = Counter(entry.atom for entry in self.owned())
        return [owners[entry.atom] > 1 for entry in entries]

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Let the target hold the source's first tokens, in the same storage."""
        self.slots[target] = self.slots[source][:length]
        return len(self.slots[target])

    def rewind(self, slot: int, length: int) -> int:
        """Drop what lies behind `length`."""
        del self.slots[slot][length:]
        return len(self.slots[slot])

    def can_shift(self, slot: int, keep: int, drop: int) -> bool:
        """Whether the private copies that a shift needs fit."""
        entries = self.slots[slot]
        freed = self.shared(entries[keep : keep + drop]).count(False)
        return self.shared(entries[keep + drop :]).count(True) <= self.free + freed

    def shift(self, slot: int, keep: int, drop: int) -> int:
        """Drop [keep, keep + drop); what follows moves, out of shared storage if it was in any."""
        if not self.shiftable:
            return self.rewind(slot, keep)
        entries = self.slots[slot]
        moved = entries[keep + drop :]
        private = [
            replace(entry, atom=self.fresh(1)[0].atom) if shared else entry
            for entry, shared in zip(moved, self.shared(moved), strict=True)
        ]
        self.slots[slot] = entries[:keep] + private
        return len(self.slots[slot])

    def remember(self, slot: int, length: int) -> None:
        """Let the tree own the slot's first entries too, where it has none under the same tokens."""
        tokens = tuple(self.tokens(slot))
        for at, entry in enumerate(self.slots[slot][:length]):
            self.tree.setdefault(tokens[: at + 1], entry)

    def recall(self, slot: int, tokens: Sequence[int]) -> int:
        """Extend a slot by what the tree has of the tokens."""
        entries = self.slots[slot]
        while len(entries) < len(tokens) and (path := tuple(tokens[: len(entries) + 1])) in self.tree:
            entries.append(self.tree[path])
        return len(entries)
