"""Products of rows and matrices; quantised weights are dequantised in registers; rows are not quantised.

A program multiplies ROWS rows by OUTPUTS outputs, STEP groups of 32 columns at a time, in their order. With splits,
each program sums a fixed range of columns, and `join_kernel` adds the ranges in order. So the bits of a row depend on
ROWS, STEP and the ranges alone, not on other rows.

Codes are int32 words of four codes, [blocks, groups, words, 16 outputs]: see engine/kernels/packing.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.formats import GROUP, SUPERBLOCK
from engine.kernels.packing import BLOCK

_BLOCK, _GROUP, _SUPERBLOCK = tl.constexpr(BLOCK), tl.constexpr(GROUP), tl.constexpr(SUPERBLOCK)
# Codes of a word, words of a group, and stored words of the lower four bits of its codes.
_CODES, _WORDS, _LOW_WORDS = tl.constexpr(4), tl.constexpr(8), tl.constexpr(4)
# Numbers of a tile: its matrix, its first row, and the end of its rows.
TILE_FIELDS = 3
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


@triton.jit
def step_codes(
    codes: tl.tensor,
    block: tl.tensor,
    place: tl.tensor,
    exists: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    BITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """The codes of STEP groups from `group` on, int32 [OUTPUTS, STEP * 32].

    block, place  by output, its block and its place in it
    """
    word = tl.arange(0, STEP * _WORDS)
    own_group, word = group + word // _WORDS, word % _WORDS
    mask = exists[:, None] & (own_group < groups)[None, :]
    first = codes + ((block * groups)[:, None] + own_group[None, :]) * (BITS * _BLOCK) + place[:, None]
    stored = word if BITS == 8 else word // 2
    low = tl.load(first + stored[None, :] * _BLOCK, mask=mask, other=0)
    if BITS < 8:
        low = low >> (4 * (word % 2))[None, :]
    shift = 8 * tl.arange(0, _CODES)
    unpacked = (low[:, :, None] >> shift[None, None, :]) & (0xFF if BITS == 8 else 0x0F)
    if BITS == 5 or BITS == 6:
        # A stored word holds the upper bits of several words, one after the other.
        together: tl.constexpr = 8 // (BITS - 4)
        upper = _LOW_WORDS + word // together
        high = tl.load(first + upper[None, :] * _BLOCK, mask=mask, other=0)
        high = high >> (word % together * (BITS - 4))[None, :]
        unpacked += ((high[:, :, None] >> shift[None, None, :]) & (1 if BITS == 5 else 3)) << 4
    return tl.reshape(unpacked, [OUTPUTS, STEP * _GROUP])


@triton.jit
def by_column(numbers: tl.tensor, OUTPUTS: tl.constexpr, COUNT: tl.constexpr, REPEATS: tl.constexpr) -> tl.tensor:
    """Numbers [OUTPUTS, COUNT], each repeated for its columns: [OUTPUTS, COUNT * REPEATS]."""
    repeated = tl.broadcast_to(numbers[:, :, None], [OUTPUTS, COUNT, REPEATS])
    return tl.reshape(repeated, [OUTPUTS, COUNT * REPEATS])


@triton.jit
def step_weights(
    codes: tl.tensor,
    scales: tl.tensor,
    super_scales: tl.tensor,
    lookup: tl.tensor,
    output: tl.tensor,
    exists: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    LOOKUP: tl.constexpr,
    KIND: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """The weights of STEP groups from `group` on, float32 [OUTPUTS, STEP * 32]; KIND: see ScaleKind.

    scales        in the dtype of the kind
    super_scales  the same memory as float16
    lookup        float32: values by code, for formats with LOOKUP; else a value is code - ZERO
    """
    block, place = (output // _BLOCK).to(tl.int64), output % _BLOCK
    code = step_codes(codes, block, place, exists, group, groups, BITS, OUTPUTS, STEP)
    value = tl.load(lookup + code) if LOOKUP else (code - ZERO).to(tl.float32)
    own_group = group + tl.arange(0, STEP)
    mask = exists[:, None] & (own_group < groups)[None, :]
    if KIND == "superblock_half":
        record: tl.constexpr = (2 + 2 * _SUPERBLOCK) * _BLOCK
        half = 2 * group + tl.arange(0, 2 * STEP)
        inside = exists[:, None] & (half < 2 * groups)[None, :]
        superblock = block[:, None] * ((groups + _SUPERBLOCK - 1) // _SUPERBLOCK) + half[None, :] // (2 * _SUPERBLOCK)
        first = superblock * record + place[:, None]
        block_scales = tl.load(scales + first + (2 + half % (2 * _SUPERBLOCK))[None, :] * _BLOCK, mask=inside, other=0)
        spread = tl.load(super_scales + superblock * (record // 2) + place[:, None], mask=inside, other=0.0)
        weights = value * by_column(block_scales.to(tl.float32) * spread.to(tl.float32), OUTPUTS, 2 * STEP, _GROUP // 2)
    elif KIND == "superblock_minimum":
        pair: tl.constexpr = (4 + 2 * _SUPERBLOCK) * _BLOCK
        above = block[:, None] * ((groups + _SUPERBLOCK - 1) // _SUPERBLOCK) + own_group[None, :] // _SUPERBLOCK
        scaled = scales + above * pair + place[:, None] + (4 + 2 * (own_group % _SUPERBLOCK))[None, :] * _BLOCK
        supers = super_scales + above * (pair // 2) + place[:, None]
        scale = tl.load(scaled, mask=mask, other=0).to(tl.float32)
        scale *= tl.load(supers, mask=mask, other=0.0).to(tl.float32)
        minimum = tl.load(scaled + _BLOCK, mask=mask, other=0).to(tl.float32)
        minimum *= tl.load(supers + _BLOCK, mask=mask, other=0.0).to(tl.float32)
        weights = value * by_column(scale, OUTPUTS, STEP, _GROUP) + by_column(minimum, OUTPUTS, STEP, _GROUP)
    else:
        numbers: tl.constexpr = 2 if KIND == "float16_minimum" else 1
        addresses = scales + ((block * groups)[:, None] + own_group[None, :]) * (numbers * _BLOCK) + place[:, None]
        weights = value * by_column(tl.load(addresses, mask=mask, other=0.0).to(tl.float32), OUTPUTS, STEP, _GROUP)
        if KIND == "float16_minimum":
            weights += by_column(
                tl.load(addresses + _BLOCK, mask=mask, other=0.0).to(tl.float32), OUTPUTS, STEP, _GROUP
            )
    return weights


@triton.jit(do_not_specialize=["rows"])
def multiply_kernel(
    inputs: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    super_scales: tl.tensor,
    lookup: tl.tensor,
    products: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    outputs: tl.tensor,
    columns: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    output_stride: tl.tensor,
    column_stride: tl.tensor,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    LOOKUP: tl.constexpr,
    KIND: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Products [splits, rows, outputs] of inputs [rows, columns]. Grid: tiles of outputs, tiles of rows, splits.

    tiles          int32 [tiles, TILE_FIELDS] with TILED; else all rows have one matrix
    code_stride    from a matrix to the next, in words; with BITS 0, in numbers
    scale_stride   likewise, in scales
    output_stride  of floating-point weights (BITS 0) at codes + output * output_stride + column * column_stride
    SPLIT          groups of a split
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    first, stop = tl.program_id(1) * ROWS, rows
    if TILED:
        tile = tiles + tl.program_id(1) * _TILE_FIELDS
        matrix = tl.load(tile).to(tl.int64)
        first, stop = tl.load(tile + 1), tl.load(tile + 2)
        codes += matrix * code_stride
        scales += matrix * scale_stride
        super_scales += matrix * (scale_stride // 2)
    row = first + tl.arange(0, ROWS)
    has_row, exists = row < stop, output < outputs
    groups = (columns + _GROUP - 1) // _GROUP
    begin = tl.program_id(2) * SPLIT
    # A tile without rows reads nothing.
    end = tl.where(first < stop, tl.minimum(begin + SPLIT, groups), begin)
    x_rows = inputs + row.to(tl.int64)[:, None] * row_stride
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for group in range(begin, end, STEP):
        column = group * _GROUP + tl.arange(0, STEP * _GROUP)
        x = tl.load(x_rows + column[None, :], mask=has_row[:, None] & (column < columns)[None, :], other=0.0)
        if BITS == 0:
            addresses = (
                codes + output.to(tl.int64)[:, None] * output_stride + column.to(tl.int64)[None, :] * column_stride
            )
            weights = tl.load(addresses, mask=exists[:, None] & (column < columns)[None, :], other=0.0)
        else:
            weights = step_weights(
                codes, scales, super_scales, lookup, output, exists, group, groups,
                BITS, ZERO, LOOKUP, KIND, OUTPUTS, STEP,
            )  # fmt: skip
        if inputs.dtype.element_ty == tl.float32:
            total += tl.dot(x, tl.trans(weights.to(tl.float32)), input_precision="ieee")
        else:
            total += tl.dot(x, tl.trans(weights.to(x.dtype)))
    target = (tl.program_id(2) * rows + row).to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(products + target, total, mask=has_row[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["count"])
def join_kernel(
    partial: tl.tensor, products: tl.tensor, count: tl.tensor, SPLITS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """The sums [count] of numbers [SPLITS, count], in the order of splits. Grid: blocks of numbers."""
    indices = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        total += tl.load(partial + split * count.to(tl.int64) + indices, mask=indices < count, other=0.0)
    tl.store(products + indices, total, mask=indices < count)


@triton.jit(do_not_specialize=["count"])
def embed_kernel(
    tokens: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    super_scales: tl.tensor,
    lookup: tl.tensor,
    embeddings: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    LOOKUP: tl.constexpr,
    KIND: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """The weights [count, columns] of the outputs `tokens`. Grid: tiles of tokens, steps of groups."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = row < count
    token = tl.load(tokens + row, mask=exists, other=0)
    group, groups = tl.program_id(1) * STEP, (columns + _GROUP - 1) // _GROUP
    weights = step_weights(
        codes, scales, super_scales, lookup, token, exists, group, groups, BITS, ZERO, LOOKUP, KIND, TOKENS, STEP
    )
    column = group * _GROUP + tl.arange(0, STEP * _GROUP)
    target = embeddings + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, weights, mask=exists[:, None] & (column < columns)[None, :])


@triton.jit
def sum_kernel(
    numbers: tl.tensor, sums: tl.tensor, row_stride: tl.tensor, columns: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """The sum of each row of [rows, columns], block by block. Grid: rows."""
    row = numbers + tl.program_id(0).to(tl.int64) * row_stride
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(row + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
