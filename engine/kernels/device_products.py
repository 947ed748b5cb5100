"""Products with quantised matrices on a device other than the CPU: rows are not quantised, unlike on the CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from engine.kernels.linear import MultiplyRows, multiply_unrounded
from engine.kernels.packing import PackedMatrix

# Rows [rows, columns], and for each the index of its expert, ascending, to products [rows, outputs]. The products of a
# row without an expert, with an index beyond all, are zeros.
MultiplyByExpert: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# Indices of outputs [rows] to their weights, float32 [rows, columns].
ReadOutputs: TypeAlias = Callable[[Tensor], Tensor]


class DeviceProducts(ABC):
    """A PrepareMatrices for matrices on `device`, with the other uses of quantised matrices."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def __call__(self, matrices: Sequence[PackedMatrix]) -> MultiplyRows:
        """See linear.prepare; products in the dtype of the rows."""

    @abstractmethod
    def experts(self, matrices: Sequence[PackedMatrix]) -> MultiplyByExpert | None:
        """A function that multiplies each row by the matrix of its expert, on the device alone.

        None: matrices of several shapes or formats, or not of one `upload`, or a device without such a function.
        """

    @abstractmethod
    def outputs(self, matrix: PackedMatrix) -> ReadOutputs:
        """A function that dequantises some outputs of a matrix."""


class TorchProducts(DeviceProducts):
    """Unpacks the weights at each call; waits for the experts of rows."""

    def __call__(self, matrices: Sequence[PackedMatrix]) -> MultiplyRows:
        """See DeviceProducts."""
        return lambda rows: multiply_unrounded(rows, matrices)

    def experts(self, matrices: Sequence[PackedMatrix]) -> MultiplyByExpert | None:
        """None."""
        return None

    def outputs(self, matrix: PackedMatrix) -> ReadOutputs:
        """See DeviceProducts."""
        return lambda outputs: matrix.rows(outputs).unpack(torch.float32)


def upload(matrices: Sequence[PackedMatrix], device: torch.device) -> list[PackedMatrix]:
    """Copies on a device; matrices of one shape and format are parts of one tensor."""
    shapes = {(matrix.format, matrix.codes.shape) for matrix in matrices}
    if len(shapes) != 1:
        return [_copy(matrix, matrix.codes.to(device), matrix.scales.to(device)) for matrix in matrices]
    first, count = matrices[0], len(matrices)
    codes, scales = (
        torch.empty((count, *part.shape), dtype=part.dtype, device=device) for part in (first.codes, first.scales)
    )
    for index, matrix in enumerate(matrices):
        codes[index].copy_(matrix.codes)
        scales[index].copy_(matrix.scales)
    return [_copy(matrix, codes[index], scales[index]) for index, matrix in enumerate(matrices)]


def _copy(matrix: PackedMatrix, codes: Tensor, scales: Tensor) -> PackedMatrix:
    return PackedMatrix(matrix.format, codes, scales, matrix.outputs, matrix.columns)
