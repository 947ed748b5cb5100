"""A decoder as the native step reads it: structures of addresses, made once. The decoder must outlive them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.native.decoder import Activation, Columns, Decoder, Heads, Linear, Mlp, Norm, NormKind, NoShape, Turn, Way
from engine.native.library import HeadsFields, LayerFields, LinearFields, NormFields
from engine.quantize.layers import QuantizedLinear

# The enumerations of step.h.
_WEIGHTS = {torch.float32: 0, torch.bfloat16: 1}
# By words of codes in a group, engine/kernels/packing.py: as many as a code has bits.
_CODES = {8: 2, 4: 3}
_NORMS: dict[NormKind, int] = {"none": 0, "root_mean_square": 1, "layer": 2}
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu_squared": 4}


def describe_layers(decoder: Decoder, turns: Sequence[Turn]) -> list[LayerFields]:
    """All layers but for their planes and cells; `turns` are those of a step."""
    layers = []
    for attention, mlp in decoder.layers:
        fields = LayerFields(output=describe_linear(attention.output))
        _describe_way(attention.way, fields)
        fields.turn = turns.index(attention.way.turn)
        _describe_mlp(mlp, fields)
        layers.append(fields)
    return layers


def _describe_way(way: Way, fields: LayerFields) -> None:
    fields.before_attention = describe_norm(way.norm)
    fields.of_queries, fields.of_keys = describe_norm(way.of_queries), describe_norm(way.of_keys)
    for at, linear in enumerate(way.projections):
        fields.projections[at] = describe_linear(linear)
    fields.projection_count, fields.scale = len(way.projections), way.scale
    fields.queries, fields.keys, fields.values = (_heads(own) for own in (way.queries, way.keys, way.values))


def _describe_mlp(mlp: Mlp, fields: LayerFields) -> None:
    fields.before_mlp = describe_norm(mlp.norm)
    for at, linear in enumerate(mlp.inner):
        fields.inner[at] = describe_linear(linear)
    fields.inner_count, fields.down = len(mlp.inner), describe_linear(mlp.down)
    up = mlp.up or Columns(-1, 0)
    fields.gate_matrix, fields.gate_offset = mlp.gate.matrix, mlp.gate.offset
    fields.up_matrix, fields.up_offset = up.matrix, up.offset
    fields.activation, fields.parallel = _ACTIVATIONS[mlp.activation], mlp.parallel


def describe_norm(norm: Norm) -> NormFields:
    """A norm's numbers and addresses."""
    return NormFields(_address(norm.weight), _address(norm.bias), _NORMS[norm.kind], norm.width, norm.epsilon)


def describe_linear(linear: Linear) -> LinearFields:
    """A matrix's. Raises NoShape where it is stored in another way than the step reads."""
    bias = linear.bias
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise NoShape(f"a bias is {bias.dtype}")
    if isinstance(linear, QuantizedLinear):
        codes, scales = linear.codes, linear.scales
        assert isinstance(codes, Tensor)
        assert isinstance(scales, Tensor)
        return LinearFields(
            weights=codes.data_ptr(),
            scales=scales.data_ptr(),
            bias=_address(bias),
            kind=_CODES[codes.shape[2]],
            outputs=linear.out_features,
            columns=linear.in_features,
        )
    weight = linear.weight
    if weight.dtype not in _WEIGHTS or weight.stride(1) != 1 or weight.device.type != "cpu":
        raise NoShape(f"a matrix is {weight.dtype}, or does not lie row by row in the processor's memory")
    outputs, columns = weight.shape
    return LinearFields(
        weights=weight.data_ptr(),
        bias=_address(bias),
        kind=_WEIGHTS[weight.dtype],
        outputs=outputs,
        columns=columns,
        stride=weight.stride(0),
    )


def _heads(heads: Heads) -> HeadsFields:
    return HeadsFields(heads.matrix, heads.offset, heads.stride, heads.count, heads.width)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
