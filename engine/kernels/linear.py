"""Products of rows and quantised matrices in plain torch: the reference for the kernels, and the fallback without them.

Rows are quantised too: to codes in [-127, 127] with a scale for each group of 32 numbers, from the largest of the
group. A row is quantised alone, so its products do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.formats import GROUP
from engine.kernels.packing import BLOCK, PackedMatrix

# From rows to their products with some matrices; and from matrices to such a function.
MultiplyRows: TypeAlias = Callable[[Tensor], list[Tensor]]
PrepareMatrices: TypeAlias = Callable[[Sequence[PackedMatrix]], MultiplyRows]


def prepare(matrices: Sequence[PackedMatrix]) -> MultiplyRows:
    """A function that multiplies rows [rows, columns] by each matrix."""
    return lambda rows: multiply(rows, matrices)


def multiply(rows: Tensor, matrices: Sequence[PackedMatrix]) -> list[Tensor]:
    """The products [rows, outputs] of rows [rows, columns] and each matrix, in the dtype of the rows.

    Computed in float32, for float64 rows in float64. Weights are unpacked in blocks, to need little memory.
    """
    rounded = round_rows(rows.float()).to(_inner_dtype(rows))
    return [_product(rounded, matrix).to(rows.dtype) for matrix in matrices]


def multiply_unrounded(rows: Tensor, matrices: Sequence[PackedMatrix]) -> list[Tensor]:
    """As `multiply`, of rows that are not quantised."""
    wide = rows.to(_inner_dtype(rows))
    return [_product(wide, matrix).to(rows.dtype) for matrix in matrices]


def _inner_dtype(rows: Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _product(rows: Tensor, matrix: PackedMatrix) -> Tensor:
    product = rows.new_empty(rows.shape[0], matrix.outputs)
    for start in range(0, matrix.codes.shape[0], matrix.blocks_at_once):
        blocks = slice(start, start + matrix.blocks_at_once)
        weights = matrix.unpack(rows.dtype, blocks)
        product[:, BLOCK * start : BLOCK * start + len(weights)] = rows @ weights.T
    return product


def round_rows(rows: Tensor) -> Tensor:
    """float32 rows [rows, columns], quantised and dequantised as in the kernels."""
    count, columns = rows.shape
    grouped = functional.pad(rows, (0, -columns % GROUP)).view(count, -(-columns // GROUP), GROUP)
    scales = grouped.abs().amax(-1, keepdim=True) / 127
    # Groups with a denormal scale are zero; infinity and NaN affect their own row only.
    inverse = torch.where(scales >= torch.finfo(torch.float32).tiny, 1 / scales, 0)
    return ((grouped * inverse).round() * scales).flatten(1)[:, :columns]
