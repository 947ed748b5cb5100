"""Launches of the Triton kernels: shapes, dtypes and sizes of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from engine.kernels.triton.attention import attend_kernel, join_kernel
from engine.kernels.triton.batch import BatchTables, TileSet, Tiling
from engine.kernels.triton.store import store_float_kernel, store_int8_kernel, transform_kernel
from kvcache.kv_buffer import CellIndex, FloatKVBuffer, Int8KVBuffer, LayerKV

# Sums of splits in memory, at most; beyond it one program sums all splits of a tile, with the same bits.
PARTIAL_BYTES = 128 * 2**20
# The matrix unit multiplies 16 columns at least.
MIN_COLUMNS = 16
# Threads of a warp on gfx942 and its predecessors.
_WIDE_WARP = 64


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Keys or values of a layer as stored.

    numbers  [key_heads, cells, columns], of which the first `width` are used
    scales   of int8 numbers: float32 [key_heads, cells, parts]
    """

    numbers: Tensor
    scales: Tensor | None
    width: int

    @property
    def parts(self) -> int:
        """Scales of a row; 0: none."""
        return 0 if self.scales is None else self.scales.shape[-1]


def stored_rows(layer: LayerKV) -> StoredRows | None:
    """The stored rows of a layer; None for a KV dtype without a kernel."""
    buffer, index = layer.buffer, layer.layer
    if isinstance(buffer, Int8KVBuffer):
        return StoredRows(buffer.codes[index], buffer.scales[index], buffer.width)
    if isinstance(buffer, FloatKVBuffer) and buffer.rows.dtype != torch.float64:
        return StoredRows(buffer.rows[index], None, buffer.width)
    return None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores become weights, see AttentionInput."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """Positions of a block, warps of a program, and stages of its pipelined loads."""

    block: int
    warps: int
    stages: int


def kernel_sizes(width: int, lanes: int, *, exact: bool, wide_warps: bool = False) -> KernelSizes:
    """Sizes that fit into the registers and the shared memory of sm_80 and later (99 KiB), by columns of a key.

    exact       products are computed in float32
    wide_warps  a warp has 64 threads, with 512 registers each in 4 warps and 64 KiB of shared memory (gfx942)
    """
    if wide_warps and width > 256:
        return KernelSizes(block=16, warps=4, stages=1 if exact else 2)
    if exact:
        return KernelSizes(block=32 if width <= 128 else 16, warps=4 if width <= 128 else 8, stages=1)
    is_small = lanes <= 16 and width <= 128
    return KernelSizes(block=64 if is_small else 32 if width <= 256 else 16, warps=4 if is_small else 8, stages=2)


@cache
def warp_threads(device: torch.device) -> int:
    """Threads of a warp."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def key_columns(keys: StoredRows, query_width: int, part_widths: Sequence[int]) -> tuple[int, int]:
    """Columns of a key that are multiplied first, and those after them, padded to powers of two; 0: there are none.

    part_widths  of the parts with separate scales
    """
    if keys.parts > 1:
        first = part_widths[0]
    else:
        first = power_of_two(query_width)
        # Two products need fewer columns where few exceed a power of two.
        first = first if query_width > 3 * first // 4 or first == MIN_COLUMNS else first // 2
    return first, power_of_two(query_width - first) if query_width > first else 0


def attend(
    query: Tensor,
    keys: StoredRows,
    values: StoredRows,
    columns: tuple[int, int],
    tables: BatchTables,
    scoring: Scoring,
    tiling: Tiling,
) -> Tensor:
    """The output [rows, heads, values.width] of queries [heads, rows, width]; rows of no tile are undefined."""
    output = query.new_empty(query.shape[1], query.shape[0], values.width)
    for tile_set in tables.tile_sets:
        _attend_tiles(query, keys, values, columns, tables, tile_set, scoring, tiling, output)
    return output


