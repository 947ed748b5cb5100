"""What the native step knows of a model: its layers as the parts of one common shape.

states > norm > projections > (norm) > turn > attention > output > + states
states > norm > inner matrices > activation (times up) > down > + states
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor, nn

from engine.quantize.layers import QuantizedLinear
from kvcache.spec import Rotation

Linear: TypeAlias = nn.Linear | QuantizedLinear
NormKind = Literal["none", "root_mean_square", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


class NoShape(Exception):
    """The model is of another shape, for a `reason` that people can read."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


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


@dataclass(frozen=True, slots=True)
class Heads:
    """Where heads lie in what the projection of number `matrix` makes of a row: `stride` columns from head to head."""

    matrix: int
    offset: int
    stride: int
    count: int
    width: int


@dataclass(frozen=True, slots=True)
class Turn:
    """How queries and keys turn; the turned columns are `scaling` times as large (YaRN)."""

    rotation: Rotation
    scaling: float


@dataclass(frozen=True, slots=True)
class Columns:
    """Where some columns begin in what the inner matrix of number `matrix` makes of a row."""

    matrix: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How states become queries, keys and values; `scale` is what scores are multiplied by."""

    norm: Norm
    projections: tuple[Linear, ...]
    queries: Heads
    keys: Heads
    values: Heads
    of_queries: Norm
    of_keys: Norm
    turn: Turn
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The first half of a layer; `layer` is its place among those that store."""

    layer: int
    way: Way
    output: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """The second half: activation(gate) * up, or without up. It is `parallel` if it reads what the first half read."""

    norm: Norm
    inner: tuple[Linear, ...]
    gate: Columns
    up: Columns | None
    activation: Activation
    down: Linear
    parallel: bool


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model of the common shape; `scale` is what embeddings are multiplied by, `head` what makes the logits."""

    embedding: nn.Module
    scale: float
    layers: tuple[tuple[Attention, Mlp], ...]
    last: Norm
    head: Linear
