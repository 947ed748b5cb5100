"""The pool of cells of one group: storage, reference counts, and the choice of free cells.

A cell is one token's key and value in every layer of the group. It is written only while referenced once.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import OutOfCells
from kvcache.spec import GroupSpec

Cells: TypeAlias = NDArray[np.int64]


class CellPool:
    """Storage for `cells` tokens.

    keys    [layers, heads, cells, key_width]     head-major: 1.3-1.6x faster to read than token-major on a CPU
    values  [layers, heads, cells, value_width]
    """

    def __init__(self, spec: GroupSpec, cells: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (len(spec.layers), spec.heads, cells)
        self.keys = _zeros((*shape, spec.key_width), dtype, device)
        self.values = _zeros((*shape, spec.value_width), dtype, device)
        self.references = np.zeros(cells, dtype=np.int32)
        self.cells = self.free = cells

    def allocate(self, count: int, *, after: int = -1) -> Cells:
        """Take `count` free cells, each then referenced once.

        They follow the cell `after` while those are free, so that a sequence tends to be one run that attention
        reads without a gather. Raises OutOfCells, and then takes none.
        """
        if count > self.free:
            raise OutOfCells(count, self.free)
        cells = self._following(after, count) if after >= 0 else np.empty(0, dtype=np.int64)
        self.references[cells] = 1
        while len(cells) < count:
            more = self._from_largest_run(count - len(cells))
            self.references[more] = 1
            cells = np.concatenate((cells, more))
        self.free -= count
        return cells

    def share(self, cells: Cells) -> None:
        """Reference cells once more. They must be in use."""
        self.references[cells] += 1

    def release(self, cells: Cells) -> None:
        """Drop one reference of each cell; those without any are free again."""
        self.references[cells] -= 1
        self.free += int(np.count_nonzero(self.references[cells] == 0))

    def shared(self, cells: Cells) -> NDArray[np.bool_]:
        """Which of the cells somebody else references too."""
        return self.references[cells] > 1

    def _following(self, after: int, count: int) -> Cells:
        window = self.references[after + 1 : after + 1 + count] == 0
        run = len(window) if window.all() else int(window.argmin())
        return np.arange(after + 1, after + 1 + run, dtype=np.int64)

    def _from_largest_run(self, count: int) -> Cells:
        used = np.flatnonzero(self.references)
        edges = np.concatenate(([-1], used, [len(self.references)]))
        gaps = np.diff(edges) - 1
        widest = int(gaps.argmax())
        start, length = int(edges[widest]) + 1, int(gaps[widest])
        # The first half belongs to whoever may grow into it from the left: a new sequence starts in the middle.
        if start > 0 and count <= length // 2:
            start += length // 2
        return np.arange(start, start + min(count, length), dtype=np.int64)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not just memory: a cell that was never written must be finite, for it may stand under a mask.

    On a CPU they come from calloc through numpy, so that a cell takes memory only once it is used; torch would write
    the zeros (measured: 7 GiB resident, and seconds, for a cache that was still empty).
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
