"""Finds the first half of a layer: how its queries, keys and values come from the states, and how they turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.model import hooks
from engine.model.layers import CachedLayer
from engine.native.comparison import is_close, require_close
from engine.native.decoder import NO_NORM, AttentionSpec, HeadColumns, Norm, RotarySpec, UnsupportedArchitecture
from engine.native.norm import normalise
from engine.native.trace import TracedLinear, TracedNorm
from kvcache.rotary import column_pairs
from kvcache.spec import Rotation

_OTHER = "its queries, keys and values are made in another way"


def find_attention(
    norm: Norm,
    entering: Tensor,
    events: Sequence[TracedLinear | TracedNorm],
    call: hooks.AttentionCall,
    positions: Tensor,
    plan: CachedLayer,
) -> AttentionSpec:
    """How a layer makes its queries, keys and values. Raises UnsupportedArchitecture.

    norm       the layer's first
    entering   what it makes, [rows, width]
    events     from there to the attention
    positions  of the rows
    """
    if call.bias is not None:
        raise UnsupportedArchitecture("its attention adds a bias to its scores")
    if call.layer != plan.index:
        raise UnsupportedArchitecture("its layers run in another order than they store")
    matrices = [event for event in events if isinstance(event, TracedLinear)]
    norms = [event.norm for event in events if isinstance(event, TracedNorm)] or [NO_NORM, NO_NORM]
    for matrix in matrices:
        require_close("a projection", entering, matrix.input)
    if len(norms) != 2:
        raise UnsupportedArchitecture(_OTHER)
    # Where keys are no turned ones, they may be as they are.
    rotation = plan.spec.rotation or Rotation()
    for places, turns_first in itertools.product(_layouts(call, len(matrices)), (False, True)):
        raw = [_heads(place, matrices) for place in places]
        if not is_close(raw[2], call.value):
            continue
        turn, query, key = _queries_and_keys(raw, norms, call, rotation, positions, turns_first=turns_first)
        if is_close(query, call.query) and is_close(key, call.key):
            return AttentionSpec(
                norm=norm,
                projections=tuple(matrix.linear for matrix in matrices),
                queries=places[0],
                keys=places[1],
                values=places[2],
                of_queries=norms[0],
                of_keys=norms[1],
                rotates_before_norm=turns_first,
                rotary=turn,
                scale=call.scale,
                softcap=call.softcap or 0.0,
                sinks=None if call.sinks is None else call.sinks.detach().float().contiguous(),
            )
    raise UnsupportedArchitecture(_OTHER)


def _queries_and_keys(
    raw: Sequence[Tensor],
    norms: Sequence[Norm],
    call: hooks.AttentionCall,
    rotation: Rotation,
    positions: Tensor,
    *,
    turns_first: bool,
) -> tuple[RotarySpec, Tensor, Tensor]:
    """Queries and keys [heads, rows, width] of raw ones, and how they turn."""
    if turns_first:
        turn = RotarySpec(rotation, 1.0)
        query, key = (_normed(own, _rotated(rows, turn, positions)) for own, rows in zip(norms, raw, strict=False))
        return turn, query, key
    query, key = (_normed(own, rows) for own, rows in zip(norms, raw, strict=False))
    turn = RotarySpec(rotation, _scaling(key, call.key, rotation))
    return turn, _rotated(query, turn, positions), _rotated(key, turn, positions)


def _normed(norm: Norm, heads: Tensor) -> Tensor:
    """Heads [heads, rows, width], each by itself or all of a row at once."""
    count, _, width = heads.shape
    if norm.kind == "none" or norm.width == width:
        return normalise(norm, heads)
    if norm.width != count * width:
        raise UnsupportedArchitecture(_OTHER)
    whole = normalise(norm, heads.transpose(0, 1).flatten(1))
    return whole.view(-1, count, width).transpose(0, 1)


def _layouts(call: hooks.AttentionCall, matrices: int) -> Iterator[tuple[HeadColumns, HeadColumns, HeadColumns]]:
    """Where queries, keys and values may lie: in a matrix each, in one after the other, or in one head by head."""
    heads, _, width = call.query.shape
    key_heads, value_width = call.key.shape[0], call.value.shape[2]
    if matrices == 3:
        yield (
            HeadColumns(0, 0, width, heads, width),
            HeadColumns(1, 0, width, key_heads, width),
            HeadColumns(2, 0, value_width, key_heads, value_width),
        )
    if matrices == 3:
        # Beside each head's query lies its gate.
        yield (
            HeadColumns(0, 0, 2 * width, heads, width),
            HeadColumns(1, 0, width, key_heads, width),
            HeadColumns(2, 0, value_width, key_heads, value_width),
        )
    if matrices == 1:
        keys, values = heads * width, (heads + key_heads) * width
        yield (
            HeadColumns(0, 0, width, heads, width),
            HeadColumns(0, keys, width, key_heads, width),
            HeadColumns(0, values, value_width, key_heads, value_width),
        )
    if matrices == 1 and heads == key_heads:
        stride = 2 * width + value_width
        yield (
            HeadColumns(0, 0, stride, heads, width),
            HeadColumns(0, width, stride, heads, width),
            HeadColumns(0, 2 * width, stride, heads, value_width),
        )


def find_output_gates(
    way: AttentionSpec, events: Sequence[TracedLinear | TracedNorm], made: Tensor, taken: Tensor
) -> tuple[AttentionSpec, Tensor]:
    """The way with the gates that weight what attention makes [rows, heads * value_width], and what is made so.

    taken  by what follows
    """
    queries, width = way.queries, way.values.width
    if is_close(made, taken) or queries.stride != queries.width + width:
        return way, made
    matrices = [event for event in events if isinstance(event, TracedLinear)]
    gates = HeadColumns(queries.matrix, queries.offset + queries.width, queries.stride, queries.count, width)
    weights = torch.sigmoid(_heads(gates, matrices))
    return replace(way, gates=gates), made * weights.transpose(0, 1).flatten(1)


def _heads(place: HeadColumns, matrices: Sequence[TracedLinear]) -> Tensor:
    """[heads, rows, width]"""
    made = matrices[place.matrix].output
    if made.shape[1] < place.offset + (place.count - 1) * place.stride + place.width:
        raise UnsupportedArchitecture(_OTHER)
    starts = range(place.offset, place.offset + place.count * place.stride, place.stride)
    return torch.stack([made[:, start : start + place.width] for start in starts])


def rotary_angles(turn: RotarySpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [rows, pairs] of positions [rows], scaled: computed in float32, as transformers does."""
    angle = positions.float()[:, None] * torch.tensor(turn.rotation.inverse_frequency, dtype=torch.float32)
    if turn.scaling == 1.0:
        return angle.cos(), angle.sin()
    return angle.cos() * turn.scaling, angle.sin() * turn.scaling


