"""Products with quantised matrices on a GPU, with the interface of engine/kernels/linear.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.formats import LAYOUTS, SUPERBLOCK
from engine.kernels.linear import MultiplyRows
from engine.kernels.packing import PackedMatrix
from engine.kernels.triton.products import multiply_kernel

# Outputs of a program, and rows of a program for few and for many rows.
_OUTPUTS, _FEW_ROWS, _MANY_ROWS = 32, 16, 64


def prepare(matrices: Sequence[PackedMatrix]) -> MultiplyRows:
    """A function that multiplies rows [rows, columns] by each matrix, in their dtype. All are on one device.

    Unlike engine/kernels/linear.py it does not quantise the rows, so texts differ between devices. A row has the same
    bits beside any others in float32; in other dtypes, few and many rows are summed in different orders.
    """
    tables = [_lookup(matrix) for matrix in matrices]
    return lambda rows: [_multiply(rows, matrix, table) for matrix, table in zip(matrices, tables, strict=True)]


def _multiply(rows: Tensor, matrix: PackedMatrix, lookup: Tensor | None) -> Tensor:
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    layout, count = LAYOUTS[matrix.format], len(rows)
    products = rows.new_empty(count, matrix.outputs)
    is_few = count <= _FEW_ROWS or rows.dtype == torch.float32
    row_tile = _FEW_ROWS if is_few else _MANY_ROWS
    scales = matrix.scales.view(torch.int8) if layout.scales == "superblock_half" else matrix.scales
    grid = (-(-matrix.outputs // _OUTPUTS), -(-count // row_tile))
    if count:
        multiply_kernel[grid](
            rows,
            matrix.codes.view(torch.int32),
            scales,
            matrix.scales.view(torch.float16),
            rows if lookup is None else lookup,
            products,
            count,
            rows.stride(0),
            matrix.outputs,
            matrix.columns,
            matrix.codes.shape[1],
            BITS=layout.bits,
            ZERO=layout.zero,
            LOOKUP=lookup is not None,
            KIND=layout.scales,
            SUPERBLOCK=SUPERBLOCK,
            ROWS=row_tile,
            OUTPUTS=_OUTPUTS,
            num_warps=4,
        )
    return products


def _lookup(matrix: PackedMatrix) -> Tensor | None:
    """The values of codes on the device of a matrix; None for formats without a table."""
    values = LAYOUTS[matrix.format].lookup
    return torch.tensor(values, dtype=torch.float32, device=matrix.codes.device) if values else None
