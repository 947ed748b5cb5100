"""Copies device tensors to host memory concurrently with steps; only `wait` blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvcache.component import SavedTensors


class HostCopies:
    """Copies from one device: page-locked and on their own stream for CUDA. Tensors of the CPU are not copied."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def copy(self, tensors: SavedTensors) -> SavedTensors:
        """Tensors in host memory with the numbers after `wait`; until then nothing may write the given ones."""
        return {name: self._copy(tensor) for name, tensor in tensors.items()}

    def wait(self) -> None:
        """Return when all copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        with self._concurrently(tensor):
            copied.copy_(tensor, non_blocking=True)
        return copied

    @contextmanager
    def _concurrently(self, tensor: Tensor) -> Iterator[None]:
        """Operations that read the tensor, once it is computed, concurrently with later steps."""
        if not tensor.is_cuda:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            yield
        # Its memory is not used again before the copy has ended.
        tensor.record_stream(self._stream)
