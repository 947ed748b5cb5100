"""Attention over cells: `attend_kernel` for any mix of prompts and decoded tokens, `join_kernel` for its split sums.

A tile is some rows of one sequence with the query heads that share a key head, so each key is read once for all of
them. A lane is one row and head of a tile: lane = row * HEADS + head. The positions [oldest, latest] are visible to a
row: windows, chunks and bidirectional ranges are nothing else.

Keys are taken in blocks at absolute positions, and blocks are summed in splits of SPLIT positions, which are merged in
the order of positions behind the sink. So the bits of a row depend on TILE, BLOCK and SPLIT alone: neither on other
sequences, nor on the chunks of its prompt, nor on the number of programs.

    cells   int64: tables of the sequences that are no run of cells, in position order
    bounds  int32 [2, rows]: the first and the last visible position of each row
    tiles   int32 [tiles, FIELDS]: see `load_tile`
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.batch import FIELDS

_FIELDS = tl.constexpr(FIELDS)
# Integers that change from step to step: a variant for each of their special values would be compiled while serving.
_VARYING = ["rows", "splits"]


@triton.jit
def load_tile(tiles: tl.tensor) -> tl.tensor:
    """First row, rows, first row of partial sums, base, whether its cells are a run, first and last + 1 position.

    base  of a run: the cell of a position is base + position; else its index in `cells`
    """
    tile = tiles + _FIELDS * tl.program_id(0)
    return (
        tl.load(tile),
        tl.load(tile + 1),
        tl.load(tile + 2),
        tl.load(tile + 3),
        tl.load(tile + 4),
        tl.load(tile + 5),
        tl.load(tile + 6),
    )


@triton.jit
def lane_heads(count: tl.tensor, GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """By lane: whether it is used, its row in the tile, and its query head."""
    shares: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    share = tl.program_id(1)
    lane = tl.arange(0, TILE)
    head = share % shares * HEADS + lane % HEADS
    used = (lane // HEADS < count) & (head < GROUP)
    return used, tl.where(used, lane // HEADS, 0), share // shares * GROUP + tl.where(used, head, 0)


@triton.jit
def load_rows(
    pointers: tl.tensor,
    used: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
    START: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Columns [START, START + COLUMNS) of rows, zeros beyond WIDTH; a mask of columns costs registers."""
    mask = used[:, None] & (columns < WIDTH)[None, :] if START + COLUMNS > WIDTH else used[:, None]
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def part_scores(
    q: tl.tensor,
    keys: tl.tensor,
    scales: tl.tensor,
    cells: tl.tensor,
    inside: tl.tensor,
    part: tl.constexpr,
    WIDTH: tl.constexpr,
    START: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """What some columns of queries and keys add to the scores [TILE, BLOCK]."""
    columns = START + tl.arange(0, COLUMNS)
    k = tl.trans(load_rows(keys + cells[:, None] * WIDTH + columns[None, :], inside, columns, WIDTH, START, COLUMNS))
    product = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee") if EXACT else tl.dot(q, k.to(q.dtype))
    if PARTS > 0:
        # int8 codes are exact in bfloat16, so a scale multiplies a column of scores.
        product *= tl.load(scales + cells * PARTS + part, mask=inside, other=0.0)[None, :]
    return product


@triton.jit
def bend(scores: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """softcap * tanh(scores / softcap)"""
    small = tl.exp(-2.0 * tl.abs(scores) / softcap)
    bent = softcap * (1.0 - small) / (1.0 + small)
    return tl.where(scores < 0, -bent, bent)


@triton.jit
def merge(
    first_max: tl.tensor,
    first_sum: tl.tensor,
    first_total: tl.tensor,
    second_max: tl.tensor,
    second_sum: tl.tensor,
    second_total: tl.tensor,
) -> tl.tensor:
    """Maximum, sum and weighted values of two parts of a softmax; a maximum of -inf: the part is empty."""
    highest = tl.maximum(first_max, second_max)
    # -inf - -inf is NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    first, second = tl.exp(first_max - base), tl.exp(second_max - base)
    total = first_total * first[:, None] + second_total * second[:, None]
    return highest, first_sum * first + second_sum * second, total


@triton.jit
def sink_part(sinks: tl.tensor, head: tl.tensor, SINKS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Maximum and sum of a softmax with the sink of each lane only: it has a weight and no value."""
    maximum = tl.load(sinks + head).to(tl.float32) if SINKS else tl.full([TILE], float("-inf"), tl.float32)
    return maximum, tl.full([TILE], 1.0 if SINKS else 0.0, tl.float32)


@triton.jit
def attend_positions(
    q: tl.tensor,
    q_second: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    cells: tl.tensor,
    base: tl.tensor,
    is_run: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    oldest: tl.tensor,
    latest: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Maximum, sum and weighted values of the positions [start, stop) of one split."""
    maximum = tl.full([TILE], float("-inf"), tl.float32)
    weight_sum = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, VALUE_COLUMNS], tl.float32)
    value_columns = tl.arange(0, VALUE_COLUMNS)
    second_part: tl.constexpr = PARTS - 1 if PARTS > 1 else 0
    for block in range(start // BLOCK * BLOCK, stop, BLOCK):
        position = block + tl.arange(0, BLOCK)
        inside = (position >= start) & (position < stop)
        listed = tl.load(cells + base + position, mask=inside & (is_run == 0), other=0)
        cell = tl.where(is_run != 0, base + position, listed.to(tl.int32))
        if WIDE:
            # Offsets in a head of 2^31 numbers or more; they take twice the registers.
            cell = cell.to(tl.int64)
        scores = part_scores(q, keys, key_scales, cell, inside, 0, WIDTH, 0, FIRST, PARTS, EXACT)
        if SECOND > 0:
            scores += part_scores(
                q_second, keys, key_scales, cell, inside, second_part, WIDTH, FIRST, SECOND, PARTS, EXACT
            )
        scores *= scale
        if CAPPED:
            scores = bend(scores, softcap)
        visible = (position[None, :] >= oldest[:, None]) & (position[None, :] <= latest[:, None]) & inside[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1))
        # A row may see nothing of a block, and -inf - -inf is NaN.
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(scores - finite[:, None])
        factor = tl.exp(maximum - finite)
        weight_sum = weight_sum * factor + tl.sum(weights, 1)
        if VALUE_PARTS > 0:
            weights *= tl.load(value_scales + cell * VALUE_PARTS, mask=inside, other=0.0)[None, :]
        value_rows = values + cell[:, None] * VALUE_STRIDE + value_columns[None, :]
        v = load_rows(value_rows, inside, value_columns, VALUE, 0, VALUE_COLUMNS)
        if EXACT:
            mixed = tl.dot(weights, v.to(tl.float32), input_precision="ieee")
        else:
            mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype))
        total = total * factor[:, None] + mixed
        maximum = highest
    return maximum, weight_sum, total


