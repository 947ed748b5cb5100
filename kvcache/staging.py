"""The way of numbers from the host to a device: the arrays of a step in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD_BYTES = 8


class StagingBuffer:
    """Host memory for the arrays of one step; page-locked for CUDA, so that their copy is not waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._words = torch.empty(0, dtype=torch.long)
        self._copied: torch.cuda.Event | None = None

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """The arrays as tensors of the device, by one copy. The bytes of each are a multiple of 8."""
        if not arrays:
            return []
        sizes = [array.nbytes // _WORD_BYTES for array in arrays]
        words = self._reserve(sum(sizes))
        torch.cat([_words(array) for array in arrays], out=words)
        on_device = words.to(self.device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        parts = torch.split(on_device, sizes)
        return [part.view(_dtype(array)).view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def _reserve(self, size: int) -> Tensor:
        """Memory for `size` words, after the end of the copy before."""
        if self._copied is not None:
            self._copied.synchronize()
        if len(self._words) < size:
            is_cuda = self.device.type == "cuda"
            self._words = torch.empty(2 * size, dtype=torch.long, pin_memory=is_cuda)
            self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        return self._words[:size]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of an array on a device, which is not waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, copy=True)


def _words(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.int64))


def _dtype(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
