"""Attention over cells in plain torch operations: the fallback everywhere, and the oracle of every faster kernel.

A sequence whose cells are one run is read through a view; another is gathered first (measured 2-8 times slower in
float32, so the pool hands out runs where it can).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvcache.forward import Segment
from kvcache.spec import Reach


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    segments: Sequence[Segment],
    reach: Reach,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention output of a packed batch, [rows, heads, value_width].

    query    [heads, rows, key_width]
    keys     [key_heads, cells, key_width], the layer's whole pool; heads is a multiple of key_heads
    values   [key_heads, cells, value_width]
    softcap  scores become softcap * tanh(score / softcap)
    sinks    [heads], a score each that takes part in the softmax and carries no value
    """
    output = query.new_empty(query.shape[1], query.shape[0], values.shape[-1])
    for segment in segments:
        first = _oldest(reach, segment.start)
        k, v = read(keys, segment, first), read(values, segment, first)
        own = query[:, segment.rows]
        q = own.reshape(keys.shape[0], -1, *own.shape[1:])
        if softcap is None and sinks is None:
            result = _fused(q, k, v, segment.start - first, reach, first, scale)
        else:
            result = _explicit(q, k, v, segment.start - first, reach, first, scale, softcap, sinks)
        output[segment.rows] = result.flatten(0, 1).transpose(0, 1)
    return output


def read(stored: Tensor, segment: Segment, first: int = 0) -> Tensor:
    """What a segment's cells hold from position `first` on, [key_heads, positions, width]; a view if they are a run."""
    if isinstance(segment.cells, slice):
        return stored[:, segment.cells.start + first : segment.cells.stop]
    return stored.index_select(1, segment.cells[first:])


def visible(rows: int, before: int, reach: Reach, first: int, device: torch.device) -> Tensor:
    """Which keys each query sees, [rows, before + rows].

    The keys stand at positions first, first + 1, ...; the queries are the last `rows` of them.
    """
    key = torch.arange(first, first + before + rows, device=device)
    query = key[before:, None]
    seen = key <= query
    if reach.kind == "window":
        seen &= key > query - reach.size
    elif reach.kind == "chunk":
        seen &= key // reach.size == query // reach.size
    return seen


def _oldest(reach: Reach, position: int) -> int:
    """The first position that a query at `position` sees; later queries see none before it either."""
    if reach.kind == "window":
        return max(position - reach.size + 1, 0)
    if reach.kind == "chunk":
        return position // reach.size * reach.size
    return 0


def _fused(q: Tensor, k: Tensor, v: Tensor, before: int, reach: Reach, first: int, scale: float) -> Tensor:
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
    if before == 0 and reach.kind == "full":
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    mask = visible(rows, before, reach, first, q.device)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: int,
    reach: Reach,
    first: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same with the scores in hand, for models that bend them."""
    scores = (q @ k[:, None].transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible(q.shape[2], before, reach, first, q.device), -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(*q.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights @ v[:, None]
