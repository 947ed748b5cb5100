"""The architecture of a decoder in the native step: its layers as weights and parameters of a few operations.

states > (norm) > projections > (norm) > rotary embedding > attention > (gate) > output > (norm) > + states
states > (norm) > inner matrices > activation (* up) > down > (norm) > + states

A layer has one of these halves or both. In place of attention over keys and values, layers may have attention over
latents (LatentAttentionSpec) or recurrences over states (DeltaRuleSpec, StateSpaceSpec, GatedConvolutionSpec).
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
    """The native step cannot compute the model, for a human-readable `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer.

    weight  [outputs, columns], the model's own tensor or quantised
    bias    [outputs] float32, or None
    """

    weight: Tensor | PackedMatrix
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over `width` columns.

    weight, bias  [width] float32; None: 1 and 0
    """

    kind: NormKind
    width: int
    epsilon: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None


NO_NORM = Norm("none", 0)


@dataclass(frozen=True, slots=True)
class HeadColumns:
    """Columns of heads in the output of projection `matrix`: `stride` columns from head to head."""

    matrix: int
    offset: int
    stride: int
    count: int
    width: int


@dataclass(frozen=True, slots=True)
class QueryScale:
    """The factor of queries at a position: 1 + beta * log(1 + floor((position + offset) / length))."""

    beta: float
    length: float
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """The rotary embedding of queries and keys.

    scaling      multiplies rotated columns (YaRN)
    query_scale  multiplies queries after it; None: by 1
    """

    rotation: Rotation
    scaling: float
    query_scale: QueryScale | None = None


@dataclass(frozen=True, slots=True)
class ColumnOffset:
    """The first of some columns in the output of inner matrix `matrix`."""

    matrix: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention over KV cells.

    cells                 the layer of the cache that it reads
    stores                whether it writes its keys and values to these cells; else they are an earlier layer's
    query_norm, key_norm  over each head, or over all heads of a row
    value_norm            over each head
    rotates_before_norm   whether the rotary embedding comes before these norms
    scale, softcap        of the scores; softcap 0: none
    sinks                 [heads] float32, scores that take part in the softmax without a value; None: none
    gates                 the attention output is multiplied by their sigmoid; None: no gates
    """

    norm: Norm
    projections: tuple[Linear, ...]
    cells: int
    stores: bool
    queries: HeadColumns
    keys: HeadColumns
    values: HeadColumns
    query_norm: Norm
    key_norm: Norm
    value_norm: Norm
    rotates_before_norm: bool
    rotary: RotarySpec
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    gates: HeadColumns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec:
    """Attention over latents (MLA, arXiv 2405.04434), with the projections of latents absorbed.

    A cell holds [latent, rotary part]: the key of all heads, and its latent is their value. So the keys' projection is
    applied to the queries, and the values' projection to the output.

    cells            the layer of the cache that it reads and writes
    query_expansion  of the normed output of projection `queries.matrix`; None: queries are outputs of that projection
    queries          heads [key_width + rotary_width] in the output of the expansion or the projection
    latents          one head; normed by `latent_norm`
    rotary_columns   one head
    separates_pairs  whether columns of rotary parts alternate before the rotation: the first and the second of a pair
    rotary           of cells, and of queries with absorbed projections
    keys, values     of each head: [latent_width, key_width] and [value_width, latent_width]
    """

    norm: Norm
    projections: tuple[Linear, ...]
    cells: int
    query_norm: Norm
    query_expansion: Linear | None
    queries: HeadColumns
    latents: HeadColumns
    latent_norm: Norm
    rotary_columns: HeadColumns
    separates_pairs: bool
    rotary: RotarySpec
    keys: tuple[Linear, ...]
    values: tuple[Linear, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """`count` columns of the output of projection `matrix`, copied to columns from `target` on."""

    matrix: int
    offset: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A depthwise causal convolution; its state are the last inputs [channels, kernel - 1].

    weights  [kernel, channels] float32
    bias     [channels] float32, or None
    """

    weights: Tensor
    bias: Tensor | None
    state_name: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedConvolutionSpec:
    """A gated short convolution: third * convolution(first * second).

    column_ranges  the three factors
    """

    norm: Norm
    projections: tuple[Linear, ...]
    column_ranges: tuple[ColumnRange, ...]
    convolution: ConvolutionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleSpec:
    """Linear attention by the gated delta rule (arXiv 2412.06464).

    column_ranges         channels of queries, keys and values, head by head, then the decay, beta and gate inputs
    convolution           of the channels, activated by SiLU
    decay_scale, dt_bias  [value_heads] float32: decay = exp(-decay_scale * softplus(input + dt_bias))
    max_beta              beta = max_beta * sigmoid(input)
    head_norm             of the values of a head, before they are multiplied by silu(gate)
    state_name            of its state [1, value_heads, key_width, value_width]
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
    """A selective state space (Mamba-2, arXiv 2405.21060).

    column_ranges         channels of values, keys and queries, then the dt inputs of the heads, a gap of `heads`
                          columns, and the gates
    convolution           of the channels, activated by SiLU
    groups                of heads that share keys and queries
    decay_scale, dt_bias  [heads] float32: decay = exp(-decay_scale * dt), dt = softplus(input + dt_bias)
    skip                  [heads] float32, times the values added to the output
    dt_limits             dt is clamped to this range
    group_norm            of groups of values, after their gates; its weight is [heads * value_width]
    state_name            of its state [1, heads, value_width, key_width]
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
    skip: Tensor
    dt_limits: tuple[float, float]
    group_norm: Norm
    state_name: Hashable


CachedSpec: TypeAlias = AttentionSpec | LatentAttentionSpec
RecurrenceSpec: TypeAlias = DeltaRuleSpec | StateSpaceSpec | GatedConvolutionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """The first half of a layer.

    residual_scale  multiplies its output (after post_norm) before it is added to the hidden states
    """

    mixer: CachedSpec | RecurrenceSpec
    output: Linear
    post_norm: Norm
    residual_scale: float


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate) * up), or without up; gate and up are columns of the outputs of the inner matrices."""

    inner: tuple[Linear, ...]
    gate: ColumnOffset
    up: ColumnOffset | None
    activation: Activation
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses `top_k` experts for each row by the softmax or sigmoid scores of a linear layer.

    score_correction  [experts] float32, added to the scores for the choice only; None: none
    normalised        whether the weights of the chosen experts are normalised to a sum of 1
    scaling_factor    multiplies the weights after that
    expert_scales     [experts] float32, multiply the weights of the chosen experts as well; None: none
    """

    linear: Linear
    scoring: Scoring
    score_correction: Tensor | None
    top_k: int
    normalised: bool
    scaling_factor: float
    expert_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One matrix of each expert.

    weight  the model's tensor [experts, outputs, columns], if `transposed` [experts, columns, outputs]; or quantised
    bias    [experts, outputs] float32, or None
    """

    weight: Tensor | tuple[PackedMatrix, ...]
    transposed: bool = False
    bias: Tensor | None = None

    def matrix(self, expert: int) -> Linear:
        """The matrix of one expert; its weight is a view of the model's tensor."""
        weight = self.weight[expert]
        matrix = weight.T if self.transposed and isinstance(weight, Tensor) else weight
        return Linear(matrix, None if self.bias is None else self.bias[expert])

    def matrices(self) -> list[Linear]:
        """The matrices of all experts."""
        return [self.matrix(expert) for expert in range(len(self.weight))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertActivation:
    """The input of the `down` matrix of an expert: activation(slope * gate) / slope * (up + shift).

    has_ups      without ups: activation(gate), with limit, slope and shift as if they were not there
    interleaved  gates and ups alternate; else all gates come first
    limit        gates are clamped to at most `limit`, ups to [-limit, limit]; infinite: not clamped
    """

    activation: Activation
    has_ups: bool
    interleaved: bool
    limit: float
    slope: float
    shift: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNorms:
    """The norms of experts that read the hidden states, as the dense MLP next to them does after its own norm.

    router         of the router's input
    input, output  of the experts
    dense          of the output of the dense MLP, before that of the experts is added
    """

    router: Norm
    input: Norm
    output: Norm
    dense: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts.

    inner          one matrix with 2 * width outputs, gates and ups; or the one of the gates and the one of the ups; or,
                   without ups, the one of the gates
    down           with width columns
    shared_gate    with one output; the dense MLP next to the experts is multiplied by its sigmoid; None: by 1
    norms          None: router and experts have the input of the dense MLP, and outputs are added without norms
    scales_inputs  whether the weights of the router multiply the inputs of experts, not their outputs
    """

    router: Router
    inner: tuple[ExpertMatrices, ...]
    activation: ExpertActivation
    down: ExpertMatrices
    shared_gate: Linear | None
    norms: ExpertNorms | None = None
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpBlock:
    """The second half of a layer: a dense MLP, experts, or the sum of both.

    residual_scale  multiplies its output (after post_norm) before it is added to the hidden states
    parallel        its input are the hidden states before the first half
    """

    norm: Norm
    gated: GatedMlp | None
    experts: ExpertsSpec | None
    post_norm: Norm
    residual_scale: float
    parallel: bool


@dataclass(frozen=True, slots=True)
class PerLayerBlock:
    """A third part of a layer: states + norm(projection(activation(gate(states)) * the layer's per-layer input))."""

    gate: Linear
    activation: Activation
    projection: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A layer with a first half, a second one or both; the hidden states after it are multiplied by `output_scale`."""

    attention: AttentionBlock | None
    mlp: MlpBlock | None
    per_layer: PerLayerBlock | None = None
    output_scale: float = 1.0

    @property
    def halves(self) -> tuple[DecoderLayer, ...]:
        """The layer as layers with one half each, where that is the same."""
        can_split = self.attention is not None and self.mlp is not None and not self.mlp.parallel
        if not can_split or self.per_layer is not None or self.output_scale != 1.0:
            return (self,)
        return DecoderLayer(self.attention, None), DecoderLayer(None, self.mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputs:
    """Inputs of the layers' third parts, from the embeddings of the tokens.

    scale * (table_scale * table[token] + norm(projection_scale * projection(embeddings)))

    table         [vocabulary, layers * width]
    rounds_table  whether weights of a quantised table are rounded to bfloat16
    projection    to [layers * width]
    norm          over the `width` columns of each layer
    """

    table: Tensor | PackedMatrix
    table_scale: float
    rounds_table: bool
    projection: Linear
    projection_scale: float
    norm: Norm
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInput:
    """The input of a drafting layer (MTP): projection([embedding_norm(embedding), state_norm(state)])."""

    embedding_norm: Norm
    state_norm: Norm
    projection: Linear


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Logits: softcap * tanh(scale * head(norm(states)) / softcap); softcap 0: scale * head(norm(states))."""

    norm: Norm
    head: Linear
    scale: float
    softcap: float

    @property
    def is_linear(self) -> bool:
        """Whether logits are the outputs of `head`, neither scaled nor capped."""
        return self.scale == 1.0 and self.softcap == 0.0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder.

    embedding          [vocabulary, width]; embeddings are multiplied by `scale`
    rounds_embeddings  whether weights of a quantised embedding are rounded to bfloat16
    pair_input         None: the first layer's input are the embeddings
    """

    embedding: Tensor | PackedMatrix
    scale: float
    layers: tuple[DecoderLayer, ...]
    output_head: OutputHead
    rounds_embeddings: bool = False
    per_layer_inputs: PerLayerInputs | None = None
    pair_input: PairInput | None = None

    @property
    def mixers(self) -> tuple[CachedSpec | RecurrenceSpec | None, ...]:
        """The attention or recurrence of each layer; None for layers without a first half."""
        return tuple(None if layer.attention is None else layer.attention.mixer for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return any(layer.mlp is not None and layer.mlp.experts is not None for layer in self.layers)

    @property
    def width(self) -> int:
        """Numbers of a hidden state."""
        return self.embedding.columns if isinstance(self.embedding, PackedMatrix) else self.embedding.shape[1]
