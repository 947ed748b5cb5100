"""Rows times quantised matrices in plain torch operations: what kernels must agree with, and what runs without one.

A row is quantised too, each group of 32 numbers by its greatest: to codes in [-127, 127] that are multiplied as whole
numbers. The scales are a row's own, so that its product does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.packing import BLOCK, GROUP, PackedMatrix

# From rows to their products with some matrices, and from the matrices to that.
MultiplyRows: TypeAlias = Callable[[Tensor], list[Tensor]]
PrepareMatrices: TypeAlias = Callable[[Sequence[PackedMatrix]], MultiplyRows]


def prepare(matrices: Sequence[PackedMatrix]) -> MultiplyRows:
    """What multiplies rows [rows, columns] by each of some matrices."""
    return lambda rows: multiply(rows, matrices)


def multiply(rows: Tensor, matrices: Sequence[PackedMatrix]) -> list[Tensor]:
    """The products [rows, outputs] of rows [rows, columns] and each matrix, in the type of the rows.

    Weights are unpacked some at a time, so that they need no memory; computed in float32, of float64 rows in float64.
    """
    inner = torch.float64 if rows.dtype == torch.float64 else torch.float32
    rounded = round_rows(rows.float()).to(inner)
    return [_product(rounded, matrix).to(rows.dtype) for matrix in matrices]


def _product(rows: Tensor, matrix: PackedMatrix) -> Tensor:
    product = rows.new_empty(rows.shape[0], matrix.outputs)
    for start in range(0, matrix.codes.shape[0], matrix.blocks_at_once):
        blocks = slice(start, start + matrix.blocks_at_once)
        weights = matrix.unpack(rows.dtype, blocks)
        product[:, BLOCK * start : BLOCK * start + len(weights)] = rows @ weights.T
    return product


def round_rows(rows: Tensor) -> Tensor:
    """Rows [rows, columns] in float32 as a kernel sees them: each number that of its code and its group's scale."""
    count, columns = rows.shape
    grouped = functional.pad(rows, (0, -columns % GROUP)).view(count, -(-columns // GROUP), GROUP)
    scales = grouped.abs().amax(-1, keepdim=True) / 127
    # What is smaller is zero, and what is infinite or no number spoils its own row alone.
    inverse = torch.where(scales >= torch.finfo(torch.float32).tiny, 1 / scales, 0)
    return ((grouped * inverse).round() * scales).flatten(1)[:, :columns]
