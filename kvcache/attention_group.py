"""The cells of the slots in one group of attention layers.

Owns the pool of the group and, for each slot, a table of cells in position order: the cell at position p is table[p].
Attention therefore reads exactly the sequence's own cells; no mask ever covers a neighbour. Where layers do not look
any more (window, chunk), a slot that grows releases its cells, and its table has holes there (kvcache/holes.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.cell_pool import CellArray, CellPool, last_run_start
from kvcache.component import SavedTensors
from kvcache.errors import OutOfCells
from kvcache.holes import HOLE, resume_position
from kvcache.kv_buffer import CellIndex, copy_cells
from kvcache.rotary import rotate
from kvcache.spec import GroupSpec, Span


class AttentionGroup:
    """A component (kvcache/component.py): keys and values of layers that share geometry and reach.

    capacity  tokens of a slot, at most
    cells_from     of the pool
    dtype     how they are stored (kvcache/kv_buffer.py)
    """

    def __init__(
        self, spec: GroupSpec, *, slots: int, capacity: int, cells: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.pool = CellPool(spec, cells, dtype, device)
        self._tables = np.zeros((slots, capacity), dtype=np.int64)
        self._lengths = [0] * slots
        # By slot: before the first position its table has nothing but holes; from the second on its cells are one run.
        self._first_held = [0] * slots
        self._run_starts = [0] * slots

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        return self._lengths[slot]

    def table(self, slot: int) -> CellArray:
        """The slot's cells in position order, with holes: a view that is valid until the slot changes."""
        return self._tables[slot, : self._lengths[slot]]

    def cells_from(self, slot: int, first: int) -> CellIndex:
        """The slot's cells from a position on, as the planes take them."""
        if self._run_starts[slot] > first:
            return self.pool.index_tensor(self.table(slot)[first:])
        start = self._tables.item(slot, first)
        return slice(start, start + self._lengths[slot] - first)

    def used_by_slots(self) -> int:
        """Cells that at least one slot's table names."""
        return int(np.count_nonzero(self._used_mask()))

    def resume_length(self, slot: int, length: int) -> int:
        """The deepest length whose next row would see no hole."""
        if self.spec.attention_range.kind == "full":
            return min(length, self._lengths[slot])
        return resume_position(self.table(slot)[:length], 0, self.spec.attention_range)

    def truncate(self, slot: int, length: int) -> None:
        """Release the cells from `length` on."""
        if length >= self._lengths[slot]:
            return
        self.pool.release(self._without_holes(self.table(slot)[length:]))
        self._lengths[slot] = length
        self._first_held[slot] = min(length, self._first_held[slot])
        if length <= self._run_starts[slot]:
            self._run_starts[slot] = last_run_start(self.table(slot))

    def check_append(self, spans: Sequence[Span]) -> None:
        """Raise OutOfCells if there are too few free cells for all rows together, counting those that they free."""
        needed = sum([span.length for span in spans])
        if needed > self.pool.free_cells:
            unseen = np.concatenate([self._out_of_reach(span.slot, span.start) for span in spans])
            free = self.pool.free_cells + self._freed_by(unseen)
            if needed > free:
                raise OutOfCells(needed, free)

    def append(self, spans: Sequence[Span]) -> None:
        """Give every row a cell of its own at the end of its slot's table; what the rows do not see is released."""
        for span in spans:
            self._release_slot_out_of_reach(span.slot, span.start)
        for span in spans:
            self._extend(span.slot, span.start, span.length)

    def release_out_of_reach(self) -> None:
        """Release what no later row of any slot would see."""
        for slot, length in enumerate(self._lengths):
            self._release_slot_out_of_reach(slot, length)

    def can_shift(self, slot: int, keep: int, drop: int) -> bool:
        """Whether every layer's keys can be turned, and what moves is all that the slot sees from its new end.

        The answer depends on positions alone: which of the kept cells are released by then depends on how rows came.
        """
        reach, length = self.spec.attention_range, self._lengths[slot]
        return self.spec.shiftable and (
            reach.oldest_visible(length) == 0 or reach.oldest_visible(length - drop) >= keep
        )

    def check_shift(self, slot: int, keep: int, drop: int) -> None:
        """Raise OutOfCells if the private copies of shared cells do not fit, counting what the shift frees."""
        moved = self.table(slot)[self._first_moved(slot, keep + drop) :]
        needed = int(np.count_nonzero(self.pool.shared(moved)))
        free = self.pool.free_cells + self._freed_by(self._cells_released_by_shift(slot, keep, drop))
        if needed > free:
            raise OutOfCells(needed, free)

    def shift(self, slot: int, keep: int, drop: int) -> None:
        """Release [keep, keep + drop) and turn the keys behind it, in private copies where cells are shared.

        What the slot does not see from its end is released as well, and turned for nobody.
        """
        self.pool.release(self._cells_released_by_shift(slot, keep, drop))
        table, begin = self.table(slot).copy(), self._first_moved(slot, keep + drop)
        table[: self.spec.attention_range.oldest_visible(len(table))] = HOLE
        old = table[begin:]
        new = self._private_copies(old)
        self._rotate_keys(old, new, -drop)
        self.pool.release(old[new != old])
        self._set_cells(slot, 0, np.concatenate((table[:keep], table[keep + drop : begin], new)))
        self._first_held[slot] = min(self._first_held[slot], keep)

    def acquire(self, slot: int, start: int, stop: int) -> CellArray:
        """Reference the slot's cells of [start, stop) once more."""
        cells = self.table(slot)[start:stop].copy()
        self.pool.share(self._without_holes(cells))
        return cells

    def release(self, references: CellArray) -> None:
        """Drop a held reference of each cell."""
        self.pool.release(self._without_holes(references))

    def trim(self, references: CellArray, start: int) -> CellArray:
        """Release the cells that a row behind the stretch would not see."""
        unseen = self._visible_from(references, start)
        self.pool.release(self._without_holes(references[:unseen]))
        return np.concatenate((np.full(unseen, HOLE, dtype=np.int64), references[unseen:]))

    def can_trim(self, references: CellArray, start: int) -> bool:
        """Whether there are such cells."""
        return bool(np.any(references[: self._visible_from(references, start)] != HOLE))

    def slice(self, references: CellArray, start: int, stop: int) -> CellArray:
        """Some of the cells."""
        return references[start:stop]

    def concat(self, first: CellArray, second: CellArray) -> CellArray:
        """All of the cells."""
        return np.concatenate((first, second))

    def resume_depth(self, ranges: Sequence[tuple[int, CellArray]], cached_length: int, length: int) -> int:
        """The deepest position whose next row would see no hole; what it sees of the slot itself is there."""
        if self.spec.attention_range.kind == "full":
            return length
        parts = [held[max(cached_length - begin, 0) : max(length - begin, 0)] for begin, held in ranges]
        return (
            resume_position(np.concatenate(parts), cached_length, self.spec.attention_range) if parts else cached_length
        )

    def attach(self, slot: int, references: CellArray) -> None:
        """Append cells to the slot's table, sharing them."""
        self.pool.share(self._without_holes(references))
        self._set_cells(slot, self._lengths[slot], references)

    def freeable(self, references: CellArray) -> int:
        """Cells that nobody else references."""
        return int(np.count_nonzero(self.pool.reference_counts[self._without_holes(references)] == 1))

    def unused_by_slots(self, references: CellArray) -> int:
        """Cells that no slot's table names."""
        return int(np.count_nonzero(~self._used_mask()[self._without_holes(references)]))

    def save(self, references: CellArray) -> SavedTensors:
        """The cells' content, and which tokens of the stretch have any."""
        return {"present": torch.from_numpy(references != HOLE), **self.pool.save(self._without_holes(references))}

    def check_load(self, content: SavedTensors, start: int, stop: int) -> None:
        """Raise OutOfCells if there are too few free cells for the tokens [start, stop) of a saved stretch."""
        needed = int(content["present"][start:stop].sum())
        if needed > self.pool.free_cells:
            raise OutOfCells(needed, self.pool.free_cells)

    def placeholder(self, content: SavedTensors, length: int) -> CellArray:
        """Holes where nothing was saved, and 0 where something was: it names no cell."""
        return np.where(content["present"].numpy(), 0, HOLE)

    def load(self, content: SavedTensors, start: int, stop: int) -> CellArray:
        """The tokens [start, stop) of a saved stretch in fresh cells. Raises OutOfCells, and then takes none."""
        present = content["present"].numpy()
        before, count = int(present[:start].sum()), int(present[start:stop].sum())
        cells = self.pool.allocate(count)
        self.pool.load(cells, content, before, before + count)
        held = np.full(stop - start, HOLE, dtype=np.int64)
        held[present[start:stop]] = cells
        return held

    def over_budget(self) -> int:
        """Cells are limited by the pool alone."""
        return 0

    def _used_mask(self) -> NDArray[np.bool_]:
        used = np.zeros(self.pool.cells, dtype=np.bool_)
        for slot in range(len(self._lengths)):
            used[self._without_holes(self.table(slot))] = True
        return used

    def _without_holes(self, cells: CellArray) -> CellArray:
        """The cells without the holes."""
        return cells if self.spec.attention_range.kind == "full" else cells[cells != HOLE]

    def _out_of_reach(self, slot: int, start: int) -> CellArray:
        """The slot's cells that rows from `start` on do not see."""
        return self._without_holes(
            self._tables[slot, self._first_held[slot] : self.spec.attention_range.oldest_visible(start)]
        )

    def _release_slot_out_of_reach(self, slot: int, start: int) -> None:
        oldest = self.spec.attention_range.oldest_visible(start)
        if oldest == self._first_held[slot]:
            return
        self.pool.release(self._out_of_reach(slot, start))
        self._tables[slot, self._first_held[slot] : oldest] = HOLE
        self._first_held[slot] = oldest

    def _visible_from(self, held: CellArray, start: int) -> int:
        """Where in a stretch the part begins that a row behind it sees."""
        return min(max(self.spec.attention_range.oldest_visible(start + len(held)) - start, 0), len(held))

    def _freed_by(self, cells: CellArray) -> int:
        """Cells that would come free if each of these references, of several slots, were dropped."""
        different, owners = np.unique(cells, return_counts=True)
        return int(np.count_nonzero(self.pool.reference_counts[different] == owners))

    def _first_moved(self, slot: int, behind: int) -> int:
        """The first position that a shift moves: behind what is dropped, and seen from the slot's end."""
        return max(behind, self.spec.attention_range.oldest_visible(self._lengths[slot]))

    def _cells_released_by_shift(self, slot: int, keep: int, drop: int) -> CellArray:
        """The cells that a shift releases: those not seen from the slot's end, and those of what is dropped."""
        table = self.table(slot)
        oldest = self.spec.attention_range.oldest_visible(len(table))
        return self._without_holes(np.concatenate((table[:oldest], table[max(keep, oldest) : keep + drop])))

    def _private_copies(self, cells: CellArray) -> CellArray:
        """The cells, with a fresh one in place of each that somebody else references too."""
        shared = self.pool.shared(cells)
        private = cells.copy()
        private[shared] = self.pool.allocate(int(np.count_nonzero(shared)))
        return private

    def _rotate_keys(self, old: CellArray, new: CellArray, by: int) -> None:
        """Write the content of the old cells, moved by `by` positions, to the new ones; most are the same cells.

        Every move rounds keys to the stored format once more. Measured, relative to the key, when written and after
        1, 4 and 16 moves: int8 0.6, 0.9, 1.4 and 2.7 %; bfloat16 0.17, 0.23, 0.41 and 1.0 %; float16 0.02, 0.03, 0.05
        and 0.1 %; float32 1e-7 at most. A shift that drops half of the context moves a token once or twice in its life.
        """
        sources, targets = self.pool.index_tensor(old), self.pool.index_tensor(new)
        copied = self.pool.index_tensor(np.flatnonzero(new != old))
        keys, precision = self.pool.keys, torch.promote_types(self.pool.dtype, torch.float32)
        for layer, rotation in enumerate(self.spec.rotations):
            assert rotation is not None, "can_shift said no"
            rows = keys.transform(keys.read(layer, sources, precision))
            keys.write(layer, targets, rotate(rows, by, rotation))
        copy_cells(self.pool.values, sources[copied], targets[copied])

    def _extend(self, slot: int, start: int, length: int) -> None:
        """Give a slot cells of its own at its end."""
        last = self._tables.item(slot, start - 1) if start else HOLE
        cell = self.pool.allocate_next(last) if length == 1 and last != HOLE else None
        if cell is None:
            self._set_cells(slot, start, self.pool.allocate(length, after=last))
        else:
            self._tables[slot, start] = cell
            self._lengths[slot] = start + 1

    def _set_cells(self, slot: int, start: int, cells: CellArray) -> None:
        """Let a slot have these cells from `start` on, and nothing behind them."""
        stop = self._lengths[slot] = start + len(cells)
        self._tables[slot, start:stop] = cells
        before = max(start - 1, 0)
        run = last_run_start(self._tables[slot, before:stop])
        if run or not start:
            self._run_starts[slot] = before + run
