"""Writes of new keys and values into their cells, and the transform of queries for int8 keys; one launch each.

A program has one row of one head. Targets of the rows are a run of cells from `first_cell` on, or int64 in `targets`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 1.5 * 2^23: float32 of that size have no fraction, so adding it rounds to the nearest integer, ties to even.
_ROUNDING = tl.constexpr(12582912.0)
# The smallest normal float32.
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def target_cell(targets: tl.tensor, first_cell: tl.tensor, RUN: tl.constexpr) -> tl.tensor:
    """The cell of the program's row, int64."""
    row = tl.program_id(0).to(tl.int64)
    return first_cell + row if RUN else tl.load(targets + row)


@triton.jit
def hadamard(values: tl.tensor, COLUMNS: tl.constexpr, STAGES: tl.constexpr) -> tl.tensor:
    """float32 [COLUMNS] times the orthonormal Hadamard matrix of each block of 2^STAGES columns.

    Sums and differences of pairs in the order of kvcache.kv_buffer.hadamard_transform: the bits are the same.
    """
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(values, [COLUMNS // (2 << stage), 2, 1 << stage])
        first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
        joined = tl.join(first + second, first - second)
        values = tl.reshape(tl.permute(joined, (0, 2, 1)), [COLUMNS])
    if STAGES > 0:
        root = tl.sqrt_rn(tl.full([COLUMNS], 1 << STAGES, tl.float32))
        values = tl.div_rn(values, root)
    return values


@triton.jit
def quantise_part(
    source: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    START: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Columns [START, START + PART) of a row as int8 codes and one scale; a scale of NaN if a value is not finite."""
    columns = tl.arange(0, COLUMNS)
    exists = columns < PART
    values = tl.load(source + START + columns, mask=exists, other=0.0).to(tl.float32)
    values = hadamard(values, COLUMNS, STAGES)
    largest = tl.max(tl.abs(values), 0)
    step = tl.maximum(tl.div_rn(largest, 127.0), _TINY)
    scaled = tl.div_rn(values, tl.full([COLUMNS], 1.0, tl.float32) * step)
    rounded = (scaled + _ROUNDING) - _ROUNDING
    # A maximum ignores NaN. Zero for finite values.
    broken = tl.sum(values - values, 0)
    tl.store(codes + START + columns, rounded.to(tl.int8), mask=exists)
    tl.store(scale, step + broken)


@triton.jit
def store_float_kernel(
    key_rows: tl.tensor,
    value_rows: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    targets: tl.tensor,
    first_cell: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    pool_cells: tl.tensor,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A key and a value, in the dtype of the pool. Grid: rows, key heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cell = head * pool_cells + target_cell(targets, first_cell, RUN)
    columns = tl.arange(0, COLUMNS)
    key = tl.load(key_rows + row * key_row_stride + head * key_head_stride + columns, mask=columns < WIDTH)
    tl.store(keys + cell * WIDTH + columns, key.to(keys.dtype.element_ty), mask=columns < WIDTH)
    if VALUE > 0:
        value = tl.load(value_rows + row * value_row_stride + head * value_head_stride + columns, mask=columns < VALUE)
        tl.store(values + cell * VALUE + columns, value.to(values.dtype.element_ty), mask=columns < VALUE)


@triton.jit
def store_int8_kernel(
    key_rows: tl.tensor,
    value_rows: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    targets: tl.tensor,
    first_cell: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    pool_cells: tl.tensor,
    RUN: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_COLUMNS: tl.constexpr,
    FIRST_STAGES: tl.constexpr,
    SECOND: tl.constexpr,
    SECOND_COLUMNS: tl.constexpr,
    SECOND_STAGES: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
) -> None:
    """A key after the Hadamard transform, in parts of FIRST and SECOND columns, and a value. Grid: rows, key heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cell = head * pool_cells + target_cell(targets, first_cell, RUN)
    key = key_rows + row * key_row_stride + head * key_head_stride
    parts: tl.constexpr = 2 if SECOND > 0 else 1
    cell_keys = keys + cell * (FIRST + SECOND)
    quantise_part(key, cell_keys, key_scales + cell * parts, 0, FIRST, FIRST_COLUMNS, FIRST_STAGES)
    if SECOND > 0:
        quantise_part(key, cell_keys, key_scales + cell * parts + 1, FIRST, SECOND, SECOND_COLUMNS, SECOND_STAGES)
    if VALUE > 0:
        value = value_rows + row * value_row_stride + head * value_head_stride
        quantise_part(value, values + cell * VALUE, value_scales + cell, 0, VALUE, VALUE_COLUMNS, 0)


@triton.jit
def transform_part(
    source: tl.tensor,
    target: tl.tensor,
    START: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Columns [START, START + PART) of a row, after the Hadamard transform."""
    columns = tl.arange(0, COLUMNS)
    values = tl.load(source + START + columns, mask=columns < PART, other=0.0).to(tl.float32)
    values = hadamard(values, COLUMNS, STAGES)
    tl.store(target + START + columns, values.to(target.dtype.element_ty), mask=columns < PART)


@triton.jit
def transform_kernel(
    source: tl.tensor,
    target: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    FIRST: tl.constexpr,
    FIRST_COLUMNS: tl.constexpr,
    FIRST_STAGES: tl.constexpr,
    SECOND: tl.constexpr,
    SECOND_COLUMNS: tl.constexpr,
    SECOND_STAGES: tl.constexpr,
) -> None:
    """Rows [heads, rows, FIRST + SECOND], each part after the Hadamard transform. Grid: rows, heads.

    target  [rows, heads, FIRST + SECOND], contiguous
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head_row = source + row * row_stride + head * head_stride
    place = target + (row * tl.num_programs(1) + head) * (FIRST + SECOND)
    transform_part(head_row, place, 0, FIRST, FIRST_COLUMNS, FIRST_STAGES)
    if SECOND > 0:
        transform_part(head_row, place, FIRST, SECOND, SECOND_COLUMNS, SECOND_STAGES)
