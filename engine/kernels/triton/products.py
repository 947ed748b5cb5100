"""Products of rows and quantised matrices, whose weights are dequantised in registers; rows are not quantised.

A program multiplies ROWS rows by OUTPUTS outputs, group by group of 32 columns in their order. So the bits of a row
depend on ROWS alone, not on other rows.

Codes are int32 words of four codes, [blocks, groups, words, 16 outputs]: see engine/kernels/packing.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.formats import GROUP
from engine.kernels.packing import BLOCK

_BLOCK, _GROUP = tl.constexpr(BLOCK), tl.constexpr(GROUP)
# Codes of a word, words of a group, and stored words of the lower four bits of its codes.
_CODES, _WORDS, _LOW_WORDS = tl.constexpr(4), tl.constexpr(8), tl.constexpr(4)


@triton.jit
def group_codes(
    codes: tl.tensor, place: tl.tensor, exists: tl.tensor, BITS: tl.constexpr, OUTPUTS: tl.constexpr
) -> tl.tensor:
    """The codes of a group, int32 [OUTPUTS, 32].

    place  by output, the index of its first word of the group
    """
    word = tl.arange(0, _WORDS)
    shift = 8 * tl.arange(0, _CODES)
    stored = word if BITS == 8 else word // 2
    low = tl.load(codes + place[:, None] + stored[None, :] * _BLOCK, mask=exists[:, None], other=0)
    if BITS < 8:
        low = low >> (4 * (word % 2))[None, :]
    own = (low[:, :, None] >> shift[None, None, :]) & (0xFF if BITS == 8 else 0x0F)
    if BITS == 5 or BITS == 6:
        # A stored word holds the upper bits of several words, one behind the other.
        together: tl.constexpr = 8 // (BITS - 4)
        upper = _LOW_WORDS + word // together
        high = tl.load(codes + place[:, None] + upper[None, :] * _BLOCK, mask=exists[:, None], other=0)
        high = high >> (word % together * (BITS - 4))[None, :]
        own += ((high[:, :, None] >> shift[None, None, :]) & (1 if BITS == 5 else 3)) << 4
    return tl.reshape(own, [OUTPUTS, _GROUP])


@triton.jit
def group_scales(
    scales: tl.tensor,
    super_scales: tl.tensor,
    block: tl.tensor,
    place: tl.tensor,
    exists: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    KIND: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> tl.tensor:
    """The scales and minimums of a group, float32 [OUTPUTS, 32]; KIND: see ScaleKind.

    scales        in the dtype of the kind
    super_scales  the same memory as float16
    block, place  by output, its block and its place in it
    """
    column = tl.arange(0, _GROUP)
    minimum = tl.zeros([OUTPUTS], tl.float32)
    if KIND == "superblock_minimum" or KIND == "superblock_half":
        supers: tl.constexpr = 2 if KIND == "superblock_minimum" else 1
        record: tl.constexpr = (2 * supers + 2 * SUPERBLOCK) * _BLOCK
        first = (block * ((groups + SUPERBLOCK - 1) // SUPERBLOCK) + group // SUPERBLOCK) * record
        own = scales + first + 2 * supers * _BLOCK + place
        in_superblock = group % SUPERBLOCK
        spread = tl.load(super_scales + first // 2 + place, mask=exists, other=0.0).to(tl.float32)
        if KIND == "superblock_half":
            half = 2 * in_superblock + column // (_GROUP // 2)
            halves = tl.load(own[:, None] + half[None, :] * _BLOCK, mask=exists[:, None], other=0).to(tl.float32)
            scale = halves * spread[:, None]
        else:
            lowest = tl.load(super_scales + first // 2 + _BLOCK + place, mask=exists, other=0.0).to(tl.float32)
            scaled = tl.load(own + 2 * in_superblock * _BLOCK, mask=exists, other=0).to(tl.float32)
            minimum = tl.load(own + (2 * in_superblock + 1) * _BLOCK, mask=exists, other=0).to(tl.float32) * lowest
            scale = tl.broadcast_to((scaled * spread)[:, None], [OUTPUTS, _GROUP])
    else:
        numbers: tl.constexpr = 2 if KIND == "float16_minimum" else 1
        own = scales + (block * groups + group) * (numbers * _BLOCK) + place
        if KIND == "float16_minimum":
            minimum = tl.load(own + _BLOCK, mask=exists, other=0.0).to(tl.float32)
        scale = tl.broadcast_to(tl.load(own, mask=exists, other=0.0).to(tl.float32)[:, None], [OUTPUTS, _GROUP])
    return scale, tl.broadcast_to(minimum[:, None], [OUTPUTS, _GROUP])


@triton.jit(do_not_specialize=["rows"])
def multiply_kernel(
    inputs: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    super_scales: tl.tensor,
    lookup: tl.tensor,
    products: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    outputs: tl.tensor,
    columns: tl.tensor,
    groups: tl.tensor,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    LOOKUP: tl.constexpr,
    KIND: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """Products [rows, outputs] of inputs [rows, columns]. Grid: tiles of outputs, tiles of rows.

    lookup  float32: values by code, for formats with LOOKUP; else a value is code - ZERO
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    has_row, exists = row < rows, output < outputs
    block, place = (output // _BLOCK).to(tl.int64), output % _BLOCK
    words: tl.constexpr = BITS
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for group in range(groups):
        column = group * _GROUP + tl.arange(0, _GROUP)
        used = has_row[:, None] & (column < columns)[None, :]
        x = tl.load(inputs + row.to(tl.int64)[:, None] * row_stride + column[None, :], mask=used, other=0.0)
        code = group_codes(codes, (block * groups + group) * (words * _BLOCK) + place, exists, BITS, OUTPUTS)
        value = tl.load(lookup + code) if LOOKUP else (code - ZERO).to(tl.float32)
        scale, minimum = group_scales(
            scales, super_scales, block, place, exists, group, groups, KIND, SUPERBLOCK, OUTPUTS
        )
        weights = tl.trans(value * scale + minimum)
        if inputs.dtype.element_ty == tl.float32:
            total += tl.dot(x, weights, input_precision="ieee")
        else:
            total += tl.dot(x, weights.to(x.dtype))
    target = products + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(target, total, mask=has_row[:, None] & exists[None, :])
