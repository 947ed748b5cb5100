"""Finds the latent attention of a layer in a trace: its projections, norms and rotary embedding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.packing import PackedMatrix
from engine.model import hooks
from engine.model.layers import CachedLayer
from engine.native.attention import UNSUPPORTED, read_heads, rotary_scaling, rotated
from engine.native.comparison import is_close
from engine.native.decoder import (
    NO_NORM,
    HeadColumns,
    LatentAttentionSpec,
    Linear,
    Norm,
    QueryScale,
    RotarySpec,
    UnsupportedArchitecture,
)
from engine.native.query_scale import without_scale
from engine.native.trace import TracedLinear, TracedNorm
from kvcache.spec import Rotation


def find_latent_attention(
    norm_before: Norm,
    inputs: Tensor,
    events: Sequence[TracedLinear | TracedNorm],
    call: hooks.AttentionCall,
    positions: Tensor,
    scales: Sequence[QueryScale | None],
    layer: CachedLayer,
    cells: int,
) -> LatentAttentionSpec:
    """The latent attention of a layer; see find_attention. Raises UnsupportedArchitecture."""
    projection = call.latent
    assert projection is not None
    packed = projection.packed
    if call.layer != layer.index:
        raise UnsupportedArchitecture("some of its layers share their latents")
    if call.softcap or call.sinks is not None or call.bias is not None:
        raise UnsupportedArchitecture("its latent attention has sinks, or caps or biases its scores")
    projections = [event for event in events if isinstance(event, TracedLinear) and is_close(inputs, event.input)]
    others = [event for event in events if isinstance(event, TracedLinear) and not is_close(inputs, event.input)]
    norms = [event for event in events if isinstance(event, TracedNorm)]
    if len(others) > 1 or len(norms) != len(others) + 1:
        raise UnsupportedArchitecture(UNSUPPORTED)
    latent_width, rotation = projection.latent_width, layer.spec.rotation or Rotation()
    latents, latent_norm = _find_latents(projections, norms, call.key[0, :, :latent_width])
    rotary_columns = replace(latents, offset=latents.offset + latent_width, width=call.key.shape[2] - latent_width)
    raw_key = torch.cat((call.key[..., :latent_width], read_heads(rotary_columns, projections)), -1)
    queries, query_norm = _find_queries(projections, others, norms, call)
    raw_query = read_heads(queries, others or projections)
    for separates_pairs, scale in itertools.product((False, True), scales):
        key = _separate_pairs(raw_key, latent_width) if separates_pairs else raw_key
        rotary = RotarySpec(rotation, rotary_scaling(key, call.key, rotation))
        if is_close(rotated(key, rotary, positions), call.key) and is_close(
            _rotated_query(raw_query, rotary, positions, latent_width, call, separates_pairs=separates_pairs),
            without_scale(call.query, scale, positions),
        ):
            return LatentAttentionSpec(
                norm=norm_before,
                projections=tuple(event.linear for event in projections),
                cells=cells,
                query_norm=query_norm,
                query_expansion=others[0].linear if others else None,
                queries=queries,
                latents=latents,
                latent_norm=latent_norm,
                rotary_columns=rotary_columns,
                separates_pairs=separates_pairs,
                rotary=replace(rotary, query_scale=scale),
                keys=_matrices(projection.keys, transposed=True) if packed is None else _packed(packed.keys),
                values=_matrices(projection.values) if packed is None else _packed(packed.values),
                scale=call.scale,
            )
    raise UnsupportedArchitecture(UNSUPPORTED)


def _find_latents(
    projections: Sequence[TracedLinear], norms: Sequence[TracedNorm], latents: Tensor
) -> tuple[HeadColumns, Norm]:
    """The columns of latents [rows, width] before their norm, and the norm."""
    width = latents.shape[1]
    for traced, (matrix, linear) in itertools.product(norms, enumerate(projections)):
        for offset in {0, linear.output.shape[1] - width}:
            before = linear.output[:, offset : offset + width]
            if offset >= 0 and is_close(before, traced.input) and is_close(traced.output, latents):
                return HeadColumns(matrix, offset, width, 1, width), traced.norm
    raise UnsupportedArchitecture(UNSUPPORTED)


def _find_queries(
    projections: Sequence[TracedLinear],
    expansions: Sequence[TracedLinear],
    norms: Sequence[TracedNorm],
    call: hooks.AttentionCall,
) -> tuple[HeadColumns, Norm]:
    """The columns of queries in the output of the expansion or a projection, and the norm before the expansion.

    With an expansion, `matrix` is the projection before it.
    """
    heads, _, width = call.query.shape
    for matrix, linear in enumerate(projections):
        columns = HeadColumns(matrix, 0, width, heads, width)
        if not expansions and linear.output.shape[1] == heads * width:
            return columns, NO_NORM
        for traced in norms if expansions else ():
            if is_close(linear.output, traced.input) and is_close(traced.output, expansions[0].input):
                return columns, traced.norm
    raise UnsupportedArchitecture(UNSUPPORTED)


def _rotated_query(
    query: Tensor,
    rotary: RotarySpec,
    positions: Tensor,
    latent_width: int,
    call: hooks.AttentionCall,
    *,
    separates_pairs: bool,
) -> Tensor:
    """Queries [heads, rows, key_width + rotary_width], rotated as they are with absorbed projections."""
    assert call.latent is not None
    key_width = call.latent.keys.shape[1]
    rotation = replace(rotary.rotation, offset=rotary.rotation.offset - latent_width + key_width)
    separated = _separate_pairs(query, key_width) if separates_pairs else query
    if not rotation.inverse_frequency:
        return separated
    return rotated(separated, RotarySpec(rotation, rotary.scaling), positions)


def _separate_pairs(heads: Tensor, offset: int) -> Tensor:
    """Heads [heads, rows, width] with columns from `offset` on as all first ones of pairs, then all second ones."""
    columns = heads[..., offset:]
    return torch.cat((heads[..., :offset], columns[..., 0::2], columns[..., 1::2]), -1)


def _matrices(weights: Tensor, *, transposed: bool = False) -> tuple[Linear, ...]:
    """The matrix of each head [outputs, columns] in the model's dtype, from [heads, outputs, columns]."""
    # Float32Mode converts weights.
    with torch._C.DisableTorchFunction():
        matrices = weights.mT if transposed else weights
        return tuple(Linear(matrix.clone(memory_format=torch.contiguous_format)) for matrix in matrices)


def _packed(matrices: Sequence[PackedMatrix]) -> tuple[Linear, ...]:
    return tuple(map(Linear, matrices))