def _attend_tiles(
    query: Tensor,
    keys: StoredRows,
    values: StoredRows,
    columns: tuple[int, int],
    tables: BatchTables,
    tile_set: TileSet,
    scoring: Scoring,
    tiling: Tiling,
    output: Tensor,
) -> None:
    (heads, rows, width), (key_heads, cells, _) = query.shape, keys.numbers.shape
    group, is_exact = heads // key_heads, query.dtype == torch.float32
    shares = key_heads * -(-group // min(group, tile_set.lanes))
    partial_shape = (tile_set.partial_rows, heads, tile_set.splits)
    is_joined = tile_set.splits == 1 or math.prod(partial_shape) * values.width * 4 > PARTIAL_BYTES
    partial = statistics = output
    if not is_joined:
        partial = query.new_empty((*partial_shape, values.width), dtype=torch.float32)
        statistics = query.new_empty((*partial_shape, 2), dtype=torch.float32)
    has_wide_warps = warp_threads(query.device) == _WIDE_WARP
    sizes = kernel_sizes(width, tile_set.lanes, exact=is_exact, wide_warps=has_wide_warps)
    sinks = output if scoring.sinks is None else scoring.sinks
    tile_constants = {
        "GROUP": group,
        "HEADS": min(group, tile_set.lanes),
        "VALUE": values.width,
        "VALUE_COLUMNS": power_of_two(values.width),
        "SINKS": scoring.sinks is not None,
        "TILE": tile_set.lanes,
        "SPLIT": tiling.split,
        # Both kernels round the same sums alike.
        "enable_fp_fusion": False,
    }
    attend_kernel[(len(tile_set.table), shares, 1 if is_joined else tile_set.splits)](
        query,
        keys.numbers,
        values.numbers,
        output if keys.scales is None else keys.scales,
        output if values.scales is None else values.scales,
        sinks,
        tables.cells,
        tables.bounds,
        tile_set.table,
        output,
        partial,
        statistics,
        scoring.scale,
        scoring.softcap or 0.0,
        query.stride(1),
        query.stride(0),
        cells,
        heads,
        rows,
        tile_set.splits,
        WIDTH=width,
        FIRST=columns[0],
        SECOND=columns[1],
        VALUE_STRIDE=values.numbers.shape[2],
        PARTS=keys.parts,
        VALUE_PARTS=values.parts,
        CAPPED=scoring.softcap is not None,
        EXACT=is_exact,
        WIDE=cells * max(keys.numbers.shape[2], values.numbers.shape[2]) >= 2**31,
        JOINED=is_joined,
        BLOCK=tiling.block or sizes.block,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        **tile_constants,
    )
    if not is_joined:
        join_kernel[(len(tile_set.table), shares)](
            sinks, tile_set.table, output, partial, statistics, heads, tile_set.splits, **tile_constants
        )


def transform(query: Tensor, parts: Sequence[int]) -> Tensor:
    """Queries [heads, rows, width] after the Hadamard transform of each part of int8 keys."""
    heads, rows, width = query.shape
    output = query.new_empty(rows, heads, width)
    if rows:
        transform_kernel[(rows, heads)](
            query, output, query.stride(1), query.stride(0), **_hadamard_constants(parts), num_warps=1
        )
    return output.transpose(0, 1)


def store(keys: LayerKV, values: LayerKV, cells: CellIndex, key_rows: Tensor, value_rows: Tensor) -> bool:
    """kvcache.kv_buffer.store_rows in one launch; False for a KV dtype without a kernel."""
    stored_keys, stored_values = stored_rows(keys), stored_rows(values)
    if stored_keys is None or stored_values is None or key_rows.dtype == torch.float64:
        return False
    key_rows, value_rows = contiguous_columns(key_rows), contiguous_columns(value_rows)
    is_run = isinstance(cells, slice)
    places = (
        stored_keys.numbers if is_run else cells,
        cells.start if isinstance(cells, slice) else 0,
        key_rows.stride(1),
        key_rows.stride(0),
        value_rows.stride(1),
        value_rows.stride(0),
        stored_keys.numbers.shape[1],
    )
    buffers = (key_rows, value_rows, stored_keys.numbers, stored_values.numbers)
    grid, value = (key_rows.shape[1], key_rows.shape[0]), stored_values.width
    if isinstance(keys.buffer, Int8KVBuffer):
        scales = (stored_keys.scales, stored_values.scales)
        constants = _hadamard_constants(keys.buffer.parts) | {"VALUE": value, "VALUE_COLUMNS": power_of_two(value)}
        store_int8_kernel[grid](*buffers, *scales, *places, RUN=is_run, **constants, num_warps=1)
    else:
        constants = {"WIDTH": stored_keys.width, "VALUE": value, "COLUMNS": power_of_two(max(stored_keys.width, value))}
        store_float_kernel[grid](*buffers, *places, RUN=is_run, **constants, num_warps=1)
    return True


def _hadamard_constants(parts: Sequence[int]) -> dict[str, int]:
    """Widths, padded columns and stages of the first and of the second part, of 0 columns if there is none."""
    first, second = parts[0], sum(parts[1:])
    return {
        "FIRST": first,
        "FIRST_COLUMNS": power_of_two(first),
        "FIRST_STAGES": _stages(first),
        "SECOND": second,
        "SECOND_COLUMNS": power_of_two(second),
        "SECOND_STAGES": _stages(second),
    }


def _stages(width: int) -> int:
    """The stages of the largest Hadamard matrix that divides a width."""
    return (width & -width).bit_length() - 1 if width else 0


def power_of_two(columns: int) -> int:
    """The smallest power of two that the matrix unit multiplies and that has as many columns."""
    return max(1 << (columns - 1).bit_length(), MIN_COLUMNS) if columns else MIN_COLUMNS


def contiguous_columns(rows: Tensor) -> Tensor:
    """The rows, copied if their last dimension is not contiguous."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
