"""Quantised weights by rows: the form between quantisers or files and the memory layout of the kernels (packing.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.formats import GROUP, LAYOUTS, SUPERBLOCK, ScaleKind, WeightFormat

_SCALE_DTYPES: dict[ScaleKind, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float16_minimum": torch.float16,
    "superblock_minimum": torch.uint8,
    "superblock_half": torch.int8,
}


@dataclass(frozen=True, slots=True)
class RowMajorWeights:
    """Quantised weights [outputs, columns] of any format.

    A weight is scale * value(code) + minimum; with superblocks, super_scale * scale * value(code) + super_minimum *
    minimum. A K-quant's `dmin` is subtracted: its super-minimum is -dmin. Scales cover 32 columns (16 with
    `superblock_half`), super-scales 256; the last ones of a row may cover fewer.

    codes           uint8 [outputs, columns]
    scales          [outputs, scales]: bfloat16 or float16; uint8 or int8 with super-scales
    minimums        as scales, for formats with minimums
    super_scales    float16 [outputs, superblocks], for formats with superblocks
    super_minimums  as super_scales, for formats with superblocks and minimums
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a tensor that is missing, or has another shape or dtype."""
        layout, columns = LAYOUTS[self.format], self.codes.shape[1]
        dtype = _SCALE_DTYPES[layout.scales]
        scales, superblocks = -(-columns // layout.scale_columns), -(-columns // (GROUP * SUPERBLOCK))
        has_super_minimums = layout.has_superblocks and layout.has_minimums
        self._check("codes", self.codes, torch.uint8, columns)
        self._check("scales", self.scales, dtype, scales)
        self._check("minimums", self.minimums, dtype if layout.has_minimums else None, scales)
        self._check("super_scales", self.super_scales, torch.float16 if layout.has_superblocks else None, superblocks)
        self._check("super_minimums", self.super_minimums, torch.float16 if has_super_minimums else None, superblocks)

    def _check(self, name: str, tensor: Tensor | None, dtype: torch.dtype | None, count: int) -> None:
        actual = None if tensor is None else (tensor.dtype, *tensor.shape)
        expected = None if dtype is None else (dtype, self.codes.shape[0], count)
        if actual != expected:
            raise ValueError(f"{self.format} weights with {name} {actual}, expected {expected}")

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The weights [outputs, columns], computed in float32, for float64 in float64.

        In float32 only adding a minimum rounds.
        """
        layout, columns = LAYOUTS[self.format], self.codes.shape[1]
        inner = torch.float64 if dtype == torch.float64 else torch.float32
        codes = functional.pad(self.codes, (0, -columns % layout.scale_columns))
        values = split_dim(layout.values(codes, inner), 1, (-1, layout.scale_columns))
        values *= _scaled(self.scales, self.super_scales, inner, layout.scale_columns)[..., None]
        if self.minimums is not None:
            values += _scaled(self.minimums, self.super_minimums, inner, layout.scale_columns)[..., None]
        return values.flatten(1)[:, :columns].to(dtype)


def _scaled(scales: Tensor, super_scales: Tensor | None, dtype: torch.dtype, columns: int) -> Tensor:
    """Scales or minimums of `columns` columns each, multiplied by those of their superblocks."""
    scales = scales.to(dtype)
    if super_scales is None:
        return scales
    spread = super_scales.to(dtype).repeat_interleave(GROUP * SUPERBLOCK // columns, 1)
    return scales.mul_(spread[:, : scales.shape[1]])


def split_dim(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """A dimension as several ones (torch's method has no types)."""
    split: Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return split
