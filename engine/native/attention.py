"""Finds the attention of a layer in a trace: its projections, norms and rotary embedding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.model import hooks
from engine.model.layers import CachedLayer
from engine.native.comparison import is_close, require_close
from engine.native.decoder import (
    NO_NORM,
    AttentionSpec,
    HeadColumns,
    Norm,
    QueryScale,
    RotarySpec,
    UnsupportedArchitecture,
)
from engine.native.norm import normalise
from engine.native.query_scale import without_scale
from engine.native.trace import TracedLinear, TracedNorm
from kvcache.rotary import column_pairs
from kvcache.spec import Rotation

UNSUPPORTED = "its queries, keys and values are computed by other operations"


def find_attention(
    norm_before: Norm,
    inputs: Tensor,
    events: Sequence[TracedLinear | TracedNorm],
    call: hooks.AttentionCall,
    positions: Tensor,
    scales: Sequence[QueryScale | None],
    layer: CachedLayer,
    cells: int,
) -> AttentionSpec:
    """The attention of a layer. Raises UnsupportedArchitecture.

    norm_before   before the projections
    inputs        its output [rows, width]
    events        between the norm and the attention call
    positions     of the rows
    scales        that the queries may have
    layer, cells  the layer with the cells that it reads, and its index in the cache
    """
    if call.bias is not None:
        raise UnsupportedArchitecture("its attention adds a bias to its scores")
    linears = [event for event in events if isinstance(event, TracedLinear)]
    norms = [event.norm for event in events if isinstance(event, TracedNorm)]
    for linear in linears:
        require_close("a projection", inputs, linear.input)
    if call.layer in layer.sharing_layers:
        query_norm, key_norm, value_norm = _norms_of(norms, 1)
        layouts = _query_layouts(call, len(linears))
    else:
        query_norm, key_norm, value_norm = _norms_of(norms, 2, 3)
        layouts = _layouts(call, len(linears))
    # Keys without a rotary embedding have the empty rotation.
    rotation = layer.spec.rotation or Rotation()
    for (queries, keys, values), rotates_before_norm, scale in itertools.product(layouts, (False, True), scales):
        query = without_scale(call.query, scale, positions)
        traced = [
            (columns, norm, output)
            for columns, norm, output in ((queries, query_norm, query), (keys, key_norm, call.key))
            if columns.matrix >= 0
        ]
        if values.matrix >= 0 and not is_close(_normed(value_norm, read_heads(values, linears)), call.value):
            continue
        rotary = _rotary(traced, linears, rotation, rotates_before_norm=rotates_before_norm)
        if all(
            is_close(
                _heads(read_heads(columns, linears), norm, rotary, positions, rotates_before_norm=rotates_before_norm),
                output,
            )
            for columns, norm, output in traced
        ):
            return AttentionSpec(
                norm=norm_before,
                projections=tuple(linear.linear for linear in linears),
                cells=cells,
                stores=call.layer == layer.index,
                queries=queries,
                keys=keys,
                values=values,
                query_norm=query_norm,
                key_norm=key_norm,
                value_norm=value_norm,
                rotates_before_norm=rotates_before_norm,
                rotary=replace(rotary, query_scale=scale),
                scale=call.scale,
                softcap=call.softcap or 0.0,
                sinks=None if call.sinks is None else call.sinks.detach().float().contiguous(),
            )
    raise UnsupportedArchitecture(UNSUPPORTED)


def _norms_of(norms: Sequence[Norm], *counts: int) -> tuple[Norm, Norm, Norm]:
    """The norms of queries, keys and values, from none or one of `counts` norms."""
    if len(norms) not in (0, *counts):
        raise UnsupportedArchitecture(UNSUPPORTED)
    query_norm, key_norm, value_norm = (*norms, NO_NORM, NO_NORM, NO_NORM)[:3]
    return query_norm, key_norm, value_norm


def _heads(
    projected: Tensor, norm: Norm, rotary: RotarySpec, positions: Tensor, *, rotates_before_norm: bool
) -> Tensor:
    """Queries or keys [heads, rows, width], from projected ones."""
    if rotates_before_norm:
        return _normed(norm, rotated(projected, rotary, positions))
    return rotated(_normed(norm, projected), rotary, positions)


def _rotary(
    traced: Sequence[tuple[HeadColumns, Norm, Tensor]],
    linears: Sequence[TracedLinear],
    rotation: Rotation,
    *,
    rotates_before_norm: bool,
) -> RotarySpec:
    """The rotary embedding, with the scaling of the last of the traced queries and keys."""
    if rotates_before_norm:
        return RotarySpec(rotation, 1.0)
    columns, norm, output = traced[-1]
    return RotarySpec(rotation, rotary_scaling(_normed(norm, read_heads(columns, linears)), output, rotation))


def _normed(norm: Norm, heads: Tensor) -> Tensor:
    """Heads [heads, rows, width] after a norm over each head, or over all heads of a row."""
    count, _, width = heads.shape
    if norm.kind == "none" or norm.width == width:
        return normalise(norm, heads)
    if norm.width != count * width:
        raise UnsupportedArchitecture(UNSUPPORTED)
    all_heads = normalise(norm, heads.transpose(0, 1).flatten(1))
    return all_heads.view(-1, count, width).transpose(0, 1)


def _layouts(call: hooks.AttentionCall, matrices: int) -> Iterator[tuple[HeadColumns, HeadColumns, HeadColumns]]:
    """Possible columns of queries, keys and values: a matrix each, or one fused matrix by kind or by head."""
    heads, _, width = call.query.shape
    key_heads, value_width = call.key.shape[0], call.value.shape[2]
    if matrices == 2 and width == value_width:
        keys = HeadColumns(1, 0, width, key_heads, width)
        yield HeadColumns(0, 0, width, heads, width), keys, keys
    if matrices == 3:
        keys = HeadColumns(1, 0, width, key_heads, width)
        values = HeadColumns(2, 0, value_width, key_heads, value_width)
        yield HeadColumns(0, 0, width, heads, width), keys, values
        # Each query head is followed by its gate.
        yield HeadColumns(0, 0, 2 * width, heads, width), keys, values
    if matrices == 1:
        key_offset, value_offset = heads * width, (heads + key_heads) * width
        yield (
            HeadColumns(0, 0, width, heads, width),
            HeadColumns(0, key_offset, width, key_heads, width),
            HeadColumns(0, value_offset, value_width, key_heads, value_width),
        )
    if matrices == 1 and heads == key_heads:
        stride = 2 * width + value_width
        yield (
            HeadColumns(0, 0, stride, heads, width),
            HeadColumns(0, width, stride, heads, width),
            HeadColumns(0, 2 * width, stride, heads, value_width),
        )


def _query_layouts(call: hooks.AttentionCall, matrices: int) -> Iterator[tuple[HeadColumns, HeadColumns, HeadColumns]]:
    """The columns of queries in one matrix; keys and values belong to another layer (matrix -1)."""
    heads, _, width = call.query.shape
    keys, values = (HeadColumns(-1, 0, 0, rows.shape[0], rows.shape[2]) for rows in (call.key, call.value))
    if matrices == 1:
        yield HeadColumns(0, 0, width, heads, width), keys, values


def find_output_gates(
    attention: AttentionSpec, events: Sequence[TracedLinear | TracedNorm], output: Tensor, next_input: Tensor
) -> tuple[AttentionSpec, Tensor]:
    """The attention with the gates of its output, if it has any, and the gated output.

    output      of the attention [rows, heads * value_width]
    next_input  of the operation after it
    """
    queries, width = attention.queries, attention.values.width
    if is_close(output, next_input) or queries.stride != queries.width + width:
        return attention, output
    linears = [event for event in events if isinstance(event, TracedLinear)]
    gates = HeadColumns(queries.matrix, queries.offset + queries.width, queries.stride, queries.count, width)
    weights = torch.sigmoid(read_heads(gates, linears))
    return replace(attention, gates=gates), output * weights.transpose(0, 1).flatten(1)


def read_heads(columns: HeadColumns, linears: Sequence[TracedLinear]) -> Tensor:
    """Heads [heads, rows, width] of the output of a projection."""
    output = linears[columns.matrix].output
    if output.shape[1] < columns.offset + (columns.count - 1) * columns.stride + columns.width:
        raise UnsupportedArchitecture(UNSUPPORTED)
    starts = range(columns.offset, columns.offset + columns.count * columns.stride, columns.stride)
    return torch.stack([output[:, start : start + columns.width] for start in starts])


def rotary_angles(rotary: RotarySpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled cosines and sines [rows, pairs] of positions [rows], computed in float32 as in transformers."""
    angle = positions.float()[:, None] * torch.tensor(rotary.rotation.inverse_frequency, dtype=torch.float32)
    if rotary.scaling == 1.0:
        return angle.cos(), angle.sin()
    return angle.cos() * rotary.scaling, angle.sin() * rotary.scaling


