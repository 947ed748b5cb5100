"""The structures of the native step (step.h) for a decoder; they point into its tensors, which must outlive them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.cpu.products.linear import WEIGHT_FORMATS
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
    ExpertNorms,
    ExpertsSpec,
    GatedMlp,
    HeadColumns,
    LatentAttentionSpec,
    Linear,
    MlpBlock,
    Norm,
    NormKind,
    PairInput,
    PerLayerBlock,
    PerLayerInputs,
    RecurrenceSpec,
    RotarySpec,
    Scoring,
    StateSpaceSpec,
    UnsupportedArchitecture,
)
from engine.native.step_library import (
    MAX_PROJECTIONS,
    MAX_VALUES_FROM_KEYS,
    ColumnRangeFields,
    ConvolutionFields,
    DeltaRuleFields,
    EmbeddingFields,
    ExpertNormsFields,
    ExpertsFields,
    GatedConvolutionFields,
    HeadsFields,
    LatentAttentionFields,
    LayerFields,
    LinearFields,
    NormFields,
    PairInputFields,
    PerLayerFields,
    PerLayerInputsFields,
    RecurrenceFields,
    RotaryFields,
    StateSpaceFields,
)

# The enumerations of format.h and step.h.
_FLOAT_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
_NORMS: dict[NormKind, int] = {"none": 0, "root_mean_square": 1, "layer": 2}
_SCORINGS: dict[Scoring, int] = {"softmax": 0, "sigmoid": 1}
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu_squared": 4}


def describe_layers(decoder: DecoderSpec, rotaries: Sequence[RotarySpec]) -> list[LayerFields]:
    """All layers, without KV buffers and cell groups; `rotaries` are those of the step."""
    layers = []
    for index, layer in enumerate(decoder.layers):
        fields = LayerFields(output_scale=layer.output_scale)
        if layer.attention is not None:
            _describe_attention_block(layer.attention, rotaries, fields)
        if layer.mlp is not None:
            _describe_mlp_block(layer.mlp, fields)
        if layer.per_layer is not None:
            fields.per_layer = ctypes.pointer(_describe_per_layer_block(layer.per_layer, index))
        layers.append(fields)
    return layers


def _describe_attention_block(block: AttentionBlock, rotaries: Sequence[RotarySpec], fields: LayerFields) -> None:
    mixer = block.mixer
    fields.attention_norm = describe_norm(mixer.norm)
    if len(mixer.projections) > MAX_PROJECTIONS:
        raise UnsupportedArchitecture(f"its layers have more than {MAX_PROJECTIONS} projections")
    for index, linear in enumerate(mixer.projections):
        fields.projections[index] = describe_linear(linear)
    fields.projection_count = len(mixer.projections)
    if isinstance(mixer, AttentionSpec):
        _describe_attention(mixer, fields)
        fields.rotary = rotaries.index(mixer.rotary)
    elif isinstance(mixer, LatentAttentionSpec):
        _describe_latent_attention(mixer, fields)
        fields.rotary = rotaries.index(mixer.rotary)
    else:
        _describe_recurrence(mixer, fields)
    fields.output, fields.post_attention_norm = describe_linear(block.output), describe_norm(block.post_norm)
    fields.attention_residual_scale = block.residual_scale


def _describe_recurrence(recurrence: RecurrenceSpec, fields: LayerFields) -> None:
    ranges, convolution = _describe_ranges(recurrence.column_ranges), describe_convolution(recurrence.convolution)
    if isinstance(recurrence, DeltaRuleSpec):
        delta_rule = DeltaRuleFields(ranges, len(ranges), convolution)
        fields.delta_rule = ctypes.pointer(_describe_delta_rule(recurrence, delta_rule))
    elif isinstance(recurrence, StateSpaceSpec):
        state_space = StateSpaceFields(ranges, len(ranges), convolution)
        fields.state_space = ctypes.pointer(_describe_state_space(recurrence, state_space))
    else:
        fields.gated_convolution = ctypes.pointer(GatedConvolutionFields(ranges, len(ranges), convolution))


def recurrence_fields(recurrence: RecurrenceSpec, fields: LayerFields) -> RecurrenceFields:
    """The fields of a layer's recurrence, which have the addresses of its states."""
    if isinstance(recurrence, DeltaRuleSpec):
        pointer = fields.delta_rule
    elif isinstance(recurrence, StateSpaceSpec):
        pointer = fields.state_space
    else:
        pointer = fields.gated_convolution
    contents: RecurrenceFields = pointer.contents
    return contents


def _describe_delta_rule(spec: DeltaRuleSpec, fields: DeltaRuleFields) -> DeltaRuleFields:
    fields.key_heads, fields.value_heads = spec.key_heads, spec.value_heads
    fields.key_width, fields.value_width = spec.key_width, spec.value_width
    fields.decay_scale, fields.dt_bias = _address(spec.decay_scale), _address(spec.dt_bias)
    fields.max_beta = spec.max_beta
    fields.head_norm = describe_norm(spec.head_norm)
    return fields