@triton.jit(do_not_specialize=_VARYING)
def attend_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    sinks: tl.tensor,
    cells: tl.tensor,
    bounds: tl.tensor,
    tiles: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    pool_cells: tl.tensor,
    heads: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    EXACT: tl.constexpr,
    WIDE: tl.constexpr,
    JOINED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """One tile and some query heads of one key head: all of its splits (JOINED), or one for `join_kernel`.

    Grid: tiles, key heads * shares of a group, splits (1 if JOINED).

    query        [heads, rows, WIDTH]
    keys         [key heads, pool_cells, WIDTH], values alike; scales [key heads, pool_cells, PARTS] of int8
    output       [rows, heads, VALUE]
    partial      float32 [partial rows, heads, splits, VALUE], statistics [partial rows, heads, splits, 2]
    GROUP        query heads of a key head; HEADS: of them in a tile
    FIRST, SECOND  padded columns of a key that are multiplied first and second; SECOND 0: one product
    PARTS        scales of a key; 0: it has none
    EXACT        multiply in float32
    """
    first_row, count, partial_row, base, is_run, start, stop = load_tile(tiles)
    used, tile_row, head = lane_heads(count, GROUP, HEADS, TILE)
    row = first_row + tile_row
    oldest = tl.load(bounds + row, mask=used, other=0)
    latest = tl.load(bounds + rows + row, mask=used, other=-1)

    first_columns = tl.arange(0, FIRST)
    q_rows = query + (row.to(tl.int64) * query_row_stride + head.to(tl.int64) * query_head_stride)[:, None]
    q = load_rows(q_rows + first_columns[None, :], used, first_columns, WIDTH, 0, FIRST)
    q_second = q
    if SECOND > 0:
        second_columns = FIRST + tl.arange(0, SECOND)
        q_second = load_rows(q_rows + second_columns[None, :], used, second_columns, WIDTH, FIRST, SECOND)

    shares: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    head_cells = (tl.program_id(1) // shares).to(tl.int64) * pool_cells
    keys += head_cells * WIDTH
    values += head_cells * VALUE_STRIDE
    if PARTS > 0:
        key_scales += head_cells * PARTS
    if VALUE_PARTS > 0:
        value_scales += head_cells * VALUE_PARTS

    columns = tl.arange(0, VALUE_COLUMNS)
    stored = used[:, None] & (columns < VALUE)[None, :]
    first_split = start // SPLIT
    if JOINED:
        maximum, weight_sum = sink_part(sinks, head, SINKS, TILE)
        total = tl.zeros([TILE, VALUE_COLUMNS], tl.float32)
        for split in range(first_split, (stop + SPLIT - 1) // SPLIT):
            split_max, split_sum, split_total = attend_positions(
                q, q_second, keys, values, key_scales, value_scales, cells, base, is_run,
                tl.maximum(split * SPLIT, start), tl.minimum(split * SPLIT + SPLIT, stop),
                oldest, latest, scale, softcap,
                WIDTH, FIRST, SECOND, VALUE, VALUE_COLUMNS, VALUE_STRIDE, PARTS, VALUE_PARTS,
                CAPPED, EXACT, WIDE, TILE, BLOCK,
            )  # fmt: skip
            maximum, weight_sum, total = merge(maximum, weight_sum, total, split_max, split_sum, split_total)
        place = output + ((row.to(tl.int64) * heads + head) * VALUE)[:, None] + columns[None, :]
        tl.store(place, total / tl.where(used, weight_sum, 1.0)[:, None], mask=stored)
    else:
        split = first_split + tl.program_id(2)
        if split * SPLIT < stop:
            maximum, weight_sum, total = attend_positions(
                q, q_second, keys, values, key_scales, value_scales, cells, base, is_run,
                tl.maximum(split * SPLIT, start), tl.minimum(split * SPLIT + SPLIT, stop),
                oldest, latest, scale, softcap,
                WIDTH, FIRST, SECOND, VALUE, VALUE_COLUMNS, VALUE_STRIDE, PARTS, VALUE_PARTS,
                CAPPED, EXACT, WIDE, TILE, BLOCK,
            )  # fmt: skip
            part = ((partial_row + tile_row).to(tl.int64) * heads + head) * splits + tl.program_id(2)
            tl.store(partial + (part * VALUE)[:, None] + columns[None, :], total, mask=stored)
            tl.store(statistics + part * 2, maximum, mask=used)
            tl.store(statistics + part * 2 + 1, weight_sum, mask=used)


@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    sinks: tl.tensor,
    tiles: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    heads: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """One tile and some query heads: its splits in the order of positions, after the sink. Grid: as attend_kernel."""
    first_row, count, partial_row, _, _, start, stop = load_tile(tiles)
    used, tile_row, head = lane_heads(count, GROUP, HEADS, TILE)
    columns = tl.arange(0, VALUE_COLUMNS)
    stored = used[:, None] & (columns < VALUE)[None, :]
    maximum, weight_sum = sink_part(sinks, head, SINKS, TILE)
    total = tl.zeros([TILE, VALUE_COLUMNS], tl.float32)
    first_part = ((partial_row + tile_row).to(tl.int64) * heads + head) * splits
    for split in range((stop + SPLIT - 1) // SPLIT - start // SPLIT):
        part = first_part + split
        split_max = tl.load(statistics + part * 2, mask=used, other=float("-inf"))
        split_sum = tl.load(statistics + part * 2 + 1, mask=used, other=0.0)
        split_total = tl.load(partial + (part * VALUE)[:, None] + columns[None, :], mask=stored, other=0.0)
        maximum, weight_sum, total = merge(maximum, weight_sum, total, split_max, split_sum, split_total)
    place = output + (((first_row + tile_row).to(tl.int64) * heads + head) * VALUE)[:, None] + columns[None, :]
    tl.store(place, total / tl.where(used, weight_sum, 1.0)[:, None], mask=stored)
