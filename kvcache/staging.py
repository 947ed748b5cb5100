"""Copies the integers of a step to the device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Kernels are compiled for the alignment of their pointers, so each array begins at a multiple of this number of bytes.
_ALIGNMENT = 16


class StagingBuffer:
    """Host memory for the arrays of one step; page-locked for CUDA, so that their copy is not waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """The arrays as tensors of the device, by one copy; each begins at a multiple of 16 bytes."""
        if not arrays:
            return []
        starts = [*accumulate((-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays), initial=0)]
        staged = self._reserve(starts[-1])
        for start, array in zip(starts, arrays, strict=False):
            _part(staged, start, array).numpy()[...] = array
        on_device = staged.to(self.device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return [_part(on_device, start, array) for start, array in zip(starts, arrays, strict=False)]

    def _reserve(self, size: int) -> Tensor:
        """Memory for `size` bytes, after the end of the copy before."""
        if self._copied is not None:
            self._copied.synchronize()
        if len(self._bytes) < size:
            is_cuda = self.device.type == "cuda"
            self._bytes = torch.empty(2 * size, dtype=torch.uint8, pin_memory=is_cuda)
            self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        return self._bytes[:size]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of an array on a device, which is not waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, copy=True)


def _part(block: Tensor, start: int, array: NDArray[Any]) -> Tensor:
    """The bytes from `start` on, with the type and the shape of an array."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return block[start : start + array.nbytes].view(dtype).view(array.shape)
