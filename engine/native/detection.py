"""Finds the decoder architecture of a loaded model from a trace, without regard to class names.

Every operation is recomputed from the output of the one before, and must give the traced input of the next one. So a
model with any other operation is unsupported by the native step, and runs in transformers' modules.
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
    CachedSpec,
    DecoderLayer,
    DecoderSpec,
    LatentAttentionSpec,
    Linear,
    Norm,
    OutputHead,
    RecurrenceSpec,
    UnsupportedArchitecture,
)
from engine.native.latent_attention import find_latent_attention
from engine.native.mlp_block import find_mlp_block
from engine.native.recurrence import find_recurrence
from engine.native.trace import embedding_table, trace
from engine.native.trace_reader import TraceReader


def find_decoder(model: Any, layers: Sequence[CachedLayer], *, vocabulary: int, context: int) -> DecoderSpec:
    """The decoder architecture of a model. Raises UnsupportedArchitecture.

    layers   with KV cells (engine/model/layers.py)
    context  the model's maximum context length
    """
    if any(layer.sharing_layers for layer in layers):
        raise UnsupportedArchitecture("some of its layers share their keys and values")
    traced = trace(model, vocabulary=vocabulary, context=context)
    reader = TraceReader(traced.events)
    try:
        states = reader.next_input()
        scale = least_squares_ratio(traced.embeddings, states)
        require_close("its first layer", traced.embeddings * scale, states)
        found, cached_layers = [], iter(layers)
        for is_recurrent in reader.recurrent_layers():
            cached_layer = None if is_recurrent else next(cached_layers, None)
            layer, states = _find_layer(reader, traced.positions, cached_layer, states)
            found.append(layer)
        head = _find_output_head(reader, states, traced.logits, _config_numbers(model))
    except UnsupportedArchitecture as error:
        if traced.unsupported_modules:
            reason = f"{error.reason}; it has layers of the kind {traced.unsupported_modules[0]}"
            raise UnsupportedArchitecture(reason) from error
        raise
    table, rounds = embedding_table(model.get_input_embeddings())
    return DecoderSpec(table, scale, tuple(found), head, rounds_embeddings=rounds)


def _find_layer(
    reader: TraceReader, positions: Tensor, cached_layer: CachedLayer | None, states: Tensor
) -> tuple[DecoderLayer, Tensor]:
    """A layer, and the hidden states after it; recurrent layers have no cached layer."""
    norm, inputs = reader.read_norm(states)
    mixer, mixed = _find_mixer(reader, norm, inputs, positions, cached_layer)
    projection = reader.read_linear("the output projection", mixed)
    post_norm, output = reader.read_norm(projection.output)
    next_input = reader.next_hidden_states(states)
    parallel = is_close(states, next_input) or is_close(inputs, next_input)
    scale = 1.0 if parallel else least_squares_ratio(output, next_input - states)
    attended = states if parallel else states + scale * output
    mlp, states = find_mlp_block(reader, attended, norm, inputs, output if parallel else None)
    attention = AttentionBlock(mixer=mixer, output=projection.linear, post_norm=post_norm, residual_scale=scale)
    return (attention, mlp), states


def _find_mixer(
    reader: TraceReader, norm: Norm, inputs: Tensor, positions: Tensor, cached_layer: CachedLayer | None
) -> tuple[CachedSpec | RecurrenceSpec, Tensor]:
    """The attention or recurrence of a layer, and its output."""
    if cached_layer is None:
        return find_recurrence(norm, inputs, reader.read_until_output(inputs))
    before, traced = reader.read_until_attention()
    if traced.call.latent is not None:
        return find_latent_attention(norm, inputs, before, traced.call, positions, cached_layer), traced.output
    attention = find_attention(norm, inputs, before, traced.call, positions, cached_layer)
    return find_output_gates(attention, before, traced.output, reader.next_input())


def _find_output_head(reader: TraceReader, states: Tensor, logits: Tensor, softcaps: Sequence[float]) -> OutputHead:
    """The output head; `softcaps` are possible values."""
    norm, normed = reader.read_norm(states)
    if norm.kind == "none":
        raise UnsupportedArchitecture("it has no norm after its last layer")
    head = reader.read_linear("its output layer", normed)
    scale = least_squares_ratio(head.output, logits)
    if is_close(head.output * scale, logits):
        return OutputHead(norm, head.linear, scale, 0.0)
    for cap in softcaps:
        if is_close(cap * torch.tanh(head.output / cap), logits):
            return OutputHead(norm, head.linear, 1.0, cap)
    raise UnsupportedArchitecture("its logits are computed by other operations")


def _config_numbers(model: Any) -> list[float]:
    """The positive numbers in the configuration of a model."""
    values = model.config.get_text_config().to_dict().values()
    return sorted({float(value) for value in values if isinstance(value, int | float) and value > 0})


def linears(decoder: DecoderSpec) -> Iterator[Linear]:
    """All linear layers, those of experts included; routers excluded."""
    for attention, mlp in decoder.layers:
        mixer = attention.mixer
        yield from (*mixer.projections, attention.output)
        if isinstance(mixer, LatentAttentionSpec):
            yield from (*mixer.keys, *mixer.values)
            if mixer.query_expansion is not None:
                yield mixer.query_expansion
        if mlp.gated is not None:
            yield from (*mlp.gated.inner, mlp.gated.down)
        if mlp.experts is not None:
            for each in (*mlp.experts.inner, mlp.experts.down):
                yield from each.matrices()
    yield decoder.output_head.head
