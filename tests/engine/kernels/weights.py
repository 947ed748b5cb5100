"""Random quantised weights of every format."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.formats import GROUP, LAYOUTS, SUPERBLOCK, ScaleKind, WeightFormat
from engine.kernels.packing import PackedMatrix, pack
from engine.kernels.row_major import RowMajorWeights


def random_rows(
    format: WeightFormat, outputs: int, columns: int, seed: int = 0, *, size: float = 1.0
) -> RowMajorWeights:
    """Random codes, and scales of both signs for weights of about this size."""
    generator = torch.Generator().manual_seed(seed)
    layout = LAYOUTS[format]
    codes = torch.randint(0, 2**layout.bits, (outputs, columns), generator=generator, dtype=torch.uint8)
    groups, superblocks = -(-columns // layout.scale_columns), -(-columns // (GROUP * SUPERBLOCK))
    unit = 2.0 * size / max(map(abs, layout.lookup), default=2**layout.bits)
    minimums = super_scales = super_minimums = None
    if layout.has_superblocks:
        super_scales = _numbers(outputs, superblocks, unit / 32, generator).half()
        scales = _integers(outputs, groups, layout.scales, generator)
        if layout.has_minimums:
            super_minimums = _numbers(outputs, superblocks, size / 32, generator).half()
            minimums = _integers(outputs, groups, layout.scales, generator)
    else:
        dtype = torch.bfloat16 if layout.scales == "bfloat16" else torch.float16
        scales = _numbers(outputs, groups, unit, generator).to(dtype)
        minimums = _numbers(outputs, groups, size, generator).to(dtype) if layout.has_minimums else None
    return RowMajorWeights(format, codes, scales, minimums, super_scales, super_minimums)


def random_matrix(
    format: WeightFormat, outputs: int, columns: int, seed: int = 0, *, size: float = 1.0
) -> PackedMatrix:
    """The packed matrix of `random_rows`."""
    return pack(random_rows(format, outputs, columns, seed, size=size))


def _numbers(outputs: int, count: int, size: float, generator: torch.Generator) -> Tensor:
    return size * torch.randn(outputs, count, generator=generator)


def _integers(outputs: int, count: int, kind: ScaleKind, generator: torch.Generator) -> Tensor:
    if kind == "superblock_half":
        return torch.randint(-128, 128, (outputs, count), generator=generator, dtype=torch.int8)
    return torch.randint(0, 64, (outputs, count), generator=generator, dtype=torch.uint8)
