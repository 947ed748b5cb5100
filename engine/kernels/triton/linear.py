"""Products with quantised matrices on a GPU: see engine/kernels/device_products.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels.device_products import DeviceProducts, MultiplyByExpert, ReadOutputs, TorchProducts
from engine.kernels.formats import GROUP, LAYOUTS, FormatLayout, WeightFormat
from engine.kernels.linear import MultiplyRows, multiply_unrounded
from engine.kernels.packing import PackedMatrix
from engine.kernels.triton.agreement import disagreement
from engine.kernels.triton.products import embed_kernel, join_kernel, multiply_kernel

log = logging.getLogger("cellar.engine")

# Rows of the check, and errors relative to the largest product: sums of float32, and weights rounded to bfloat16.
_CHECKED_ROWS, _EXACT_ERROR, _ROUNDED_ERROR = 3, 1e-4, 2e-2
# Programs of a product with few rows: fewer leave a GPU idle, so that the columns of a matrix are split.
_PROGRAMS = 1024
# Groups of a split, at least, and splits at most.
_SPLIT_GROUPS, _MAX_SPLITS = 16, 8
# Numbers that a program of `join_kernel` adds up, and tokens of a program of `embed_kernel`.
_JOINED, _TOKENS = 1024, 4
# Rows of an expert, on average, from which on tiles have many rows.
_MANY_ROWS_OF_EXPERT = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and outputs of a program, the groups that it multiplies at once, and its warps."""

    rows: int
    outputs: int
    step: int
    warps: int


# For tokens that are decoded, and for prompts.
FEW_ROWS = Tile(rows=16, outputs=16, step=4, warps=2)
MANY_ROWS = Tile(rows=64, outputs=64, step=1, warps=4)
# For both: in bfloat16 and float16, and in float32, in which products of larger tiles exceed the registers.
_ONE_TILE, _FLOAT32_TILE = Tile(rows=64, outputs=32, step=2, warps=4), Tile(rows=16, outputs=32, step=1, warps=4)


def one_tile(dtype: torch.dtype) -> Tile:
    """The tile for any number of rows of a dtype."""
    return _FLOAT32_TILE if dtype == torch.float32 else _ONE_TILE


