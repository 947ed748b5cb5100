"""Finds per-layer inputs in a trace: rows of a second embedding table that enter every layer through a gate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.native.comparison import least_squares_ratio, relative_difference, require_close
from engine.native.decoder import Linear, Norm, PerLayerBlock, PerLayerInputs, UnsupportedArchitecture
from engine.native.gated_mlp import ACTIVATIONS
from engine.native.trace import TracedEmbedding, TracedLinear, TracedNorm, embedding_table
from engine.native.trace_reader import TraceReader

_UNSUPPORTED = "its per-layer inputs are computed by other operations"


@dataclass(frozen=True, slots=True)
class TracedPerLayerInputs:
    """The per-layer inputs of a trace.

    sums  [rows, layers, width]: the rows of the table plus the normed projections, not scaled
    """

    embedding: TracedEmbedding
    table_scale: float
    projection: Linear
    projection_scale: float
    norm: Norm
    sums: Tensor

    def spec(self, scale: float) -> PerLayerInputs:
        """With the scale of the sums."""
        table, rounds = embedding_table(self.embedding.module)
        return PerLayerInputs(
            table=table,
            table_scale=self.table_scale,
            rounds_table=rounds,
            projection=self.projection,
            projection_scale=self.projection_scale,
            norm=self.norm,
            scale=scale,
        )


def find_per_layer_inputs(reader: TraceReader, embedding: TracedEmbedding, states: Tensor) -> TracedPerLayerInputs:
    """The per-layer inputs from the rows of `embedding` and the scaled embeddings `states`."""
    projection = reader.read_linear("the projection of per-layer inputs", states)
    norm = reader.read_event(TracedNorm)
    rows, columns = embedding.output.shape
    width = norm.input.shape[1]
    if projection.output.shape != (rows, columns) or norm.input.numel() != rows * columns or columns % width:
        raise UnsupportedArchitecture(_UNSUPPORTED)
    projection_scale = least_squares_ratio(projection.output, norm.input.view(rows, columns))
    require_close("the norm of per-layer inputs", projection.output * projection_scale, norm.input.view(rows, columns))
    table_scale = least_squares_ratio(embedding.weights, embedding.output)
    require_close("per-layer inputs", embedding.weights * table_scale, embedding.output)
    return TracedPerLayerInputs(
        embedding=embedding,
        table_scale=table_scale,
        projection=projection.linear,
        projection_scale=projection_scale,
        norm=norm.norm,
        sums=(norm.output.view(rows, columns) + embedding.output).view(rows, columns // width, width),
    )


def find_per_layer_block(reader: TraceReader, states: Tensor, sums: Tensor) -> tuple[PerLayerBlock, float, Tensor]:
    """The third part of a layer, the scale of its input, and its output before it is added to the hidden states.

    sums  [rows, width], the layer's input, not scaled
    """
    gate = reader.read_linear("the gate of a per-layer input", states)
    product = reader.next_input()
    projection = reader.read_event(TracedLinear)
    norm, output = reader.read_norm(projection.output)
    if sums.shape != product.shape or gate.output.shape != sums.shape:
        raise UnsupportedArchitecture(_UNSUPPORTED)
    # The activation with the smallest error: for large inputs gelu and its approximation are close.
    unscaled = {name: activate(gate.output) * sums for name, activate in ACTIVATIONS.items()}
    scales = {name: least_squares_ratio(rows, product) for name, rows in unscaled.items()}
    best = min(unscaled, key=lambda name: relative_difference(unscaled[name] * scales[name], product))
    require_close("the projection of a per-layer input", unscaled[best] * scales[best], product)
    return PerLayerBlock(gate.linear, best, projection.linear, norm), scales[best], output
