"""A decoder as the native step reads it: structures of addresses, made once. The decoder must outlive them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.packing import PackedMatrix
from engine.native.decoder import (
    NO_NORM,
    Activation,
    AttentionBlock,
    AttentionSpec,
    ColumnOffset,
    ColumnRange,
    ConvolutionSpec,
    DecoderSpec,
    DeltaRuleSpec,
    ExpertsSpec,
    GatedMlp,
    HeadColumns,
    Linear,
    MlpBlock,
    Norm,
    NormKind,
    RecurrenceSpec,
    RotarySpec,
    Scoring,
    StateSpaceSpec,
    UnsupportedArchitecture,
)
from engine.native.step_library import (
    MAX_PROJECTIONS,
    ColumnRangeFields,
    ConvolutionFields,
    DeltaRuleFields,
    EmbeddingFields,
    ExpertsFields,
    GatedConvolutionFields,
    HeadsFields,
    LayerFields,
    LinearFields,
    NormFields,
    RecurrenceFields,
    RotaryFields,
    StateSpaceFields,
)

# The enumerations of step.h.
_WEIGHTS = {torch.float32: 0, torch.bfloat16: 1}
_CODES = {8: 2, 4: 3}
_NORMS: dict[NormKind, int] = {"none": 0, "root_mean_square": 1, "layer": 2}
_SCORINGS: dict[Scoring, int] = {"softmax": 0, "sigmoid": 1}
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu_squared": 4}


def describe_layers(decoder: DecoderSpec, turns: Sequence[RotarySpec]) -> list[LayerFields]:
    """All layers but for their planes and cells; `turns` are those of a step."""
    layers = []
    for attention, mlp in decoder.layers:
        fields = LayerFields()
        _describe_attention(attention, turns, fields)
        _describe_mlp(mlp, fields)
        layers.append(fields)
    return layers


def _describe_attention(attention: AttentionBlock, turns: Sequence[RotarySpec], fields: LayerFields) -> None:
    way = attention.mixer
    fields.before_attention = describe_norm(way.norm)
    if len(way.projections) > MAX_PROJECTIONS:
        raise UnsupportedArchitecture("its layers have more projections than there is room for")
    for at, linear in enumerate(way.projections):
        fields.projections[at] = describe_linear(linear)
    fields.projection_count = len(way.projections)
    if isinstance(way, AttentionSpec):
        _describe_way(way, fields)
        fields.turn = turns.index(way.rotary)
    else:
        _describe_recurrence(way, fields)
    fields.output, fields.after_attention = describe_linear(attention.output), describe_norm(attention.post_norm)
    fields.attention_share = attention.residual_scale


def _describe_recurrence(way: RecurrenceSpec, fields: LayerFields) -> None:
    runs, convolution = _describe_runs(way.column_ranges), describe_convolution(way.convolution)
    if isinstance(way, DeltaRuleSpec):
        fields.delta = ctypes.pointer(_describe_delta(way, DeltaRuleFields(runs, len(runs), convolution)))
    elif isinstance(way, StateSpaceSpec):
        fields.space = ctypes.pointer(_describe_space(way, StateSpaceFields(runs, len(runs), convolution)))
    else:
        fields.sieve = ctypes.pointer(GatedConvolutionFields(runs, len(runs), convolution))


def recurrence_fields(way: RecurrenceSpec, fields: LayerFields) -> RecurrenceFields:
    """Where a layer's fields name its states."""
    place = (
        fields.delta
        if isinstance(way, DeltaRuleSpec)
        else fields.space
        if isinstance(way, StateSpaceSpec)
        else fields.sieve
    )
    own: RecurrenceFields = place.contents
    return own


def _describe_delta(delta: DeltaRuleSpec, fields: DeltaRuleFields) -> DeltaRuleFields:
    fields.key_heads, fields.value_heads = delta.key_heads, delta.value_heads
    fields.key_width, fields.value_width = delta.key_width, delta.value_width
    fields.speed, fields.shift, fields.most = _address(delta.decay_scale), _address(delta.dt_bias), delta.max_beta
    fields.norm = describe_norm(delta.head_norm)
    return fields


def _describe_space(space: StateSpaceSpec, fields: StateSpaceFields) -> StateSpaceFields:
    fields.heads, fields.groups = space.heads, space.groups
    fields.value_width, fields.key_width = space.value_width, space.key_width
    fields.speed, fields.shift, fields.direct = map(_address, (space.decay_scale, space.dt_bias, space.direct))
    fields.slowest, fields.fastest = space.dt_limits
    fields.norm = describe_norm(space.group_norm)
    return fields


def describe_convolution(convolution: ConvolutionSpec) -> ConvolutionFields:
    """A convolution's numbers, but for the addresses of states."""
    kernel, channels = convolution.weights.shape
    return ConvolutionFields(_address(convolution.weights), _address(convolution.bias), kernel, channels)


def _describe_runs(runs: Sequence[ColumnRange]) -> ctypes.Array[ColumnRangeFields]:
    return (ColumnRangeFields * len(runs))(
        *(ColumnRangeFields(run.matrix, run.offset, run.first, run.count) for run in runs)
    )