@dataclass(frozen=True, slots=True)
class Weights:
    """Matrices [outputs, columns] of one format, as the kernel reads them; strides are from a matrix to the next.

    layout          None: floating-point numbers at output_stride and column_stride
    codes           int32 words, or numbers
    scales          in their dtype, and the same memory as float16; without a meaning for numbers
    lookup          values by code, for formats with a table
    """

    layout: FormatLayout | None
    outputs: int
    columns: int
    codes: Tensor
    scales: Tensor
    super_scales: Tensor
    lookup: Tensor
    code_stride: int = 0
    scale_stride: int = 0
    output_stride: int = 0
    column_stride: int = 0

    @property
    def groups(self) -> int:
        """Groups of columns."""
        return -(-self.columns // GROUP)

    @property
    def constants(self) -> dict[str, object]:
        """The constants of the kernels for the format."""
        if self.layout is None:
            return {"BITS": 0, "ZERO": 0, "LOOKUP": False, "KIND": ""}
        layout = self.layout
        return {"BITS": layout.bits, "ZERO": layout.zero, "LOOKUP": bool(layout.lookup), "KIND": layout.scales}


def packed_weights(matrix: PackedMatrix) -> Weights:
    """The weights of a matrix on its device."""
    layout = LAYOUTS[matrix.format]
    codes, halves = matrix.codes.view(torch.int32), matrix.scales.view(torch.float16)
    values = torch.tensor(layout.lookup or (0,), dtype=torch.float32, device=codes.device)
    scales = matrix.scales.view(torch.int8) if layout.scales == "superblock_half" else matrix.scales
    return Weights(layout, matrix.outputs, matrix.columns, codes, scales, halves, values)


def stacked_weights(matrices: Sequence[PackedMatrix]) -> Weights | None:
    """The weights of matrices of one `upload`; None for others."""
    first_weights = packed_weights(matrices[0])
    code_starts, scale_starts = (
        [getattr(matrix, name).data_ptr() for matrix in matrices] for name in ("codes", "scales")
    )
    code_strides, scale_strides = (
        {after - before for before, after in zip(starts, starts[1:], strict=False)}
        for starts in (code_starts, scale_starts)
    )
    alike = {(matrix.format, matrix.outputs, matrix.columns) for matrix in matrices}
    if len(alike) != 1 or len(code_strides) > 1 or len(scale_strides) > 1:
        return None
    code_stride, scale_stride = (next(iter(strides), 0) for strides in (code_strides, scale_strides))
    return replace(
        first_weights,
        code_stride=code_stride // first_weights.codes.itemsize,
        scale_stride=scale_stride // first_weights.scales.itemsize,
    )


def split_groups(weights: Weights, tile: Tile) -> int:
    """Groups of a split, by the shape of the matrix alone."""
    programs, groups = -(-weights.outputs // tile.outputs), weights.groups
    splits = min(_PROGRAMS // programs, groups // _SPLIT_GROUPS, _MAX_SPLITS)
    groups_per_split = -(-groups // max(splits, 1))
    return -(-groups_per_split // tile.step) * tile.step


def multiply(
    rows: Tensor, weights: Weights, tile: Tile, *, tiles: Tensor | None = None, is_split: bool = True
) -> Tensor:
    """The products [rows, outputs] of rows [rows, columns], in their dtype.

    tiles     int32 [tiles, 3], of `tile.rows` rows at most: matrix, first row, end of rows; others have products of 0
    is_split  whether few programs share the columns of a matrix
    """
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    count, outputs = len(rows), weights.outputs
    make = rows.new_empty if tiles is None else rows.new_zeros
    products = make(count, outputs)
    if not count:
        return products
    split = split_groups(weights, tile) if is_split and tiles is None else -(-weights.groups // tile.step) * tile.step
    splits = -(-weights.groups // split)
    target = products if splits == 1 else products.new_empty(splits, count, outputs, dtype=torch.float32)
    row_tiles = -(-count // tile.rows) if tiles is None else len(tiles)
    multiply_kernel[(-(-outputs // tile.outputs), row_tiles, splits)](
        rows,
        weights.codes,
        weights.scales,
        weights.super_scales,
        weights.lookup,
        target,
        rows if tiles is None else tiles,
        count,
        rows.stride(0),
        outputs,
        weights.columns,
        weights.code_stride,
        weights.scale_stride,
        weights.output_stride,
        weights.column_stride,
        **weights.constants,
        TILED=tiles is not None,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        STEP=tile.step,
        SPLIT=split,
        num_warps=tile.warps,
    )
    if splits > 1:
        total = count * outputs
        join_kernel[(-(-total // _JOINED),)](target, products, total, SPLITS=splits, BLOCK=_JOINED)
    return products


def expert_tiles(experts: Tensor, count: int, rows: int) -> Tensor:
    """Tiles of up to `rows` rows for rows with experts [rows], ascending; see `multiply`.

    Their number depends on shapes alone, so that nothing is waited for: some tiles are empty. Rows with an expert of
    `count` or more have no tile.
    """
    pairs, device = len(experts), experts.device
    starts = torch.searchsorted(experts, torch.arange(count + 1, device=device))
    tile_counts = (starts.diff() + rows - 1) // rows
    ends = tile_counts.cumsum(0)
    number = torch.arange(pairs // rows + min(count, pairs), device=device)
    expert = torch.searchsorted(ends, number, right=True).clamp_max(count - 1)
    first = starts[expert] + (number - (ends - tile_counts)[expert]) * rows
    return torch.stack((expert, first, torch.minimum(first + rows, starts[expert + 1])), 1).int()


class TritonProducts(DeviceProducts):
    """The kernels of this package, for activations of one dtype. Formats with a failing check are multiplied by torch.

    A row has the same bits with any other rows in float32, and with `one_tile`; else few and many rows are summed in
    different orders in bfloat16 and float16.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, one_tile: bool = False) -> None:
        super().__init__(device)
        self._dtype, self._one_tile = dtype, one_tile
        self._torch = TorchProducts(device)
        self._failures: dict[WeightFormat, str | None] = {}

    def __call__(self, matrices: Sequence[PackedMatrix]) -> MultiplyRows:
        """See DeviceProducts."""
        if not all(map(self._is_usable, matrices)):
            return self._torch(matrices)
        prepared = [packed_weights(matrix) for matrix in matrices]

        def multiply_rows(rows: Tensor) -> list[Tensor]:
            if rows.dtype == torch.float64:
                return multiply_unrounded(rows, matrices)
            tile = self._tile(rows, is_few=len(rows) <= FEW_ROWS.rows)
            return [multiply(rows, weights, tile) for weights in prepared]

        return multiply_rows

    def experts(self, matrices: Sequence[PackedMatrix]) -> MultiplyByExpert | None:
        """See DeviceProducts."""
        weights = stacked_weights(matrices)
        if weights is None or not self._is_usable(matrices[0]):
            return None
        count = len(matrices)

        def multiply_by_expert(rows: Tensor, experts: Tensor) -> Tensor:
            tile = self._tile(rows, is_few=len(rows) < _MANY_ROWS_OF_EXPERT * count)
            return multiply(rows, weights, tile, tiles=expert_tiles(experts, count, tile.rows))

        return multiply_by_expert

    def outputs(self, matrix: PackedMatrix) -> ReadOutputs:
        """See DeviceProducts."""
        if not self._is_usable(matrix):
            return self._torch.outputs(matrix)
        weights = packed_weights(matrix)
        return lambda outputs: embed(outputs, weights)

    def _tile(self, rows: Tensor, *, is_few: bool) -> Tile:
        if self._one_tile or rows.dtype == torch.float32:
            return one_tile(rows.dtype)
        return FEW_ROWS if is_few else MANY_ROWS

    def _is_usable(self, matrix: PackedMatrix) -> bool:
        """Whether the kernel of a format agrees with torch; a failure is logged once."""
        if matrix.format not in self._failures:
            reason = self._failures[matrix.format] = products_failure(matrix, self._dtype)
            if reason is not None:
                log.warning("%s weights are multiplied by torch, which is slow: %s", matrix.format, reason)
        return self._failures[matrix.format] is None


def products_failure(matrix: PackedMatrix, dtype: torch.dtype) -> str | None:
    """Why a matrix cannot be multiplied by rows of a dtype; None: the products agree with those of torch."""
    dtype = torch.float32 if dtype == torch.float64 else dtype
    limit = _EXACT_ERROR if dtype == torch.float32 else _ROUNDED_ERROR
    return disagreement(lambda: _largest_error(matrix, dtype), limit)


def _largest_error(matrix: PackedMatrix, dtype: torch.dtype) -> float:
    """Of some outputs, relative to the largest product."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_CHECKED_ROWS, matrix.columns, generator=generator).to(matrix.codes.device, dtype)
    tile = one_tile(dtype) if dtype == torch.float32 else FEW_ROWS
    actual = multiply(rows, packed_weights(matrix), tile).float()
    expected = rows.float() @ matrix.unpack(torch.float32, slice(0, 2)).T
    return float((actual[:, : expected.shape[1]] - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def embed(tokens: Tensor, weights: Weights) -> Tensor:
    """The weights of outputs [tokens], float32 [tokens, columns]."""
    embeddings = torch.empty(len(tokens), weights.columns, dtype=torch.float32, device=tokens.device)
    if len(tokens):
        embed_kernel[(-(-len(tokens) // _TOKENS), -(-weights.groups // FEW_ROWS.step))](
            tokens,
            weights.codes,
            weights.scales,
            weights.super_scales,
            weights.lookup,
            embeddings,
            len(tokens),
            weights.columns,
            **weights.constants,
            TOKENS=_TOKENS,
            STEP=FEW_ROWS.step,
        )
    return embeddings
