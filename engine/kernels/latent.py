"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): cells hold one latent a token, shared by all heads.

A cell's key is [latent, rotated part]; it has no value of its own, for values are projections of the latent too. Two
ways to the same result, chosen by what is cheaper for a segment:
* absorbed: the projections are applied to the queries and to the output, and all heads attend to the latents;
* expanded: keys and values of every head are computed from the latents first, then attention is the usual one. That
  is done for some heads at a time: keys and values of one head are narrower than the cells that they come from
  (DeepSeek-V3: 320 columns of 576), so what a long sequence needs stays within a budget or its own cells' size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import reference
from engine.types.request import MlaMode
from kvcache.forward import Segment
from kvcache.kv_buffer import LayerKV
from kvcache.spec import AttentionRange

# What the expanded keys and values of one segment may take; one head's are always allowed.
_EXPANDED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """From a latent to each head: keys [heads, key_width, latent], values [heads, value_width, latent]."""

    keys: Tensor
    values: Tensor

    @property
    def latent_width(self) -> int:
        """The width of a latent."""
        return self.keys.shape[-1]


def attend(
    query: Tensor,
    cells: LayerKV,
    segments: Sequence[Segment],
    reach: AttentionRange,
    projection: LatentProjection,
    *,
    scale: float,
    mode: MlaMode = "auto",
) -> Tensor:
    """The attention output of a packed batch, [rows, heads, value_width].

    query  [heads, rows, key_width + rotated], its last columns rotated
    cells  of the layer, [1, cells, latent + rotated]
    mode   the way that every segment takes; "auto": each the cheaper one
    """
    heads, rows = query.shape[:2]
    output = query.new_empty(rows, heads, projection.values.shape[1])
    for segment in segments:
        own = query[:, segment.batch_slice]
        form = _absorbed if mode == "absorb" else _expanded
        if mode == "auto":
            before = segment.start - segment.oldest_visible
            form = _expanded if _expanding_is_cheaper(own.shape[1], before, projection) else _absorbed
        output[segment.batch_slice] = form(own, cells, segment, reach, projection, scale)
    return output


def _expanding_is_cheaper(rows: int, before: int, projection: LatentProjection) -> bool:
    """Whether expanding the latents costs fewer multiplications than absorbing (design notes, algorithms 3.15)."""
    latent, width = projection.latent_width, projection.keys.shape[1] + projection.values.shape[1]
    expansion = latent * width
    return rows * (2 * latent - width + expansion / (before + rows)) > expansion


def _absorbed(
    query: Tensor, cells: LayerKV, segment: Segment, reach: AttentionRange, projection: LatentProjection, scale: float
) -> Tensor:
    width = projection.keys.shape[1]
    reduced = torch.cat((query[..., :width] @ projection.keys, query[..., width:]), -1)
    held = cells.read(segment.cells, query.dtype)
    latents = held[..., : projection.latent_width]
    mixed = reference.attend_one(cells.transform(reduced), held, latents, segment, reach, scale=scale)
    return (cells.transform(mixed).transpose(0, 1) @ projection.values.mT).transpose(0, 1)


def _expanded(
    query: Tensor, cells: LayerKV, segment: Segment, reach: AttentionRange, projection: LatentProjection, scale: float
) -> Tensor:
    held = cells.transform(cells.read(segment.cells, query.dtype))[0]
    latents, turned = held[:, : projection.latent_width], held[:, projection.latent_width :]
    (heads, rows), length = query.shape[:2], latents.shape[0]
    output = query.new_empty(rows, heads, projection.values.shape[1])
    together = _heads_at_once(length * latents.element_size(), turned.shape[1], projection)
    for at in range(0, heads, together):
        some = slice(at, min(at + together, heads))
        keys = torch.cat((latents @ projection.keys[some].mT, turned.expand(some.stop - at, -1, -1)), -1)
        values = latents @ projection.values[some].mT
        output[:, some] = reference.attend_one(query[some], keys, values, segment, reach, scale=scale)
    return output


def _heads_at_once(column_bytes: int, turned: int, projection: LatentProjection) -> int:
    """Heads whose keys and values may be expanded together; `column_bytes` is one of their columns."""
    columns = projection.keys.shape[1] + turned + projection.values.shape[1]
    return max(_EXPANDED_BYTES // (columns * column_bytes), 1)
