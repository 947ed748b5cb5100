"""What the native step knows of a model: its layers as the parts of one common shape.

states > (norm) > projections > (norm) > turn > attention > (gate) > output > (norm) > + states
states > (norm) > inner matrices > activation (times up) > down > (norm) > + states

In place of attention over cells, layers may have recurrences over states of their own (`DeltaRuleSpec`, `StateSpaceSpec`, `GatedConvolutionSpec`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from engine.kernels.packing import PackedMatrix
from kvcache.spec import Rotation

NormKind = Literal["none", "root_mean_square", "layer"]
Scoring = Literal["softmax", "sigmoid"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


class UnsupportedArchitecture(Exception):
    """The model is of another shape, for a `reason` that people can read."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix that rows are multiplied by, and what is added.

    weight  [outputs, columns] as the model holds it, or quantised
    bias    [outputs] float32, or None
    """

    weight: Tensor | PackedMatrix
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """What brings a row to one size: (row - its mean, if the kind is "layer") / its deviation * weight + bias.

    weight, bias  [width] float32; None: 1 and 0
    """

    kind: NormKind
    width: int
    epsilon: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None


# In place of a norm that a model has not.
NO_NORM = Norm("none", 0)


@dataclass(frozen=True, slots=True)
class HeadColumns:
    """Where heads lie in what the projection of number `matrix` makes of a row: `stride` columns from head to head."""

    matrix: int
    offset: int
    stride: int
    count: int
    width: int


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """How queries and keys turn; the turned columns are `scaling` times as large (YaRN)."""

    rotation: Rotation
    scaling: float


@dataclass(frozen=True, slots=True)
class ColumnOffset:
    """Where some columns begin in what the inner matrix of number `matrix` makes of a row."""

    matrix: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """How states become queries, keys and values, and how these are compared.

    of_queries, of_keys  norms of each head, or of a row's heads all at once
    rotates_before_norm          whether heads turn before their norms
    scale, softcap       what scores are multiplied by, and what bounds them; 0: nothing does
    sinks                [heads] float32, scores that take their part of a row's weights; None: there are none
    gates                of which the sigmoid weights what attention makes; None: there are none
    """

    norm: Norm
    projections: tuple[Linear, ...]
    queries: HeadColumns
    keys: HeadColumns
    values: HeadColumns
    of_queries: Norm
    of_keys: Norm
    rotates_before_norm: bool
    rotary: RotarySpec
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    gates: HeadColumns | None = None


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """`count` columns of what the projection of number `matrix` makes of a row, and the first place that they go to."""

    matrix: int
    offset: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A causal convolution of each channel by itself; its state are the last inputs [channels, kernel - 1].

    weights  [kernel, channels] float32
    bias     [channels] float32, or None
    name     of its state
    """

    weights: Tensor
    bias: Tensor | None
    name: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedConvolutionSpec:
    """A convolution between two products.

    column_ranges  bring columns to their places: channels, what they are multiplied by, and what comes out is multiplied by
    """

    norm: Norm
    projections: tuple[Linear, ...]
    column_ranges: tuple[ColumnRange, ...]
    convolution: ConvolutionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleSpec:
    """Linear attention by the gated delta rule: how it is made from a row, and what it keeps from row to row.

    column_ranges         bring columns to their places: channels of queries, keys and values, one head after the other, then
                 what makes each head's decay, its rate, and its gate
    convolution  whose sums are activated by silu
    speed, shift [value_heads] float32: a decay is exp(-speed * softplus(column + shift))
    max_beta         a rate is so many times sigmoid(column)
    head_norm    of a head's values, before they are multiplied by silu(gate)
    state_name         of its state [1, value_heads, key_width, value_width]
    """

    norm: Norm
    projections: tuple[Linear, ...]
    column_ranges: tuple[ColumnRange, ...]
    convolution: ConvolutionSpec
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    decay_scale: Tensor
    dt_bias: Tensor
    max_beta: float
    head_norm: Norm
    state_name: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceSpec:
    """A state space whose numbers are chosen by each token (Mamba-2).

    column_ranges          bring columns to their places: channels of values, keys and queries, then what makes each head's
                  pace, and behind room for as many numbers the gates
    convolution   whose sums are activated by silu
    groups        of heads that share keys and queries
    speed, shift  [heads] float32: a decay is exp(-speed * pace), a pace is softplus(column + shift)
    direct        [heads] float32, by how much values are added to what is told of them
    dt_limits         the least and the greatest
    group_norm    of so many values at a time, behind their gates; its weight is [heads * value_width]
    state_name          of its state [1, heads, value_width, key_width]
    """

    norm: Norm
    projections: tuple[Linear, ...]
    column_ranges: tuple[ColumnRange, ...]
    convolution: ConvolutionSpec
    heads: int
    groups: int
    value_width: int
    key_width: int
    decay_scale: Tensor
    dt_bias: Tensor
    direct: Tensor
    dt_limits: tuple[float, float]
    group_norm: Norm
    state_name: Hashable


