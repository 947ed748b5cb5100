"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a cell holds one latent per token, shared by all heads.

The key of a cell is [latent, rotary part]; it has no value, since values are projections of the latent too. There are
two algorithms with the same result, and each segment takes the cheaper one:
* absorbed: the projections are applied to the queries and to the output, and all heads attend to the latents;
* expanded: keys and values of each head are computed from the latents first, then attention is standard. Some heads are
  expanded at a time: keys and values of one head are narrower than a cell (DeepSeek-V3: 320 columns of 576), so the
  memory for a long sequence stays within a budget or the size of its cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.attention_input import AttentionInput
from engine.kernels.packing import PackedMatrix
from engine.types.request import MlaMode
from kvcache.forward import Segment

# The memory for expanded keys and values of one segment; a single head may exceed it.
_EXPANDED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PackedProjection:
    """Quantised projections of latents by head: keys [latent_width, key_width], values [value_width, latent_width]."""

    keys: tuple[PackedMatrix, ...]
    values: tuple[PackedMatrix, ...]


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """The projections of latents: keys [heads, key_width, latent_width], values [heads, value_width, latent_width].

    packed  the same weights, quantised; None: they are not
    """

    keys: Tensor
    values: Tensor
    packed: PackedProjection | None = None

    @property
    def latent_width(self) -> int:
        """The columns of a latent."""
        return self.keys.shape[-1]


@dataclass(frozen=True, slots=True)
class AbsorptionRule:
    """The segments with absorbed projections; with mode "auto" the algorithm of each has fewer multiplications.

    latent_width    columns of a latent
    expanded_width  columns of the key and the value of a head, both from the latent
    """

    latent_width: int
    expanded_width: int
    mode: MlaMode

    @classmethod
    def of(cls, projection: LatentProjection, mode: MlaMode) -> AbsorptionRule:
        """The rule of layers with the shapes of a projection."""
        return cls(projection.latent_width, projection.keys.shape[1] + projection.values.shape[1], mode)

    def applies(self, segment: Segment) -> bool:
        """Whether the projections of a segment are absorbed."""
        if self.mode != "auto":
            return self.mode == "absorb"
        rows, before = segment.batch_slice.stop - segment.batch_slice.start, segment.start - segment.oldest_visible
        expansion = self.latent_width * self.expanded_width
        multiplications = 2 * self.latent_width - self.expanded_width + expansion / (before + rows)
        return bool(rows * multiplications <= expansion)


def attend(inputs: AttentionInput, projection: LatentProjection, *, mode: MlaMode = "auto") -> Tensor:
    """The attention output of a packed batch, [rows, heads, value_width].

    inputs  without softcap, sinks and bias. query: [heads, rows, key_width + rotary_width], its last columns rotated;
            keys: cells [1, cells, latent_width + rotary_width]; values are not read
    mode    the algorithm of all segments; "auto": the cheaper one for each
    """
    heads, rows = inputs.query.shape[:2]
    output = inputs.query.new_empty(rows, heads, projection.values.shape[1])
    rule = AbsorptionRule.of(projection, mode)
    for segment in inputs.segments:
        compute = _absorbed if rule.applies(segment) else _expanded
        output[segment.batch_slice] = compute(inputs, segment, projection)
    return output


def absorb_keys(query: Tensor, projection: LatentProjection) -> Tensor:
    """Queries [heads, rows, key_width + rotary_width] for latents: [heads, rows, latent_width + rotary_width]."""
    width = projection.keys.shape[1]
    return torch.cat((query[..., :width] @ projection.keys, query[..., width:]), -1)


def project_values(mixed: Tensor, projection: LatentProjection) -> Tensor:
    """Weighted latents [heads, rows, latent_width] as outputs [rows, heads, value_width]."""
    return (mixed @ projection.values.mT).transpose(0, 1)


def project_latents(key: Tensor, projection: LatentProjection) -> Tensor:
    """The values [heads, rows, value_width] of keys [1, rows, latent_width + rotary_width]."""
    return key[..., : projection.latent_width] @ projection.values.mT


def _absorbed(inputs: AttentionInput, segment: Segment, projection: LatentProjection) -> Tensor:
    query, cells = inputs.query[:, segment.batch_slice], inputs.keys
    cached = cells.read(segment.cells, query.dtype)
    latents = cached[..., : projection.latent_width]
    reduced = cells.transform(absorb_keys(query, projection))
    mixed = reference.attend_one(inputs, reduced, cached, latents, segment)
    return project_values(cells.transform(mixed).transpose(0, 1), projection)


def _expanded(inputs: AttentionInput, segment: Segment, projection: LatentProjection) -> Tensor:
    query, cells = inputs.query[:, segment.batch_slice], inputs.keys
    cached = cells.transform(cells.read(segment.cells, query.dtype))[0]
    latents, rotary = cached[:, : projection.latent_width], cached[:, projection.latent_width :]
    (heads, rows), length = query.shape[:2], latents.shape[0]
    output = query.new_empty(rows, heads, projection.values.shape[1])
    together = _heads_at_once(length * latents.element_size(), rotary.shape[1], projection)
    for first_head in range(0, heads, together):
        head_range = slice(first_head, min(first_head + together, heads))
        keys = torch.cat(
            (latents @ projection.keys[head_range].mT, rotary.expand(head_range.stop - first_head, -1, -1)), -1
        )
        values = latents @ projection.values[head_range].mT
        output[:, head_range] = reference.attend_one(inputs, query[head_range], keys, values, segment)
    return output


def _heads_at_once(column_bytes: int, rotary_width: int, projection: LatentProjection) -> int:
    """Heads to expand at once; `column_bytes` is the size of one column of all positions."""
    columns = projection.keys.shape[1] + rotary_width + projection.values.shape[1]
    return max(_EXPANDED_BYTES // (columns * column_bytes), 1)
