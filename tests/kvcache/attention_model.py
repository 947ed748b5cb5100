"""A tiny model in which every output depends on all cells that its layers attend to.

A layer stores one number for each token; its output is a sum over the visible tokens, weighted by distance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcache.cache import Cache
from kvcache.forward import Segment
from kvcache.spec import AttentionRange, LayerSpec, Span
from tests.kvcache.reference import oldest


def layer(reach: AttentionRange) -> LayerSpec:
    """A layer of the model: a value of one column."""
    return LayerSpec(1, 0, 1, reach)


def run(
    cache: Cache, reaches: Sequence[AttentionRange], slot: int, tokens: Sequence[int], *, keep: int | None = None
) -> Tensor:
    """Compute tokens behind a slot's content: the last layer's outputs. `keep` is the length to keep."""
    start = cache.cached_length(slot)
    hidden = torch.tensor(tokens, dtype=torch.float64)
    with cache.forward([Span(slot, start, len(tokens))]) as forward:
        for index, reach in enumerate(reaches):
            forward.store_kv(index, torch.zeros(1, len(tokens), 0), hidden[None, :, None])
            (segment,) = forward.segments(index)
            stored = forward.layer_kv(index)[1].read(segment.cells, torch.float64)[0, :, 0]
            hidden = torch.stack([_row(hidden[at], stored, segment, reach, start + at) for at in range(len(tokens))])
        if keep is not None:
            forward.keep(slot, keep)
    return hidden


def _row(own: Tensor, stored: Tensor, segment: Segment, reach: AttentionRange, position: int) -> Tensor:
    begin = oldest(reach, position)
    seen = stored[begin - segment.oldest_visible : position + 1 - segment.oldest_visible]
    distance = torch.arange(position - begin, -1, -1, dtype=torch.float64)
    return torch.tanh(own / 2 + (seen * torch.cos(distance + 0.3)).sum() / 4)