def switched_rotary_angles(
    rotary: RotarySpec, long_rotary: RotarySpec, positions: Tensor, original_length: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [2 * rows, pairs] of positions [rows], for models with two sets of rotary factors.

    The first half is by `rotary` below the original length and by `long_rotary` from there on; the second half only by
    `long_rotary`.
    """
    pairs = zip(rotary_angles(rotary, positions), rotary_angles(long_rotary, positions), strict=True)
    cosine, sine = (torch.cat((short[:original_length], long[original_length:], long)) for short, long in pairs)
    return cosine, sine


def rotated(heads: Tensor, rotary: RotarySpec, positions: Tensor) -> Tensor:
    """Heads [heads, rows, width] after the rotary embedding."""
    output = heads.clone()
    cosine, sine = rotary_angles(rotary, positions)
    (x, y), (first, second) = column_pairs(heads, rotary.rotation), column_pairs(output, rotary.rotation)
    first.copy_(x * cosine - y * sine)
    second.copy_(y * cosine + x * sine)
    return output


def rotary_scaling(heads: Tensor, rotated: Tensor, rotation: Rotation) -> float:
    """The factor from the size of the rotary columns before rotation to their size after it."""
    if not rotation.inverse_frequency or heads.shape != rotated.shape:
        return 1.0
    columns = [torch.cat(column_pairs(part.double(), rotation), -1) for part in (rotated, heads)]
    sizes = [float(part.square().sum()) for part in columns]
    scaling = (sizes[0] / max(sizes[1], 1e-30)) ** 0.5
    return 1.0 if abs(scaling - 1.0) < 1e-5 else scaling
