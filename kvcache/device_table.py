"""The tables of a group on the device of its cells: only changed entries are copied to it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceTable:
    """A copy of a group's tables.

    cells  int64 [slots, capacity]: the cell of each position. Entries of holes, and those past the end of a slot, are
           stale
    """

    def __init__(self, tables: NDArray[np.int64], device: torch.device) -> None:
        self.cells = torch.zeros(tables.shape, dtype=torch.long, device=device)
        self._tables = tables
        # By slot: the range of positions with all changed entries.
        self._changed: dict[int, tuple[int, int]] = {}

    def mark(self, slot: int, start: int, stop: int) -> None:
        """Note that the entries [start, stop) of a slot have changed."""
        first, last = self._changed.get(slot, (start, stop))
        self._changed[slot] = min(first, start), max(last, stop)

    def changes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of the changed entries, counted slot by slot, and their cells."""
        capacity = self._tables.shape[1]
        numbers = [
            np.arange(slot * capacity + start, slot * capacity + stop) for slot, (start, stop) in self._changed.items()
        ]
        entries = np.concatenate([*numbers, np.empty(0, np.int64)])
        return entries, np.maximum(self._tables.reshape(-1)[entries], 0)

    def write(self, entries: Tensor, cells: Tensor) -> None:
        """Write all `changes`, which are on the device now."""
        self.cells.view(-1).index_copy_(0, entries, cells)
        self._changed.clear()
