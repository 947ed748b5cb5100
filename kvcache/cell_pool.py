"""The pool of cells of one group: storage, reference counts, and the choice of free cells.

A cell is one token's key and value in every layer of the group. It is written only while referenced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.errors import OutOfCells
from kvcache.kv_buffer import CellIndex, allocate_kv_buffers
from kvcache.spec import GroupSpec

CellArray: TypeAlias = NDArray[np.int64]


class CellPool:
    """Storage for `cells` tokens: a plane of keys and one of values, in the format that `dtype` stands for.

    Both are [layers, heads, cells, width]: head-major is 1.3-1.6x faster to read than token-major on a CPU.

    reference_counts  int32 [cells]: how many slots and nodes of the prefix tree name a cell; 0: it is free
    free_cells        cells that are
    """

    def __init__(self, spec: GroupSpec, cells: int, dtype: torch.dtype, device: torch.device) -> None:
        self.keys, self.values = allocate_kv_buffers(spec, cells, dtype, device)
        self.dtype, self.device = dtype, device
        self.reference_counts = np.zeros(cells, dtype=np.int32)
        self.cells = self.free_cells = cells

    def allocate(self, count: int, *, after: int = -1) -> CellArray:
        """Take `count` free cells, each then referenced once.

        They follow the cell `after` while those are free, so that a sequence tends to be one run that attention
        reads without a gather. Raises OutOfCells, and then takes none.
        """
        if count > self.free_cells:
            raise OutOfCells(count, self.free_cells)
        stop = after + 1 + (self._free_run_after(after, count) if after >= 0 else 0)
        cells = np.arange(after + 1, stop, dtype=np.int64)
        self.reference_counts[after + 1 : stop] = 1
        if len(cells) < count:
            more = self._from_largest_runs(count - len(cells))
            self.reference_counts[more] = 1
            cells = np.concatenate((cells, more))
        self.free_cells -= count
        return cells

    def allocate_next(self, after: int) -> int | None:
        """Take the cell behind one that is in use, if it is free: `allocate` for the one cell that most steps need."""
        cell = after + 1
        if cell == self.cells or self.reference_counts.item(cell):
            return None
        self.reference_counts[cell] = 1
        self.free_cells -= 1
        return cell

    def share(self, cells: CellArray) -> None:
        """Reference cells once more. They must be in use."""
        self.reference_counts[cells] += 1

    def release(self, cells: CellArray) -> None:
        """Drop one reference of each cell; those without any are free again."""
        if not len(cells):
            return
        self.reference_counts[cells] -= 1
        self.free_cells += int(np.count_nonzero(self.reference_counts[cells] == 0))

    def shared(self, cells: CellArray) -> NDArray[np.bool_]:
        """Which of the cells somebody else references too."""
        return self.reference_counts[cells] > 1

    def save(self, cells: CellArray) -> dict[str, Tensor]:
        """Copies of cells on the CPU, by name, in the stored format: [layers, heads, len(cells), ...]."""
        index = self.index_tensor(cells)
        return {name: tensor[:, :, index].cpu() for name, tensor in self._named_tensors()}

    def load(self, cells: CellArray, content: Mapping[str, Tensor], start: int, stop: int) -> None:
        """Write the share [start, stop) of saved cells into these, which nobody else references."""
        index = self.index_tensor(cells)
        for name, tensor in self._named_tensors():
            tensor[:, :, index] = content[name][:, :, start:stop].to(self.device)

    def index_tensor(self, cells: CellArray) -> Tensor:
        """A copy of cells as the planes take them, whether or not they follow each other."""
        return torch.tensor(cells, device=self.device)

    def cell_index(self, cells: CellArray) -> CellIndex:
        """Cells as the planes take them."""
        return self.index_tensor(cells) if last_run_start(cells) else slice(int(cells[0]), int(cells[-1]) + 1)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for kind, plane in (("keys", self.keys), ("values", self.values)):
            for name, tensor in plane.tensors.items():
                yield f"{kind}.{name}", tensor

    def _free_run_after(self, after: int, count: int) -> int:
        """How many of the `count` cells behind one are free, up to the first that is not."""
        behind = self.reference_counts[after + 1 : after + 1 + count]
        taken = behind.nonzero()[0]
        return int(taken[0]) if len(taken) else len(behind)

    def _from_largest_runs(self, count: int) -> CellArray:
        """`count` free cells in as few runs as can be, found in one look at all cells (1 ms for a million of them)."""
        bounds = np.flatnonzero(np.diff(self.reference_counts == 0, prepend=False, append=False))
        starts, lengths = bounds[::2], bounds[1::2] - bounds[::2]
        # No more runs than cells are needed; all of them need not be sorted.
        most = min(count, len(lengths))
        widest = np.argpartition(-lengths, most - 1)[:most]
        runs = []
        for run in widest[np.argsort(-lengths[widest], kind="stable")]:
            start, length = int(starts[run]), int(lengths[run])
            # The first half belongs to whoever may grow into it from the left: a new sequence starts in the middle.
            if start > 0 and count <= length // 2:
                start += length // 2
            runs.append(np.arange(start, start + min(count, length), dtype=np.int64))
            count -= len(runs[-1])
            if count == 0:
                break
        return np.concatenate(runs)


def last_run_start(cells: CellArray) -> int:
    """Where the last run of consecutive cells begins."""
    breaks = (cells[1:] - cells[:-1] != 1).nonzero()[0]
    return int(breaks[-1]) + 1 if len(breaks) else 0