def _describe_state_space(spec: StateSpaceSpec, fields: StateSpaceFields) -> StateSpaceFields:
    fields.heads, fields.groups = spec.heads, spec.groups
    fields.value_width, fields.key_width = spec.value_width, spec.key_width
    fields.decay_scale, fields.dt_bias, fields.skip = map(_address, (spec.decay_scale, spec.dt_bias, spec.skip))
    fields.min_dt, fields.max_dt = spec.dt_limits
    fields.group_norm = describe_norm(spec.group_norm)
    return fields


def describe_convolution(convolution: ConvolutionSpec) -> ConvolutionFields:
    """A convolution, without the addresses of its states."""
    kernel, channels = convolution.weights.shape
    return ConvolutionFields(_address(convolution.weights), _address(convolution.bias), kernel, channels)


def _describe_ranges(ranges: Sequence[ColumnRange]) -> ctypes.Array[ColumnRangeFields]:
    described = [
        ColumnRangeFields(column_range.matrix, column_range.offset, column_range.target, column_range.count)
        for column_range in ranges
    ]
    return (ColumnRangeFields * len(ranges))(*described)


def _describe_attention(spec: AttentionSpec, fields: LayerFields) -> None:
    fields.query_norm, fields.key_norm = describe_norm(spec.query_norm), describe_norm(spec.key_norm)
    fields.value_norm, fields.stores_cells = describe_norm(spec.value_norm), spec.stores
    fields.values_are_keys = spec.stores and spec.values == spec.keys
    if fields.values_are_keys and spec.values.width > MAX_VALUES_FROM_KEYS:
        raise UnsupportedArchitecture(f"its values are keys with more than {MAX_VALUES_FROM_KEYS} columns")
    over_all = [norm != NO_NORM and norm.width != spec.queries.width for norm in (spec.query_norm, spec.key_norm)]
    if any(over_all) and (not all(over_all) or spec.rotates_before_norm):
        raise UnsupportedArchitecture("the norms of its queries and keys are of another kind")
    fields.rotates_before_norm, fields.norms_all_heads = spec.rotates_before_norm, any(over_all)
    fields.queries, fields.keys, fields.values = (_heads(columns) for columns in (spec.queries, spec.keys, spec.values))
    if spec.gates is not None:
        fields.gates = _heads(spec.gates)
    fields.scale, fields.softcap, fields.sinks = spec.scale, spec.softcap, _address(spec.sinks)


def _describe_latent_attention(spec: LatentAttentionSpec, fields: LayerFields) -> None:
    latent_width, key_width = spec.latents.width, spec.latents.width + spec.rotary_columns.width
    fields.queries, fields.scale = _heads(spec.queries), spec.scale
    # The columns of cells; latents are keys and values.
    fields.keys, fields.values = HeadsFields(count=1, width=key_width), HeadsFields(count=1, width=latent_width)
    keys, values = (
        (LinearFields * len(matrices))(*map(describe_linear, matrices)) for matrices in (spec.keys, spec.values)
    )
    described = LatentAttentionFields(
        query_norm=describe_norm(spec.query_norm),
        latents=_heads(spec.latents),
        latent_norm=describe_norm(spec.latent_norm),
        rotary_columns=_heads(spec.rotary_columns),
        separates_pairs=spec.separates_pairs,
        keys=keys,
        values=values,
    )
    if spec.query_expansion is not None:
        described.query_expansion = describe_linear(spec.query_expansion)
    fields.latents = ctypes.pointer(described)


def _describe_mlp_block(block: MlpBlock, fields: LayerFields) -> None:
    fields.mlp_norm, fields.post_mlp_norm = describe_norm(block.norm), describe_norm(block.post_norm)
    fields.parallel, fields.mlp_residual_scale = block.parallel, block.residual_scale
    if block.gated is not None:
        _describe_gated_mlp(block.gated, fields)
    if block.experts is not None:
        fields.experts = ctypes.pointer(describe_experts(block.experts))


def _describe_per_layer_block(block: PerLayerBlock, index: int) -> PerLayerFields:
    return PerLayerFields(
        gate=describe_linear(block.gate),
        projection=describe_linear(block.projection),
        activation=_ACTIVATIONS[block.activation],
        norm=describe_norm(block.norm),
        layer=index,
    )


def describe_per_layer_inputs(inputs: PerLayerInputs) -> PerLayerInputsFields:
    """The inputs of the layers' third parts. Raises UnsupportedArchitecture as `describe_linear` does."""
    return PerLayerInputsFields(
        table=_describe_table(inputs.table, inputs.table_scale, rounds_to_bfloat16=inputs.rounds_table),
        projection=describe_linear(inputs.projection),
        projection_scale=inputs.projection_scale,
        norm=describe_norm(inputs.norm),
        scale=inputs.scale,
    )


def describe_pair_input(pair_input: PairInput) -> PairInputFields:
    """The input of a drafting layer. Raises UnsupportedArchitecture as `describe_linear` does."""
    return PairInputFields(
        embedding_norm=describe_norm(pair_input.embedding_norm),
        state_norm=describe_norm(pair_input.state_norm),
        projection=describe_linear(pair_input.projection),
    )