def switched_rotary_angles(
    turn: RotarySpec, extended: RotarySpec, positions: Tensor, original: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [2 * rows, pairs] of positions [rows]: by `turn` within the original length and by `extended`
    from there on; behind them those of all positions by `extended`.
    """
    pairs = zip(rotary_angles(turn, positions), rotary_angles(extended, positions), strict=True)
    cosine, sine = (torch.cat((own[:original], longer[original:], longer)) for own, longer in pairs)
    return cosine, sine


def _rotated(heads: Tensor, turn: RotarySpec, positions: Tensor) -> Tensor:
    turned = heads.clone()
    cosine, sine = rotary_angles(turn, positions)
    (x, y), (first, second) = column_pairs(heads, turn.rotation), column_pairs(turned, turn.rotation)
    first.copy_(x * cosine - y * sine)
    second.copy_(y * cosine + x * sine)
    return turned


def _scaling(heads: Tensor, turned: Tensor, rotation: Rotation) -> float:
    """By how much turned columns are larger than before."""
    if not rotation.inverse_frequency or heads.shape != turned.shape:
        return 1.0
    columns = [torch.cat(column_pairs(own.double(), rotation), -1) for own in (turned, heads)]
    sizes = [float(own.square().sum()) for own in columns]
    found = (sizes[0] / max(sizes[1], 1e-30)) ** 0.5
    return 1.0 if abs(found - 1.0) < 1e-5 else found
