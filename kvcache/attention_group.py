"""Cell tables of the slots in one group of attention layers.

A group owns its cell pool and, for each slot, a table of cells in position order: the cell of position p is table[p].
Attention reads exactly the sequence's own cells, without a mask over other sequences. Cells out of the attention range
(window, chunk) are released as a slot grows; their table entries are holes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.cell_pool import CellArray, CellPool, last_run_start
from kvcache.component import SavedTensors
from kvcache.device_table import DeviceTable
from kvcache.errors import OutOfCells
from kvcache.kv_buffer import CellIndex, copy_cells
from kvcache.rotary import rotate
from kvcache.snapshot import CellCounts
from kvcache.spec import AttentionRange, GroupSpec, Span

HOLE = -1

# Called with (old cells, new cells, distance) before the keys of cells are moved.
MoveListener: TypeAlias = Callable[[CellArray, CellArray, int], None]


class AttentionGroup:
    """CacheComponent of the layers with one geometry and one attention range.

    capacity  maximum tokens of a slot
    cells     size of the pool
    dtype     storage format (kvcache/kv_buffer.py)
    on_move   besides forwards, the only operation of slots on stored keys and values

    device_table  the tables on the device of the cells; None: that is the CPU
    """

    def __init__(
        self,
        spec: GroupSpec,
        *,
        slots: int,
        capacity: int,
        cells: int,
        dtype: torch.dtype,
        device: torch.device,
        on_move: MoveListener | None = None,
    ) -> None:
        self.spec, self._on_move = spec, on_move
        self.pool = CellPool(spec, cells, dtype, device)
        self._tables = np.zeros((slots, capacity), dtype=np.int64)
        self.device_table = None if device.type == "cpu" else DeviceTable(self._tables, device)
        self._lengths = [0] * slots
        # By slot: all table entries before `_first_held` are holes; the cells from `_run_starts` on are one run.
        self._first_held = [0] * slots
        self._run_starts = [0] * slots

    def length(self, slot: int) -> int:
        """Tokens in the slot."""
        return self._lengths[slot]

    def table(self, slot: int) -> CellArray:
        """The slot's cells in position order, with holes: a view, valid until the slot changes."""
        return self._tables[slot, : self._lengths[slot]]

    def new_cells(self, spans: Sequence[Span]) -> CellArray:
        """The cells of the tokens of spans, in the order of the batch."""
        return np.concatenate([self.table(span.slot)[span.start : span.stop] for span in spans])

    def cells_from(self, slot: int, first: int, *, by_device_table: bool = False) -> CellIndex:
        """Index of the slot's cells from position `first` on.

        by_device_table  whether cells that are no run are a view of the device table, which may be written later
        """
        if self._run_starts[slot] > first:
            if by_device_table and self.device_table is not None:
                return self.device_table.cells[slot, first : self._lengths[slot]]
            return self.pool.index_tensor(self.table(slot)[first:])
        start = self._tables.item(slot, first)
        return slice(start, start + self._lengths[slot] - first)

    def used_by_slots(self) -> int:
        """Cells in the table of at least one slot."""
        return int(np.count_nonzero(self._used_mask()))

    def count_cells(self) -> CellCounts:
        """The cells of the pool by their use."""
        uses = np.zeros(self.pool.cells, dtype=np.int16)
        for slot in range(len(self._lengths)):
            uses[self._without_holes(self.table(slot))] += 1
        used = int(np.count_nonzero(uses))
        cached = self.pool.cells - self.pool.free_cells - used
        return CellCounts(self.pool.cells, used, int(np.count_nonzero(uses > 1)), cached)

    def slots_with(self, cell: int, position: int) -> tuple[int, ...]:
        """The slots whose token at `position` has this cell."""
        lengths = enumerate(self._lengths)
        return tuple(slot for slot, length in lengths if position < length and self._tables[slot, position] == cell)

    def resume_length(self, slot: int, length: int) -> int:
        """The largest length up to `length` whose next token attends to no hole."""
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
        """Raise OutOfCells if the tokens of all spans need more cells than are free after the releases of `append`."""
        needed = sum([span.length for span in spans])
        if needed > self.pool.free_cells:
            released = np.concatenate([self._out_of_reach(span.slot, span.start) for span in spans])
            free = self.pool.free_cells + self._freed_by(released)
            if needed > free:
                raise OutOfCells(needed, free)

    def append(self, spans: Sequence[Span]) -> None:
        """Allocate a cell for each token of the spans; cells out of reach of the new tokens are released first."""
        for span in spans:
            self._release_slot_out_of_reach(span.slot, span.start)
        for span in spans:
            self._extend(span.slot, span.start, span.length)

    def release_out_of_reach(self) -> None:
        """Release the cells of every slot that no later token attends to."""
        for slot, length in enumerate(self._lengths):
            self._release_slot_out_of_reach(slot, length)

    def can_shift(self, slot: int, keep: int, drop: int) -> bool:
        """Whether the keys of every layer can be rotated and the moved tokens are all that the new end attends to.

        The answer depends on positions alone, not on the cells released so far, which depend on the chunk sizes.
        """
        attention_range, length = self.spec.attention_range, self._lengths[slot]
        visible = attention_range.oldest_visible(length) == 0 or attention_range.oldest_visible(length - drop) >= keep
        return self.spec.shiftable and visible

    def check_shift(self, slot: int, keep: int, drop: int) -> None:
        """Raise OutOfCells if the private copies of shared cells need more cells than are free after the releases."""
        moved = self.table(slot)[self._first_moved(slot, keep + drop) :]
        needed = int(np.count_nonzero(self.pool.shared(moved)))
        free = self.pool.free_cells + self._freed_by(self._cells_released_by_shift(slot, keep, drop))
        if needed > free:
            raise OutOfCells(needed, free)

    def shift(self, slot: int, keep: int, drop: int) -> None:
        """Release [keep, keep + drop) and rotate the keys after it, in private copies of shared cells.

        Cells out of reach from the end of the slot are released as well, without rotation.
        """
        self.pool.release(self._cells_released_by_shift(slot, keep, drop))
        table, first = self.table(slot).copy(), self._first_moved(slot, keep + drop)
        table[: self.spec.attention_range.oldest_visible(len(table))] = HOLE
        old = table[first:]
        new = self._private_copies(old)
        if self._on_move is not None:
            self._on_move(old, new, -drop)
        self.move_cells(old, new, -drop)
        self.pool.release(old[new != old])
        self._set_cells(slot, 0, np.concatenate((table[:keep], table[keep + drop : first], new)))
        self._first_held[slot] = min(self._first_held[slot], keep)

    def move_cells(self, old: CellArray, new: CellArray, distance: int) -> None:
        """Write the content of the old cells, moved by `distance` positions, to the new cells; most are the same.

        Each move rounds the keys to the storage format once more. Measured error relative to the key when written and
        after 1, 4 and 16 moves: int8 0.6, 0.9, 1.4 and 2.7 %; bfloat16 0.17, 0.23, 0.41 and 1.0 %; float16 0.02, 0.03,
        0.05 and 0.1 %; float32 up to 1e-7. With shifts that drop half of the context a token moves once or twice.
        """
        arrays = (old, new, np.flatnonzero(new != old))
        index = self.pool.index_tensor(np.concatenate(arrays))
        sources, targets, copied = torch.split(index, [len(array) for array in arrays])
        keys, precision = self.pool.keys, torch.promote_types(self.pool.dtype, torch.float32)
        for layer, rotation in enumerate(self.spec.rotations):
            assert rotation is not None, "only shiftable groups are shifted"
            rows = keys.transform(keys.read(layer, sources, precision))
            keys.write(layer, targets, rotate(rows, distance, rotation))
        copy_cells(self.pool.values, sources[copied], targets[copied])

    def acquire(self, slot: int, start: int, stop: int) -> CellArray:
        """Add a reference to the slot's cells of [start, stop)."""
        cells = self.table(slot)[start:stop].copy()
        self.pool.share(self._without_holes(cells))
        return cells

    def release(self, references: CellArray) -> None:
        """Drop an acquired reference of each cell."""
        self.pool.release(self._without_holes(references))

    def trim(self, references: CellArray, start: int) -> CellArray:
        """Release the cells that a token after the range does not attend to."""
        unseen = self._visible_from(references, start)
        self.pool.release(self._without_holes(references[:unseen]))
        return np.concatenate((np.full(unseen, HOLE, dtype=np.int64), references[unseen:]))

    def can_trim(self, references: CellArray, start: int) -> bool:
        """Whether the range has cells that a token after it does not attend to."""
        return bool(np.any(references[: self._visible_from(references, start)] != HOLE))

    def slice(self, references: CellArray, start: int, stop: int) -> CellArray:
        """The cells of tokens [start, stop)."""
        return references[start:stop]

    def concat(self, first: CellArray, second: CellArray) -> CellArray:
        """The cells of two adjacent ranges."""
        return np.concatenate((first, second))

    def resume_depth(self, ranges: Sequence[tuple[int, CellArray]], cached_length: int, length: int) -> int:
        """The largest position up to `length` whose next token attends to no hole; the slot's own cells have none."""
        if self.spec.attention_range.kind == "full":
            return length
        parts = [cells[max(cached_length - begin, 0) : max(length - begin, 0)] for begin, cells in ranges]
        if not parts:
            return cached_length
        return resume_position(np.concatenate(parts), cached_length, self.spec.attention_range)

    def attach(self, slot: int, references: CellArray) -> None:
        """Append shared cells to the slot's table."""
        self.pool.share(self._without_holes(references))
        self._set_cells(slot, self._lengths[slot], references)

    def freeable(self, references: CellArray) -> int:
        """Cells without another reference."""
        return int(np.count_nonzero(self.pool.reference_counts[self._without_holes(references)] == 1))

    def unused_by_slots(self, references: CellArray) -> int:
        """Cells in no slot's table."""
        return int(np.count_nonzero(~self._used_mask()[self._without_holes(references)]))

    def save(self, references: CellArray) -> SavedTensors:
        """The content of the cells, and a mask of the tokens that have one."""
        present = torch.from_numpy(references != HOLE)
        return {"present": present, **self.pool.save(self._without_holes(references))}

    def check_load(self, content: SavedTensors, start: int, stop: int) -> None:
        """Raise OutOfCells if the tokens [start, stop) of a saved range need more cells than are free."""
        needed = int(content["present"][start:stop].sum())
        if needed > self.pool.free_cells:
            raise OutOfCells(needed, self.pool.free_cells)

    def placeholder(self, content: SavedTensors, length: int) -> CellArray:
        """A hole for each token without saved content, 0 for all others."""
        return np.where(content["present"].numpy(), 0, HOLE)

    def load(self, content: SavedTensors, start: int, stop: int) -> CellArray:
        """Copy the tokens [start, stop) of a saved range to new cells. Raises OutOfCells and then allocates none."""
        present = content["present"].numpy()
        before, count = int(present[:start].sum()), int(present[start:stop].sum())
        cells = self.pool.allocate(count)
        try:
            self.pool.load(cells, content, before, before + count)
        except (MemoryError, RuntimeError):
            self.pool.release(cells)
            raise
        references = np.full(stop - start, HOLE, dtype=np.int64)
        references[present[start:stop]] = cells
        return references

    def over_budget(self) -> int:
        """0: cells are limited by the pool alone."""
        return 0

    def _used_mask(self) -> NDArray[np.bool_]:
        used = np.zeros(self.pool.cells, dtype=np.bool_)
        for slot in range(len(self._lengths)):
            used[self._without_holes(self.table(slot))] = True
        return used

    def _without_holes(self, cells: CellArray) -> CellArray:
        return cells if self.spec.attention_range.kind == "full" else cells[cells != HOLE]

    def _out_of_reach(self, slot: int, start: int) -> CellArray:
        """The slot's cells that tokens from `start` on do not attend to."""
        oldest = self.spec.attention_range.oldest_visible(start)
        return self._without_holes(self._tables[slot, self._first_held[slot] : oldest])

    def _release_slot_out_of_reach(self, slot: int, start: int) -> None:
        oldest = self.spec.attention_range.oldest_visible(start)
        if oldest == self._first_held[slot]:
            return
        self.pool.release(self._out_of_reach(slot, start))
        self._tables[slot, self._first_held[slot] : oldest] = HOLE
        self._first_held[slot] = oldest

    def _visible_from(self, references: CellArray, start: int) -> int:
        """Index in a range of the first cell that a token after the range attends to."""
        oldest = self.spec.attention_range.oldest_visible(start + len(references))
        return min(max(oldest - start, 0), len(references))

    def _freed_by(self, cells: CellArray) -> int:
        """Cells that would be free if each of these references, of several slots, were dropped."""
        different, dropped = np.unique(cells, return_counts=True)
        return int(np.count_nonzero(self.pool.reference_counts[different] == dropped))

    def _first_moved(self, slot: int, dropped_stop: int) -> int:
        """The first position that a shift moves: after the dropped range and visible from the end of the slot."""
        return max(dropped_stop, self.spec.attention_range.oldest_visible(self._lengths[slot]))

    def _cells_released_by_shift(self, slot: int, keep: int, drop: int) -> CellArray:
        """The dropped cells, and the cells out of reach from the end of the slot."""
        table = self.table(slot)
        oldest = self.spec.attention_range.oldest_visible(len(table))
        return self._without_holes(np.concatenate((table[:oldest], table[max(keep, oldest) : keep + drop])))

    def _private_copies(self, cells: CellArray) -> CellArray:
        """The cells, with a new cell in place of each shared one."""
        shared = self.pool.shared(cells)
        private = cells.copy()
        private[shared] = self.pool.allocate(int(np.count_nonzero(shared)))
        return private

    def _extend(self, slot: int, start: int, length: int) -> None:
        """Allocate `length` cells at the end of a slot."""
        last = self._tables.item(slot, start - 1) if start else HOLE
        cell = self.pool.allocate_next(last) if length == 1 and last != HOLE else None
        if cell is None:
            self._set_cells(slot, start, self.pool.allocate(length, after=last))
        else:
            self._tables[slot, start] = cell
            self._lengths[slot] = start + 1
            if self.device_table is not None:
                self.device_table.mark(slot, start, start + 1)

    def _set_cells(self, slot: int, start: int, cells: CellArray) -> None:
        """Set a slot's table from `start` on to `cells`; the slot ends after them."""
        stop = self._lengths[slot] = start + len(cells)
        self._tables[slot, start:stop] = cells
        if self.device_table is not None and stop > start:
            self.device_table.mark(slot, start, stop)
        before = max(start - 1, 0)
        run = last_run_start(self._tables[slot, before:stop])
        if run or not start:
            self._run_starts[slot] = before + run


def resume_position(cells: CellArray, start: int, attention_range: AttentionRange) -> int:
    """The largest position up to the end of `cells` whose next token attends to no hole; at least `start`.

    cells  the cells of the positions from `start` on; a token at `start` attends to no hole
    """
    stop = start + len(cells)
    if attention_range.kind == "full":
        return stop
    # Fast path: usually there is no hole in reach of the end.
    if not np.any(cells[max(attention_range.oldest_visible(stop) - start, 0) :] == HOLE):
        return stop
    positions = np.arange(start, stop + 1, dtype=np.int64)
    last_hole = np.full(len(positions), -1, dtype=np.int64)
    np.maximum.accumulate(np.where(cells == HOLE, positions[:-1], -1), out=last_hole[1:])
    return int(positions[last_hole < attention_range.oldest_visible(positions)].max(initial=start))
