"""Quantisation of floating-point weights to `int8` and `int4`: a bfloat16 scale for every 32 columns of an output.

A weight has 8.5 or 4.5 bits. bfloat16 scales have the range of float32 and convert by a shift.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.formats import GROUP, LAYOUTS, WeightFormat
from engine.kernels.packing import BLOCK, PackedMatrix, PackedStorage
from engine.kernels.row_major import RowMajorWeights, split_dim

Bits = Literal[8, 4]

FORMATS: dict[Bits, WeightFormat] = {8: "int8", 4: "int4"}
# Codes that the largest weight of a 4-bit group may get; the one with the smallest squared error is used.
_LARGEST_CODES = (-8.0, -7.5, -7.0, -6.5, 6.5, 7.0)


def pack_floats(weight: Tensor, bits: Bits, storage: PackedStorage | None = None) -> PackedMatrix:
    """Quantise a matrix [outputs, columns] of any floating dtype. Raises ValueError for infinite weights and NaN.

    storage  memory for the result; None: its own
    """
    shape = (*weight.shape, FORMATS[bits])
    packed = (storage or PackedStorage([shape])).allocate(*shape)
    outputs_at_once = BLOCK * packed.blocks_at_once
    for first in range(0, packed.outputs, outputs_at_once):
        packed.write(first, _round(weight[first : first + outputs_at_once].float(), bits))
    return packed


def _round(rows: Tensor, bits: Bits) -> RowMajorWeights:
    if not rows.isfinite().all():
        raise ValueError("a weight is infinite or no number")
    grouped = split_dim(functional.pad(rows, (0, -rows.shape[1] % GROUP)), 1, (-1, GROUP))
    scales = _scales8(grouped) if bits == 8 else _scales4(grouped)
    codes = _codes(grouped, scales.float(), bits).add_(LAYOUTS[FORMATS[bits]].zero).to(torch.uint8)
    return RowMajorWeights(FORMATS[bits], codes.flatten(1)[:, : rows.shape[1]], scales)


def _codes(grouped: Tensor, scales: Tensor, bits: Bits) -> Tensor:
    """The nearest codes, relative to the zero; float32 scales."""
    # Groups with a zero or denormal scale are zero: its inverse could be infinite.
    inverse = torch.where(scales.abs() >= torch.finfo(torch.float32).tiny, 1 / scales, 0)
    smallest, largest = (-127, 127) if bits == 8 else (-8, 7)
    return (grouped * inverse[..., None]).round_().clamp_(smallest, largest)


def _scales8(grouped: Tensor) -> Tensor:
    """Scales for which the largest weight of a group has a code of at most 127."""
    exact = grouped.abs().amax(-1) / 127
    # Rounded up to bfloat16, the upper half of float32: add a bit less than its unit and drop the lower half.
    return ((exact.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).bfloat16()


def _scales4(grouped: Tensor) -> Tensor:
    """The scales for one of _LARGEST_CODES with the smallest squared error; negative for a negative code."""
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
    best = torch.zeros_like(largest)
    smallest_error = grouped.square().sum(-1)
    for code in _LARGEST_CODES:
        scales = (largest / code).bfloat16().float()
        error = (_codes(grouped, scales, 4) * scales[..., None] - grouped).square_().sum(-1)
        better = error < smallest_error
        best, smallest_error = torch.where(better, scales, best), torch.where(better, error, smallest_error)
    return best.bfloat16()
