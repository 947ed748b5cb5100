"""Memory for weights: contiguous, in huge pages where the system has them.

Measured: on a busy machine the kernels read twice as many bytes a second from huge pages. malloc uses them only for
large blocks that were not in use before, and mapped files never do.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

# The kernels load 64 bytes at a time.
ALIGNMENT = 64


class Arena:
    """Uninitialised memory, from which tensors are allocated one after the other."""

    def __init__(self, size: int) -> None:
        """`size` in bytes."""
        self._free = _map(size)

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to ALIGNMENT bytes."""
        size = shape.numel() * dtype.itemsize
        buffer, self._free = self._free[:size], self._free[aligned_size(size) :]
        return buffer.view(dtype).view(shape)


def aligned_size(size: int) -> int:
    """The bytes that an allocation of `size` bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _map(size: int) -> Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE") or size == 0:
        return torch.empty(size, dtype=torch.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
