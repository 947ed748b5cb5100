"""Memory for weights: side by side, in huge pages where the system has some.

Measured: the kernels read twice as many bytes a second from them on a busy machine. What malloc gives lies in them by
chance at best: most matrices are small, and what was used before keeps its pages. A mapped file never does.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

# The kernels load 64 bytes at a time.
ALIGNMENT = 64


class Arena:
    """Bytes of anything that nobody has used before, taken one piece after the other."""

    def __init__(self, size: int) -> None:
        self._left = _map(size)

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor of anything, aligned."""
        size = shape.numel() * dtype.itemsize
        own, self._left = self._left[:size], self._left[aligned_size(size) :]
        return own.view(dtype).view(shape)


def aligned_size(size: int) -> int:
    """What a piece of so many bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _map(size: int) -> Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE") or size == 0:
        return torch.empty(size, dtype=torch.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