def _describe_way(way: AttentionSpec, fields: LayerFields) -> None:
    fields.of_queries, fields.of_keys = describe_norm(way.of_queries), describe_norm(way.of_keys)
    whole = [norm != NO_NORM and norm.width != way.keys.width for norm in (way.of_queries, way.of_keys)]
    if any(whole) and (not all(whole) or way.rotates_before_norm):
        raise UnsupportedArchitecture("its heads are brought to one size in another way")
    fields.turns_first, fields.norms_whole = way.rotates_before_norm, any(whole)
    fields.queries, fields.keys, fields.values = (_heads(own) for own in (way.queries, way.keys, way.values))
    if way.gates is not None:
        fields.gates = _heads(way.gates)
    fields.scale, fields.softcap, fields.sinks = way.scale, way.softcap, _address(way.sinks)


def _describe_mlp(mlp: MlpBlock, fields: LayerFields) -> None:
    fields.before_mlp, fields.after_mlp = describe_norm(mlp.norm), describe_norm(mlp.post_norm)
    fields.parallel, fields.mlp_share = mlp.parallel, mlp.residual_scale
    if mlp.gated is not None:
        _describe_gated(mlp.gated, fields)
    if mlp.experts is not None:
        fields.experts = ctypes.pointer(describe_experts(mlp.experts))


def _describe_gated(gated: GatedMlp, fields: LayerFields) -> None:
    for at, linear in enumerate(gated.inner):
        fields.inner[at] = describe_linear(linear)
    fields.inner_count, fields.down = len(gated.inner), describe_linear(gated.down)
    up = gated.up or ColumnOffset(-1, 0)
    fields.gate_matrix, fields.gate_offset = gated.gate.matrix, gated.gate.offset
    fields.up_matrix, fields.up_offset = up.matrix, up.offset
    fields.activation = _ACTIVATIONS[gated.activation]


def describe_experts(experts: ExpertsSpec) -> ExpertsFields:
    """A layer's experts. Raises UnsupportedArchitecture where they are stored in another way than the step reads."""
    router, gate = experts.router, experts.activation
    inner, down = (
        (LinearFields * len(matrices))(*map(describe_linear, matrices))
        for matrices in (experts.inner.matrices(), experts.down.matrices())
    )
    return ExpertsFields(
        router=describe_linear(router.linear),
        correction=_address(router.correction),
        scoring=_SCORINGS[router.scoring],
        chosen=router.top_k,
        renormalised=router.renormalised,
        factor=router.scaling_factor,
        inner=inner,
        down=down,
        activation=_ACTIVATIONS[gate.activation],
        alternating=gate.alternating,
        limit=gate.limit,
        slope=gate.slope,
        shift=gate.shift,
        share=LinearFields() if experts.shared_gate is None else describe_linear(experts.shared_gate),
    )


def describe_embedding(decoder: DecoderSpec) -> EmbeddingFields:
    """What rows begin as. Raises UnsupportedArchitecture where it is stored in another way than the step reads."""
    table = decoder.embedding
    if table.dtype not in _WEIGHTS or not table.is_contiguous():
        raise UnsupportedArchitecture(f"its embeddings are {table.dtype}, or have gaps")
    return EmbeddingFields(table.data_ptr(), _WEIGHTS[table.dtype], len(table), decoder.scale)


def describe_rotary(turn: RotarySpec, angles: tuple[Tensor, Tensor]) -> RotaryFields:
    """A way to turn, with its cosines and sines [positions, pairs]."""
    cosine, sine = angles
    own = turn.rotation
    return RotaryFields(cosine.data_ptr(), sine.data_ptr(), cosine.shape[1], own.offset, own.layout == "interleaved")


def describe_norm(norm: Norm) -> NormFields:
    """A norm's numbers and addresses."""
    return NormFields(_address(norm.weight), _address(norm.bias), _NORMS[norm.kind], norm.width, norm.epsilon)


def describe_linear(linear: Linear) -> LinearFields:
    """A matrix's. Raises UnsupportedArchitecture where it is stored in another way than the step reads."""
    weight = linear.weight
    if isinstance(weight, PackedMatrix):
        return LinearFields(
            weights=weight.codes.data_ptr(),
            scales=weight.scales.data_ptr(),
            bias=_address(linear.bias),
            kind=_CODES[weight.bits],
            outputs=weight.outputs,
            columns=weight.columns,
        )
    if weight.dtype not in _WEIGHTS or weight.stride(1) != 1 or weight.device.type != "cpu":
        raise UnsupportedArchitecture(
            f"a matrix is {weight.dtype}, or does not lie row by row in the processor's memory"
        )
    outputs, columns = weight.shape
    return LinearFields(
        weights=weight.data_ptr(),
        bias=_address(linear.bias),
        kind=_WEIGHTS[weight.dtype],
        outputs=outputs,
        columns=columns,
        stride=weight.stride(0),
    )


def _heads(heads: HeadColumns) -> HeadsFields:
    return HeadsFields(heads.matrix, heads.offset, heads.stride, heads.count, heads.width)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
