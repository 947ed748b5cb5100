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
from engine.native.comparison import is_close, least_squares_ratio, require_close, residual_ratio
from engine.native.decoder import (
    AttentionBlock,
    CachedSpec,
    DecoderLayer,
    DecoderSpec,
    LatentAttentionSpec,
    Linear,
    Norm,
    OutputHead,
    PerLayerBlock,
    RecurrenceSpec,
    UnsupportedArchitecture,
)
from engine.native.latent_attention import find_latent_attention
from engine.native.mlp_block import Residual, find_mlp_block, find_residual
from engine.native.per_layer import TracedPerLayerInputs, find_per_layer_block, find_per_layer_inputs
from engine.native.recurrence import find_recurrence
from engine.native.trace import TracedEmbedding, embedding_table, trace
from engine.native.trace_reader import TraceReader


def find_decoder(model: Any, layers: Sequence[CachedLayer], *, vocabulary: int, context: int) -> DecoderSpec:
    """The decoder architecture of a model. Raises UnsupportedArchitecture.

    layers   with KV cells (engine/model/layers.py)
    context  the model's maximum context length
    """
    traced = trace(model, vocabulary=vocabulary, context=context)
    reader = TraceReader(traced.events)
    try:
        second_embedding = reader.read_event(TracedEmbedding) if reader.next_is(TracedEmbedding) else None
        states = reader.next_input()
        scale = least_squares_ratio(traced.embeddings, states)
        require_close("its first layer", traced.embeddings * scale, states)
        inputs = None if second_embedding is None else find_per_layer_inputs(reader, second_embedding, states)
        finder = _LayerFinder(reader, traced.positions, layers, inputs)
        found = []
        for number in reader.attention_layers():
            layer, states = finder.find(number, states)
            found.append(layer)
        head = _find_output_head(reader, states, traced.logits, _config_numbers(model))
    except UnsupportedArchitecture as error:
        if traced.unsupported_modules:
            reason = f"{error.reason}; it has layers of the kind {traced.unsupported_modules[0]}"
            raise UnsupportedArchitecture(reason) from error
        raise
    table, rounds = embedding_table(model.get_input_embeddings())
    per_layer_inputs = None if inputs is None else inputs.spec(finder.per_layer_scale)
    return DecoderSpec(table, scale, tuple(found), head, rounds_embeddings=rounds, per_layer_inputs=per_layer_inputs)


class _LayerFinder:
    """Finds the layers of a trace, one after the other.

    per_layer_scale  of all per-layer inputs
    """

    def __init__(
        self,
        reader: TraceReader,
        positions: Tensor,
        layers: Sequence[CachedLayer],
        per_layer_inputs: TracedPerLayerInputs | None,
    ) -> None:
        self._reader, self._positions, self._per_layer_inputs = reader, positions, per_layer_inputs
        # By the number of a layer in its attention call: the layer with its cells, and the index of this one.
        self._cells = {
            number: (layer, index)
            for index, layer in enumerate(layers)
            for number in (layer.index, *layer.sharing_layers)
        }
        self._found = 0
        self.per_layer_scale = 1.0

    def find(self, number: int | None, states: Tensor) -> tuple[DecoderLayer, Tensor]:
        """The next layer, and the hidden states after it; `number` is that of its attention call."""
        reader = self._reader
        norm, inputs = reader.read_norm(states)
        mixer, mixed = self._find_mixer(norm, inputs, number)
        projection = reader.read_linear("the output projection", mixed)
        post_norm, output = reader.read_norm(projection.output)
        next_input = reader.next_hidden_states(states)
        parallel = is_close(states, next_input) or is_close(inputs, next_input)
        scale = 1.0 if parallel else residual_ratio(states, output, next_input)
        attended = states if parallel else states + scale * output
        attention = AttentionBlock(mixer=mixer, output=projection.linear, post_norm=post_norm, residual_scale=scale)
        mlp, residual = find_mlp_block(reader, attended, norm, inputs, output if parallel else None)
        per_layer = None
        if self._per_layer_inputs is not None:
            if residual.output_scale != 1.0 or parallel:
                raise UnsupportedArchitecture("its per-layer inputs enter the layers by other operations")
            per_layer, residual = self._find_per_layer_block(residual.states, self._per_layer_inputs.sums)
        self._found += 1
        return DecoderLayer(attention, mlp, per_layer, residual.output_scale), residual.states

    def _find_mixer(self, norm: Norm, inputs: Tensor, number: int | None) -> tuple[CachedSpec | RecurrenceSpec, Tensor]:
        """The attention or recurrence of a layer, and its output."""
        reader = self._reader
        if number is None:
            return find_recurrence(norm, inputs, reader.read_until_output(inputs))
        before, traced = reader.read_until_attention()
        if traced.call.layer not in self._cells:
            raise UnsupportedArchitecture("a layer has no cells")
        arguments = (norm, inputs, before, traced.call, self._positions, *self._cells[traced.call.layer])
        if traced.call.latent is not None:
            return find_latent_attention(*arguments), traced.output
        return find_output_gates(find_attention(*arguments), before, traced.output, reader.next_input())

    def _find_per_layer_block(self, states: Tensor, sums: Tensor) -> tuple[PerLayerBlock, Residual]:
        if self._found == sums.shape[1]:
            raise UnsupportedArchitecture("it has more layers than per-layer inputs")
        block, scale, output = find_per_layer_block(self._reader, states, sums[:, self._found])
        if self._found > 0 and abs(scale - self.per_layer_scale) > 1e-4 * abs(scale):
            raise UnsupportedArchitecture("its layers scale their per-layer inputs differently")
        self.per_layer_scale = scale if self._found == 0 else self.per_layer_scale
        residual = find_residual(states, output, self._reader.next_hidden_states(states))
        if residual.scale != 1.0:
            raise UnsupportedArchitecture("its per-layer inputs enter the layers by other operations")
        return block, residual


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
    for layer in decoder.layers:
        mixer, mlp = layer.attention.mixer, layer.mlp
        yield from (*mixer.projections, layer.attention.output)
        if isinstance(mixer, LatentAttentionSpec):
            yield from (*mixer.keys, *mixer.values)
            if mixer.query_expansion is not None:
                yield mixer.query_expansion
        if mlp.gated is not None:
            yield from (*mlp.gated.inner, mlp.gated.down)
        if mlp.experts is not None:
            for each in (*mlp.experts.inner, mlp.experts.down):
                yield from each.matrices()
        if layer.per_layer is not None:
            yield from (layer.per_layer.gate, layer.per_layer.projection)
    if decoder.per_layer_inputs is not None:
        yield decoder.per_layer_inputs.projection
    yield decoder.output_head.head