def _describe_gated_mlp(mlp: GatedMlp, fields: LayerFields) -> None:
    for index, linear in enumerate(mlp.inner):
        fields.inner[index] = describe_linear(linear)
    fields.inner_count, fields.down = len(mlp.inner), describe_linear(mlp.down)
    up = mlp.up or ColumnOffset(-1, 0)
    fields.gate_matrix, fields.gate_offset = mlp.gate.matrix, mlp.gate.offset
    fields.up_matrix, fields.up_offset = up.matrix, up.offset
    fields.activation = _ACTIVATIONS[mlp.activation]


def describe_experts(experts: ExpertsSpec) -> ExpertsFields:
    """The experts of a layer. Raises UnsupportedArchitecture for an unsupported dtype or memory layout."""
    router, activation = experts.router, experts.activation
    inner, *up, down = (
        (LinearFields * len(matrices))(*map(describe_linear, matrices))
        for matrices in [stack.matrices() for stack in (*experts.inner, experts.down)]
    )
    return ExpertsFields(
        router=describe_linear(router.linear),
        score_correction=_address(router.score_correction),
        scoring=_SCORINGS[router.scoring],
        top_k=router.top_k,
        normalised=router.normalised,
        scaling_factor=router.scaling_factor,
        scales_inputs=experts.scales_inputs,
        expert_scales=_address(router.expert_scales),
        inner=inner,
        up=up[0] if up else None,
        down=down,
        activation=_ACTIVATIONS[activation.activation],
        interleaved=activation.interleaved,
        limit=activation.limit,
        slope=activation.slope,
        shift=activation.shift,
        shared_gate=LinearFields() if experts.shared_gate is None else describe_linear(experts.shared_gate),
        norms=None if experts.norms is None else ctypes.pointer(_describe_expert_norms(experts.norms)),
    )


def _describe_expert_norms(norms: ExpertNorms) -> ExpertNormsFields:
    return ExpertNormsFields(*map(describe_norm, (norms.router, norms.input, norms.output, norms.dense)))


def describe_embedding(decoder: DecoderSpec) -> EmbeddingFields:
    """The embedding table. Raises UnsupportedArchitecture for an unsupported dtype or memory layout."""
    return _describe_table(decoder.embedding, decoder.scale, rounds_to_bfloat16=decoder.rounds_embeddings)


def _describe_table(table: Tensor | PackedMatrix, scale: float, *, rounds_to_bfloat16: bool) -> EmbeddingFields:
    if isinstance(table, PackedMatrix):
        return EmbeddingFields(
            table=table.codes.data_ptr(),
            scales=table.scales.data_ptr(),
            kind=WEIGHT_FORMATS[table.format],
            count=table.outputs,
            rounds_to_bfloat16=rounds_to_bfloat16,
            scale=scale,
        )
    if table.dtype not in _FLOAT_FORMATS or not table.is_contiguous():
        raise UnsupportedArchitecture(f"its embeddings are {table.dtype}, or not contiguous")
    return EmbeddingFields(table=table.data_ptr(), kind=_FLOAT_FORMATS[table.dtype], count=len(table), scale=scale)


def describe_rotary(rotary: RotarySpec, angles: tuple[Tensor, Tensor], query_factors: Tensor | None) -> RotaryFields:
    """A rotary embedding with its cosines and sines [positions, pairs] and the factors of queries [positions]."""
    cosine, sine = angles
    rotation = rotary.rotation
    interleaved = rotation.layout == "interleaved"
    tables = (cosine.data_ptr(), sine.data_ptr(), _address(query_factors))
    return RotaryFields(*tables, cosine.shape[1], rotation.offset, interleaved)


def describe_norm(norm: Norm) -> NormFields:
    """A norm."""
    return NormFields(_address(norm.weight), _address(norm.bias), _NORMS[norm.kind], norm.width, norm.epsilon)


def describe_linear(linear: Linear) -> LinearFields:
    """A linear layer. Raises UnsupportedArchitecture for an unsupported dtype or memory layout."""
    weight = linear.weight
    if isinstance(weight, PackedMatrix):
        return LinearFields(
            weights=weight.codes.data_ptr(),
            scales=weight.scales.data_ptr(),
            bias=_address(linear.bias),
            kind=WEIGHT_FORMATS[weight.format],
            outputs=weight.outputs,
            columns=weight.columns,
        )
    if weight.dtype not in _FLOAT_FORMATS or weight.stride(1) != 1 or weight.device.type != "cpu":
        raise UnsupportedArchitecture(f"a matrix is {weight.dtype}, or not stored by rows in CPU memory")
    outputs, columns = weight.shape
    return LinearFields(
        weights=weight.data_ptr(),
        bias=_address(linear.bias),
        kind=_FLOAT_FORMATS[weight.dtype],
        outputs=outputs,
        columns=columns,
        stride=weight.stride(0),
    )


def _heads(heads: HeadColumns) -> HeadsFields:
    return HeadsFields(heads.matrix, heads.offset, heads.stride, heads.count, heads.width)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
