"""Attention over KV cells in plain torch: the fallback, and the reference for the kernels.

Contiguous cells of a sequence are read through a view, others are gathered first (measured: 2 to 8 times slower in
float32, so the pool allocates contiguous cells where it can).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.attention_input import AttentionInput, ScoreBias
from engine.kernels.products import POSITIONS
from kvcache.forward import Segment
from kvcache.spec import AttentionRange


def attend(inputs: AttentionInput) -> Tensor:
    """The attention output of a packed batch, [rows, heads, value_width]."""
    query = inputs.keys.transform(inputs.query)
    output = query.new_empty(query.shape[1], query.shape[0], inputs.values.width)
    for segment in inputs.segments:
        keys, values = (stored.read(segment.cells, query.dtype) for stored in (inputs.keys, inputs.values))
        output[segment.batch_slice] = attend_one(inputs, query[:, segment.batch_slice], keys, values, segment)
    return output


def attend_aligned(inputs: AttentionInput) -> Tensor:
    """As `attend`, with sums over positions from a multiple of POSITIONS on, also where a segment begins later.

    So the order of the sums does not depend on the chunks of the prompt, if products and softmax are row-invariant.
    """
    query = inputs.keys.transform(inputs.query)
    output = query.new_empty(query.shape[1], query.shape[0], inputs.values.width)
    for segment in inputs.segments:
        before = segment.oldest_visible % POSITIONS
        k, v = (
            functional.pad(buffer.read(segment.cells, query.dtype), (0, 0, before, 0))
            for buffer in (inputs.keys, inputs.values)
        )
        segment_query = query[:, segment.batch_slice]
        q = segment_query.reshape(k.shape[0], -1, *segment_query.shape[1:])
        # The padding before the first position is not visible.
        aligned = replace(segment, oldest_visible=segment.oldest_visible - before)
        bias = None if inputs.bias is None else _padded_bias(inputs.bias, before)
        result = _explicit(replace(inputs, bias=bias), q, k, v, aligned)
        output[segment.batch_slice] = result.flatten(0, 1).transpose(0, 1)
    return output


def _padded_bias(bias: ScoreBias, padding: int) -> ScoreBias:
    """A bias for positions with padding before them."""
    return lambda rows, before: functional.pad(bias(rows, before - padding), (padding, 0))


def attend_one(inputs: AttentionInput, query: Tensor, keys: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """The attention output of one segment, [rows, heads, value_width].

    inputs  range, scale, softcap, sinks and bias
    query   [heads, rows, key_width]
    keys    [key_heads, positions, key_width], read from the segment's cells
    values  [key_heads, positions, value_width]
    """
    q = query.reshape(keys.shape[0], -1, *query.shape[1:])
    is_plain = inputs.softcap is None and inputs.sinks is None and inputs.bias is None
    result = (_fused if is_plain else _explicit)(inputs, q, keys, values, segment)
    return result.flatten(0, 1).transpose(0, 1)


def visibility_mask(segment: Segment, attention_range: AttentionRange, device: torch.device) -> Tensor:
    """The cells of a segment that are visible to each of its queries, [rows, positions]."""
    key = torch.arange(
        segment.oldest_visible, segment.start + segment.batch_slice.stop - segment.batch_slice.start, device=device
    )
    query = key[segment.start - segment.oldest_visible :, None]
    visible = key <= query
    for start, stop in segment.bidirectional:
        visible |= (start <= query) & (query < stop) & (start <= key) & (key < stop)
    if attention_range.kind == "window":
        visible &= key > query - attention_range.size
    elif attention_range.kind == "chunk":
        visible &= key // attention_range.size == query // attention_range.size
    return visible


def _fused(inputs: AttentionInput, q: Tensor, k: Tensor, v: Tensor, segment: Segment) -> Tensor:
    """[key_heads, group, rows, value_width] by torch's kernel; q is [key_heads, group, rows, key_width]."""
    rows, scale, attention_range = q.shape[2], inputs.scale, inputs.attention_range
    if rows == 1:
        # A single query sees all positions, so the heads of a group can be rows: keys are read once for all of them.
        folded = functional.scaled_dot_product_attention(
            q.transpose(1, 2).transpose(0, 1), k[None], v[None], scale=scale
        )
        return folded.transpose(0, 1).transpose(1, 2)
    group = q.shape[1]
    k, v = k[:, None].expand(-1, group, -1, -1), v[:, None].expand(-1, group, -1, -1)
    if segment.start == 0 and attention_range.kind == "full" and not segment.bidirectional:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    mask = visibility_mask(segment, attention_range, q.device)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _explicit(inputs: AttentionInput, q: Tensor, k: Tensor, v: Tensor, segment: Segment) -> Tensor:
    """The same with explicit scores, for softcap, sinks and bias."""
    scores = (q @ k[:, None].transpose(-1, -2)) * inputs.scale
    if inputs.softcap is not None:
        scores = torch.tanh(scores / inputs.softcap) * inputs.softcap
    if inputs.bias is not None:
        scores = scores + inputs.bias(q.shape[2], segment.start - segment.oldest_visible).view_as(scores)
    scores = scores.masked_fill(~visibility_mask(segment, inputs.attention_range, q.device), -torch.inf)
    if inputs.sinks is not None:
        column = inputs.sinks.to(scores.dtype).view(*q.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    if inputs.sinks is not None:
        weights = weights[..., :-1]
    return weights @ v[:, None]


def cross_attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    """The cross-attention output of one sequence, [rows, heads, value_width].

    query   [heads, rows, key_width]
    keys    of the encoder output, [key_heads, length, key_width]; heads is a multiple of key_heads
    values  [key_heads, length, value_width]
    mask    [rows, length], true: visible; None: all. The output of a row with nothing visible is undefined
    """
    grouped = query.reshape(keys.shape[0], -1, *query.shape[1:])
    group = grouped.shape[1]
    k, v = keys[:, None].expand(-1, group, -1, -1), values[:, None].expand(-1, group, -1, -1)
    output = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return output.flatten(0, 1).transpose(0, 1)
