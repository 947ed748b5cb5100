"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): cells hold one latent a token, shared by all heads.

A cell's key is [latent, rotated part]; it has no value of its own, for values are projections of the latent too. Two
ways to the same result, chosen by what is cheaper for a segment:
* absorbed: the projections are applied to the queries and to the output, and all heads attend to the latents;
* expanded: keys and values of every head are computed from the latents first, then attention is the usual one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import reference
from kvcache.forward import Segment
from kvcache.spec import Reach


@dataclass(frozen=True, slots=True)
class Projection:
    """From a latent to each head: keys [heads, key_width, latent], values [heads, value_width, latent]."""

    keys: Tensor
    values: Tensor

    @property
    def latent(self) -> int:
        """The width of a latent."""
        return self.keys.shape[-1]


def attend(
    query: Tensor,
    cells: Tensor,
    segments: Sequence[Segment],
    reach: Reach,
    projection: Projection,
    *,
    scale: float,
) -> Tensor:
    """The attention output of a packed batch, [rows, heads, value_width].

    query  [heads, rows, key_width + rotated], its last columns rotated
    cells  [1, cells, latent + rotated], the layer's whole pool
    """
    heads, rows = query.shape[:2]
    output = query.new_empty(rows, heads, projection.values.shape[1])
    for segment in segments:
        own = query[:, segment.rows]
        form = _expanded if _expands(own.shape[1], segment.start, projection) else _absorbed
        output[segment.rows] = form(own, cells, segment, reach, projection, scale)
    return output


def _expands(rows: int, before: int, projection: Projection) -> bool:
    """Whether expanding the latents costs fewer multiplications than absorbing (design notes, algorithms 3.15)."""
    latent, width = projection.latent, projection.keys.shape[1] + projection.values.shape[1]
    expansion = latent * width
    return rows * (2 * latent - width + expansion / (before + rows)) > expansion


def _absorbed(
    query: Tensor, cells: Tensor, segment: Segment, reach: Reach, projection: Projection, scale: float
) -> Tensor:
    width = projection.keys.shape[1]
    reduced = torch.cat((query[..., :width] @ projection.keys, query[..., width:]), -1)
    values = cells[..., : projection.latent]
    alone = Segment(slice(0, query.shape[1]), segment.start, segment.cells)
    mixed = reference.attend(reduced, cells, values, (alone,), reach, scale=scale)
    return torch.einsum("rhl,hvl->rhv", mixed, projection.values)


def _expanded(
    query: Tensor, cells: Tensor, segment: Segment, reach: Reach, projection: Projection, scale: float
) -> Tensor:
    held = reference.read(cells, segment)[0]
    latents, turned = held[:, : projection.latent], held[:, projection.latent :]
    heads, length = query.shape[0], latents.shape[0]
    keys = torch.cat((latents @ projection.keys.mT, turned.expand(heads, -1, -1)), -1)
    values = latents @ projection.values.mT
    alone = Segment(slice(0, query.shape[1]), segment.start, slice(0, length))
    return reference.attend(query, keys, values, (alone,), reach, scale=scale)