RecurrenceSpec: TypeAlias = DeltaRuleSpec | StateSpaceSpec | GatedConvolutionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """The first half of a layer; what comes out of the norm `after` is added to the states `residual_scale` times."""

    mixer: AttentionSpec | RecurrenceSpec
    output: Linear
    post_norm: Norm
    residual_scale: float


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """activation(gate) * up, or without up, of what the inner matrices make, times the last one."""

    inner: tuple[Linear, ...]
    gate: ColumnOffset
    up: ColumnOffset | None
    activation: Activation
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses experts for each row, by scores that are the softmax of what `linear` makes, or its sigmoid.

    correction    [experts] float32, added where experts are chosen; None: nothing is
    renormalised  whether the weights of the chosen have a sum of 1, before they are multiplied by `scaling_factor`
    """

    linear: Linear
    scoring: Scoring
    correction: Tensor | None
    top_k: int
    renormalised: bool
    scaling_factor: float


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """A matrix for each expert.

    weight  as the model holds it [experts, outputs, columns], [experts, columns, outputs] if `transposed`; or quantised
    bias    [experts, outputs] float32, or None
    """

    weight: Tensor | tuple[PackedMatrix, ...]
    transposed: bool = False
    bias: Tensor | None = None

    def matrix(self, expert: int) -> Linear:
        """That of one expert, as it lies in memory now."""
        weight = self.weight[expert]
        turned = weight.T if self.transposed and isinstance(weight, Tensor) else weight
        return Linear(turned, None if self.bias is None else self.bias[expert])

    def matrices(self) -> list[Linear]:
        """Those of all experts."""
        return [self.matrix(expert) for expert in range(len(self.weight))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertActivation:
    """What experts make of 2 * width numbers: activation(slope * gate) / slope * (up + shift).

    alternating  gates and ups stand in turns; else all gates stand first
    limit        gates are at most that, and ups no further from 0; infinite where nothing bounds them
    """

    activation: Activation
    alternating: bool
    limit: float
    slope: float
    shift: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Of each row what the chosen ones make of it.

    inner        of 2 * width outputs, which go through the gate
    down         of width columns
    shared_gate  of one output, whose sigmoid weights what the layer's own matrices make; None: nothing does
    """

    router: Router
    inner: ExpertMatrices
    activation: ExpertActivation
    down: ExpertMatrices
    shared_gate: Linear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpBlock:
    """The second half: matrices that all rows go through, experts, or both.

    parallel  it reads what the first half reads
    """

    norm: Norm
    gated: GatedMlp | None
    experts: ExpertsSpec | None
    post_norm: Norm
    residual_scale: float
    parallel: bool


DecoderLayer: TypeAlias = tuple[AttentionBlock, MlpBlock]


@dataclass(frozen=True, slots=True)
class OutputHead:
    """What makes logits: of the states' norm times `head`, `scale` times, between -softcap and softcap; 0: anywhere."""

    norm: Norm
    head: Linear
    scale: float
    softcap: float

    @property
    def is_linear(self) -> bool:
        """Whether logits are what the head makes."""
        return self.scale == 1.0 and self.softcap == 0.0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A model of the common shape.

    embedding  [vocabulary, width], of which rows enter the first layer `scale` times as large
    """

    embedding: Tensor
    scale: float
    layers: tuple[DecoderLayer, ...]
    output_head: OutputHead
