"""Finds the decoder of the common shape in a loaded model: from what its layers take and make, not from any name.

Every part is computed anew from what the trace has of the part before, and must give what the trace has behind it. So
a model that does anything else on its way, whatever it is, has no shape here and runs as transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.model.layers import CachedLayer
from engine.native.attention import find_attention, find_output_gates
from engine.native.comparison import is_close, least_squares_ratio, require_close
from engine.native.decoder import (
    AttentionBlock,
    AttentionSpec,
    DecoderLayer,
    DecoderSpec,
    Linear,
    Norm,
    OutputHead,
    RecurrenceSpec,
    UnsupportedArchitecture,
)
from engine.native.mlp_block import find_mlp
from engine.native.recurrence import find_recurrence
from engine.native.trace import trace
from engine.native.trace_reader import TraceReader


def find_decoder(model: Any, plans: Sequence[CachedLayer], *, vocabulary: int, context: int) -> DecoderSpec:
    """The model as a decoder of the common shape. Raises UnsupportedArchitecture.

    plans    of its layers that store (engine/model/layers.py)
    context  positions that it knows
    """
    if any(plan.sharing_layers for plan in plans):
        raise UnsupportedArchitecture("some of its layers share their keys and values")
    seen = trace(model, vocabulary=vocabulary, context=context)
    walk = TraceReader(seen.events)
    try:
        states = walk.next_input()
        scale = least_squares_ratio(seen.embeddings, states)
        require_close("its first layer", seen.embeddings * scale, states)
        layers, storing = [], iter(plans)
        for recurs in walk.recurrent_layers():
            plan = None if recurs else next(storing, None)
            layer, states = _layer(walk, seen.positions, plan, states)
            layers.append(layer)
        ending = _ending(walk, states, seen.logits, _numbers(model))
    except UnsupportedArchitecture as error:
        if seen.unsupported_modules:
            raise UnsupportedArchitecture(
                f"{error.reason}; it has layers of the kind {seen.unsupported_modules[0]}"
            ) from error
        raise
    return DecoderSpec(model.get_input_embeddings().weight, scale, tuple(layers), ending)


def _layer(
    walk: TraceReader, positions: Tensor, plan: CachedLayer | None, states: Tensor
) -> tuple[DecoderLayer, Tensor]:
    """Both halves of a layer, and the states behind it; one without a plan stores no cells."""
    norm, entering = walk.read_norm(states)
    way, attended = _way(walk, norm, entering, positions, plan)
    output = walk.read_linear("what follows attention", attended)
    after, made = walk.read_norm(output.output)
    taken = walk.next_hidden_states(states)
    parallel = is_close(states, taken) or is_close(entering, taken)
    share = 1.0 if parallel else least_squares_ratio(made, taken - states)
    own = states if parallel else states + share * made
    mlp, states = find_mlp(walk, own, norm, entering, made if parallel else None)
    return (AttentionBlock(mixer=way, output=output.linear, post_norm=after, residual_scale=share), mlp), states


def _way(
    walk: TraceReader, norm: Norm, entering: Tensor, positions: Tensor, plan: CachedLayer | None
) -> tuple[AttentionSpec | RecurrenceSpec, Tensor]:
    """How a layer attends, and the rows that this makes."""
    if plan is None:
        return find_recurrence(norm, entering, walk.read_until_output(entering))
    before, seen = walk.read_until_attention()
    way = find_attention(norm, entering, before, seen.call, positions, plan)
    return find_output_gates(way, before, seen.output, walk.next_input())


def _ending(walk: TraceReader, states: Tensor, logits: Tensor, numbers: Sequence[float]) -> OutputHead:
    """What follows the last layer; `numbers` are those that may bound logits."""
    norm, made = walk.read_norm(states)
    if norm.kind == "none":
        raise UnsupportedArchitecture("it has no norm behind its last layer")
    head = walk.read_linear("its output layer", made)
    scale = least_squares_ratio(head.output, logits)
    if is_close(head.output * scale, logits):
        return OutputHead(norm, head.linear, scale, 0.0)
    for cap in numbers:
        if is_close(cap * torch.tanh(head.output / cap), logits):
            return OutputHead(norm, head.linear, 1.0, cap)
    raise UnsupportedArchitecture("its logits are made in another way")


def _numbers(model: Any) -> list[float]:
    """What a model's settings have of numbers above zero."""
    values = model.config.get_text_config().to_dict().values()
    return sorted({float(value) for value in values if isinstance(value, int | float) and value > 0})


def linears(decoder: DecoderSpec) -> Iterator[Linear]:
    """All matrices."""
    for attention, mlp in decoder.layers:
        yield from (*attention.mixer.projections, attention.output)
        if mlp.gated is not None:
            yield from (*mlp.gated.inner, mlp.gated.down)
        if mlp.experts is not None:
            yield from (*mlp.experts.inner.matrices(), *mlp.experts.down.matrices())
    yield decoder.output_head.head
