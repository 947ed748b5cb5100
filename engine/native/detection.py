"""Finds the decoder architecture of a loaded model from a trace, without regard to class names.

Every operation is recomputed from the output of the one before, and must give the traced input of the next one. So a
model with any other operation is unsupported by the native step, and runs in transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.model import hooks
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
    MlpBlock,
    Norm,
    OutputHead,
    PairInput,
    PerLayerBlock,
    QueryScale,
    RecurrenceSpec,
    UnsupportedArchitecture,
)
from engine.native.latent_attention import find_latent_attention
from engine.native.mlp_block import Residual, find_mlp_block, find_parallel_mlp_block, find_residual
from engine.native.per_layer import TracedPerLayerInputs, find_per_layer_block, find_per_layer_inputs
from engine.native.query_scale import query_scales
from engine.native.recurrence import find_recurrence
from engine.native.trace import TracedEmbedding, embedding_table, trace
from engine.native.trace_reader import Part, TraceReader


def find_decoder(
    model: Any,
    layers: Sequence[CachedLayer],
    *,
    vocabulary: int,
    context: int,
    pair_states: Callable[[int], Tensor] | None = None,
) -> DecoderSpec:
    """The decoder architecture of a model. Raises UnsupportedArchitecture.

    layers       with KV cells (engine/model/layers.py)
    context      the model's maximum context length
    pair_states  of a drafting layer, the hidden states [tokens, width] with which a number of tokens is traced
    """
    traced = trace(model, vocabulary=vocabulary, context=context)
    reader = TraceReader(traced.events)
    try:
        second_embedding = reader.read_event(TracedEmbedding) if reader.next_is(TracedEmbedding) else None
        states = reader.next_input()
        scale = least_squares_ratio(traced.embeddings, states)
        require_close("its first layer", traced.embeddings * scale, states)
        pair_input = None
        if pair_states is not None:
            pair_input, states = _find_pair_input(reader, states, pair_states(len(states)))
        inputs = None if second_embedding is None else find_per_layer_inputs(reader, second_embedding, states)
        scales = tuple(query_scales(model.config.get_text_config()))
        finder = _LayerFinder(reader, traced.positions, scales, layers, inputs)
        layer_specs = []
        while (part := reader.next_part(states)) != "head":
            layer, states = finder.find(part, states)
            layer_specs.append(layer)
        head = _find_output_head(reader, states, traced.logits, _config_numbers(model))
    except UnsupportedArchitecture as error:
        if traced.unsupported_modules:
            reason = f"{error.reason}; it has layers of the kind {traced.unsupported_modules[0]}"
            raise UnsupportedArchitecture(reason) from error
        raise
    table, rounds = embedding_table(model.get_input_embeddings())
    per_layer_inputs = None if inputs is None else inputs.spec(finder.per_layer_scale)
    return DecoderSpec(
        table,
        scale,
        _layers_of_modules(layer_specs, len(hooks.decoder_layers(model))),
        head,
        rounds_embeddings=rounds,
        per_layer_inputs=per_layer_inputs,
        pair_input=pair_input,
    )


def _find_pair_input(reader: TraceReader, embeddings: Tensor, states: Tensor) -> tuple[PairInput, Tensor]:
    """The input of a drafting layer, and the hidden states before its first half."""
    embedding_norm, embeddings = reader.read_norm(embeddings)
    state_norm, states = reader.read_norm(states)
    projection = reader.read_linear("the projection of pairs", torch.cat((embeddings, states), -1))
    if "none" in (embedding_norm.kind, state_norm.kind) or projection.linear.bias is not None:
        raise UnsupportedArchitecture("its pairs have no norms, or a projection with a bias")
    return PairInput(
        embedding_norm=embedding_norm, state_norm=state_norm, projection=projection.linear
    ), projection.output


def _layers_of_modules(layers: Sequence[DecoderLayer], count: int) -> tuple[DecoderLayer, ...]:
    """Layers, which have both halves where they can; with one half each if the model has so many layers."""
    halves = tuple(half for layer in layers for half in layer.halves)
    return halves if len(halves) == count else tuple(layers)


class _LayerFinder:
    """Finds the layers of a trace, one after the other.

    per_layer_scale  of all per-layer inputs
    """

    def __init__(
        self,
        reader: TraceReader,
        positions: Tensor,
        scales: Sequence[QueryScale | None],
        layers: Sequence[CachedLayer],
        per_layer_inputs: TracedPerLayerInputs | None,
    ) -> None:
        self._reader, self._positions, self._scales = reader, positions, scales
        self._per_layer_inputs = per_layer_inputs
        # By the number of a layer in its attention call: the layer with its cells, and the index of this one.
        self._cells = {
            number: (layer, index)
            for index, layer in enumerate(layers)
            for number in (layer.index, *layer.sharing_layers)
        }
        self._found = 0
        self.per_layer_scale = 1.0

    def find(self, part: Part, states: Tensor) -> tuple[DecoderLayer, Tensor]:
        """The next layer, which begins with `part`, and the hidden states after it."""
        reader = self._reader
        if part == "mlp":
            mlp, residual = find_mlp_block(reader, states)
            return self._finish(None, mlp, residual)
        norm, inputs = reader.read_norm(states)
        mixer, mixed = self._find_mixer(norm, inputs)
        projection = reader.read_linear("the output projection", mixed)
        post_norm, output = reader.read_norm(projection.output)
        next_input = reader.next_hidden_states(states)
        parallel = is_close(states, next_input) or is_close(inputs, next_input)
        scale = 1.0 if parallel else residual_ratio(states, output, next_input)
        attention = AttentionBlock(mixer=mixer, output=projection.linear, post_norm=post_norm, residual_scale=scale)
        if parallel:
            return self._finish(attention, *find_parallel_mlp_block(reader, states, norm, inputs, output))
        if reader.next_part(states + scale * output) == "mlp":
            return self._finish(attention, *find_mlp_block(reader, states + scale * output))
        residual = find_residual(states, output, next_input)
        return self._finish(replace(attention, residual_scale=residual.scale), None, residual)

    def _finish(
        self, attention: AttentionBlock | None, mlp: MlpBlock | None, residual: Residual
    ) -> tuple[DecoderLayer, Tensor]:
        """The layer with these halves and its third part, and the hidden states after it."""
        per_layer = None
        if self._per_layer_inputs is not None:
            if residual.output_scale != 1.0 or mlp is None or mlp.parallel:
                raise UnsupportedArchitecture("its per-layer inputs enter the layers by other operations")
            per_layer, residual = self._find_per_layer_block(residual.states, self._per_layer_inputs.sums)
        self._found += 1
        return DecoderLayer(attention, mlp, per_layer, residual.output_scale), residual.states

    def _find_mixer(self, norm: Norm, inputs: Tensor) -> tuple[CachedSpec | RecurrenceSpec, Tensor]:
        """The attention or recurrence of a layer, and its output."""
        reader = self._reader
        if reader.next_is_recurrence():
            return find_recurrence(norm, inputs, reader.read_until_output(inputs))
        before, traced = reader.read_until_attention()
        if traced.call.layer not in self._cells:
            raise UnsupportedArchitecture("a layer has no cells")
        cells = self._cells[traced.call.layer]
        arguments = (norm, inputs, before, traced.call, self._positions, self._scales, *cells)
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
        if layer.attention is not None:
            yield from _linears_of_attention(layer.attention)
        if layer.mlp is not None:
            yield from _linears_of_mlp(layer.mlp)
        if layer.per_layer is not None:
            yield from (layer.per_layer.gate, layer.per_layer.projection)
    if decoder.per_layer_inputs is not None:
        yield decoder.per_layer_inputs.projection
    if decoder.pair_input is not None:
        yield decoder.pair_input.projection
    yield decoder.output_head.head


def _linears_of_attention(block: AttentionBlock) -> Iterator[Linear]:
    mixer = block.mixer
    yield from (*mixer.projections, block.output)
    if isinstance(mixer, LatentAttentionSpec):
        yield from (*mixer.keys, *mixer.values)
        if mixer.query_expansion is not None:
            yield mixer.query_expansion


def _linears_of_mlp(block: MlpBlock) -> Iterator[Linear]:
    if block.gated is not None:
        yield from (*block.gated.inner, block.gated.down)
    if block.experts is not None:
        for matrices in (*block.experts.inner, block.experts.down):
            yield from matrices.matrices()
