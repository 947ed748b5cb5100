"""Attention over cells in plain torch operations: the fallback everywhere, and the oracle of every faster kernel.

A sequence whose cells are one run is read through a view; another is gathered first (measured 2-8 times slower in
float32, so the pool hands out runs where it can).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.products import POSITIONS
from kvcache.forward import Segment
from kvcache.kv_buffer import LayerKV
from kvcache.spec import AttentionRange

# What is added to the scores of the last `rows` of `before + rows` positions: [heads, rows, before + rows].
ScoreBias: TypeAlias = Callable[[int, int], Tensor]


class AttentionFunction(Protocol):
    """Computes what `attend` of this file computes, in its own way."""

    def __call__(
        self,
        query: Tensor,
        keys: LayerKV,
        values: LayerKV,
        segments: Sequence[Segment],
        reach: AttentionRange,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: ScoreBias | None = None,
    ) -> Tensor:
        """The attention output of a packed batch, [rows, heads, value_width]."""
        ...


def attend(
    query: Tensor,
    keys: LayerKV,
    values: LayerKV,
    segments: Sequence[Segment],
    reach: AttentionRange,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: ScoreBias | None = None,
) -> Tensor:
    """The attention output of a packed batch, [rows, heads, value_width].

    query    [heads, rows, key_width]
    keys     of the layer, [key_heads, cells, key_width]; heads is a multiple of key_heads
    values   of the layer, [key_heads, cells, value_width]
    softcap  scores become softcap * tanh(score / softcap)
    sinks    [heads], a score each that takes part in the softmax and carries no value
    bias     is added to the scaled scores
    """
    query = keys.transform(query)
    output = query.new_empty(query.shape[1], query.shape[0], values.width)
    for segment in segments:
        k, v = (stored.read(segment.cells, query.dtype) for stored in (keys, values))
        own = query[:, segment.batch_slice]
        output[segment.batch_slice] = attend_one(
            own, k, v, segment, reach, scale=scale, softcap=softcap, sinks=sinks, bias=bias
        )
    return output


def attend_aligned(
    query: Tensor,
    keys: LayerKV,
    values: LayerKV,
    segments: Sequence[Segment],
    reach: AttentionRange,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: ScoreBias | None = None,
) -> Tensor:
    """What `attend` returns, with sums over positions that begin at a multiple of POSITIONS, wherever a segment does.

    So they run in one order however a prompt is cut into chunks, if products and softmax are row-invariant.
    """
    query = keys.transform(query)
    output = query.new_empty(query.shape[1], query.shape[0], values.width)
    for segment in segments:
        before = segment.oldest_visible % POSITIONS
        k, v = (functional.pad(one.read(segment.cells, query.dtype), (0, 0, before, 0)) for one in (keys, values))
        own = query[:, segment.batch_slice]
        q = own.reshape(k.shape[0], -1, *own.shape[1:])
        # What stands before the first position is out of reach.
        aligned = replace(segment, oldest_visible=segment.oldest_visible - before)
        rule = None if bias is None else _padded_bias(bias, before)
        result = _explicit(q, k, v, aligned, reach, scale, softcap, sinks, rule)
        output[segment.batch_slice] = result.flatten(0, 1).transpose(0, 1)
    return output


def _padded_bias(bias: ScoreBias, padding: int) -> ScoreBias:
    """A bias where some positions of padding stand before the others."""
    return lambda rows, before: functional.pad(bias(rows, before - padding), (padding, 0))


def attend_one(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    segment: Segment,
    reach: AttentionRange,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: ScoreBias | None = None,
) -> Tensor:
    """The attention output of one segment, [rows, heads, value_width], whose cells have been read.

    query   [heads, rows, key_width], the segment's own
    keys    [key_heads, positions, key_width], those of the segment's cells
    values  [key_heads, positions, value_width]
    """
    q = query.reshape(keys.shape[0], -1, *query.shape[1:])
    if softcap is None and sinks is None and bias is None:
        result = _fused(q, keys, values, segment, reach, scale)
    else:
        result = _explicit(q, keys, values, segment, reach, scale, softcap, sinks, bias)
    return result.flatten(0, 1).transpose(0, 1)


def visibility_mask(segment: Segment, reach: AttentionRange, device: torch.device) -> Tensor:
    """Which of the segment's cells each of its queries sees, [rows, positions]."""
    key = torch.arange(
        segment.oldest_visible, segment.start + segment.batch_slice.stop - segment.batch_slice.start, device=device
    )
    query = key[segment.start - segment.oldest_visible :, None]
    seen = key <= query
    for start, stop in segment.bidirectional:
        seen |= (start <= query) & (query < stop) & (start <= key) & (key < stop)
    if reach.kind == "window":
        seen &= key > query - reach.size
    elif reach.kind == "chunk":
        seen &= key // reach.size == query // reach.size
    return seen


def _fused(q: Tensor, k: Tensor, v: Tensor, segment: Segment, reach: AttentionRange, scale: float) -> Tensor:
    """[key_heads, group, rows, value_width] by torch's own kernel; q is [key_heads, group, rows, key_width]."""
    rows = q.shape[2]
    if rows == 1:
        # One query sees all that was read, so the heads of a group may pose as rows: keys are read once for them all.
        folded = functional.scaled_dot_product_attention(
            q.transpose(1, 2).transpose(0, 1), k[None], v[None], scale=scale
        )
        return folded.transpose(0, 1).transpose(1, 2)
    group = q.shape[1]
    k, v = k[:, None].expand(-1, group, -1, -1), v[:, None].expand(-1, group, -1, -1)
    if segment.start == 0 and reach.kind == "full" and not segment.bidirectional:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    mask = visibility_mask(segment, reach, q.device)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment: Segment,
    reach: AttentionRange,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: ScoreBias | None,
) -> Tensor:
    """The same with the scores in hand, for models that bend them."""
    scores = (q @ k[:, None].transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias(q.shape[2], segment.start - segment.oldest_visible).view_as(scores)
    scores = scores.masked_fill(~visibility_mask(segment, reach, q.device), -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(*q.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights @ v[:, None]
