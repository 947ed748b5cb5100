"""The cells of the slots in one group of attention layers.

Owns the pool of the group and, for each slot, a table of cells in position order: the cell at position p is table[p].
Attention therefore reads exactly the sequence's own cells; no mask ever covers a neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcache.cells import CellPool, Cells
from kvcache.errors import OutOfCells
from kvcache.rotary import rotate
from kvcache.spec import GroupSpec, Span


class AttentionGroup:
    """A component (kvcache/component.py): keys and values of layers that share geometry and reach."""

    def __init__(
        self, spec: GroupSpec, *, slots: int, capacity: int, cells: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.pool = CellPool(spec, cells, dtype, device)
        self._tables = np.zeros((slots, capacity), dtype=np.int64)
        self._lengths = [0] * slots

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        return self._lengths[slot]

    def table(self, slot: int) -> Cells:
        """The slot's cells in position order: a view that is valid until the slot changes."""
        return self._tables[slot, : self._lengths[slot]]

    def used_by_slots(self) -> int:
        """Cells that at least one slot's table names."""
        used = np.zeros(self.pool.cells, dtype=np.bool_)
        for slot in range(len(self._lengths)):
            used[self.table(slot)] = True
        return int(np.count_nonzero(used))

    def standing(self, slot: int, length: int) -> int:
        """Full attention can go on from any length that it holds."""
        return min(length, self._lengths[slot])

    def share(self, source: int, target: int, length: int) -> None:
        """Reference the source's first cells from the target too; no tensor moves."""
        cells = self.table(source)[:length].copy()
        self.pool.share(cells)
        self.pool.release(self.table(target))
        self._set(target, cells)

    def truncate(self, slot: int, length: int) -> None:
        """Release the cells from `length` on."""
        self.pool.release(self.table(slot)[length:])
        self._lengths[slot] = min(length, self._lengths[slot])

    def check_append(self, spans: Sequence[Span]) -> None:
        """Raise OutOfCells if the pool has too few free cells for all rows together."""
        needed = sum(span.length for span in spans)
        if needed > self.pool.free:
            raise OutOfCells(needed, self.pool.free)

    def append(self, spans: Sequence[Span]) -> None:
        """Give every row a cell of its own at the end of its slot's table."""
        for span in spans:
            last = int(self._tables[span.slot, span.start - 1]) if span.start else -1
            self._tables[span.slot, span.start : span.stop] = self.pool.allocate(span.length, after=last)
            self._lengths[span.slot] = span.stop

    def can_shift(self, slot: int) -> bool:
        """Whether every layer's keys can be turned to other positions."""
        return self.spec.shiftable

    def check_shift(self, slot: int, keep: int, drop: int) -> None:
        """Raise OutOfCells if the private copies of shared cells do not fit, counting the cells that the drop frees."""
        table = self.table(slot)
        dropped, moved = table[keep : keep + drop], table[keep + drop :]
        needed = int(np.count_nonzero(self.pool.shared(moved)))
        free = self.pool.free + int(np.count_nonzero(~self.pool.shared(dropped)))
        if needed > free:
            raise OutOfCells(needed, free)

    def shift(self, slot: int, keep: int, drop: int) -> None:
        """Release [keep, keep + drop) and turn the keys behind it, in private copies where cells are shared."""
        table = self.table(slot).copy()
        self.pool.release(table[keep : keep + drop])
        old = table[keep + drop :]
        new = self._private(old)
        self._turn(old, new, -drop)
        self.pool.release(old[new != old])
        self._set(slot, np.concatenate((table[:keep], new)))

    def hold(self, slot: int, start: int, stop: int) -> Cells:
        """Reference the slot's cells of [start, stop) once more."""
        cells = self.table(slot)[start:stop].copy()
        self.pool.share(cells)
        return cells

    def release(self, held: Cells) -> None:
        """Drop a held reference of each cell."""
        self.pool.release(held)

    def part(self, held: Cells, start: int, stop: int) -> Cells:
        """Some of the cells."""
        return held[start:stop]

    def joined(self, first: Cells, second: Cells) -> Cells:
        """All of the cells."""
        return np.concatenate((first, second))

    def reach(self, stretches: Sequence[tuple[int, Cells]], standing: int, length: int) -> int:
        """Full attention can go on from anywhere."""
        return length

    def restore(self, slot: int, held: Cells) -> None:
        """Append cells to the slot's table, sharing them."""
        self.pool.share(held)
        self._set(slot, np.concatenate((self.table(slot), held)))

    def freeable(self, held: Cells) -> int:
        """Cells that nobody else references."""
        return int(np.count_nonzero(self.pool.references[held] == 1))

    def surplus(self) -> int:
        """Cells are limited by the pool alone."""
        return 0

    def _private(self, cells: Cells) -> Cells:
        """The cells, with a fresh one in place of each that somebody else references too."""
        shared = self.pool.shared(cells)
        private = cells.copy()
        private[shared] = self.pool.allocate(int(np.count_nonzero(shared)))
        return private

    def _turn(self, old: Cells, new: Cells, by: int) -> None:
        """Write the content of the old cells, moved by `by` positions, to the new ones; most are the same cells."""
        sources, targets = self._index(old), self._index(new)
        copied = self._index(np.flatnonzero(new != old))
        for layer, rotation in enumerate(self.spec.rotations):
            assert rotation is not None, "can_shift said no"
            keys, values = self.pool.keys[layer], self.pool.values[layer]
            keys[:, targets] = rotate(keys[:, sources], by, rotation)
            values[:, targets[copied]] = values[:, sources[copied]]

    def _index(self, cells: Cells) -> Tensor:
        return torch.from_numpy(cells).to(self.pool.keys.device)

    def _set(self, slot: int, cells: Cells) -> None:
        self._tables[slot, : len(cells)] = cells
        self._lengths[slot] = len(cells)
