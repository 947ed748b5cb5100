"""Settings of a model: metadata of files and attributes of transformers' configurations, in both directions.

Values that files omit are those of llama.cpp, because files omit them for this reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from gguf.constants import GGMLQuantizationType

from engine.gguf.container import GgufError, GgufModel

_MAX_SIZE = 2**31 - 1

Fields = dict[str, Any]
Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]


class Inexpressible(Exception):
    """GGUF has no architecture, tensor, token kind or setting for a part of the model; the message names it."""


class Hyperparameters:
    """The metadata under the name of the architecture, and facts of the tensors."""

    def __init__(self, model: GgufModel) -> None:
        self.metadata, self.tensors = model.metadata, model.tensors
        self.architecture = self.metadata.text("general.architecture")
        self.context = self.size("context_length")
        self.hidden, self.heads = self.size("embedding_length"), self._attention_heads()
        if self.heads > self.hidden:
            raise GgufError(f"its metadata counts {self.heads} heads for {self.hidden} columns")
        self.layers = self.size("block_count") - self.integer("nextn_predict_layers", 0)
        self.head_width = self.size("attention.key_length", max(self.hidden // self.heads, 1))
        if not 0 < self.layers <= len(self.tensors):
            raise GgufError(f"its metadata counts {self.layers} layers, but it has {len(self.tensors)} tensors")

    def key(self, name: str) -> str:
        """The key of a value of this architecture."""
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether the file carries a value."""
        return self.key(name) in self.metadata

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer. Raises GgufError."""
        return self.metadata.integer(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        """A number. Raises GgufError."""
        return self.metadata.number(self.key(name), default)

    def positive(self, name: str, default: float) -> float:
        """A number above 0. Raises GgufError."""
        value = self.number(name, default)
        if value <= 0:
            raise GgufError(f"its metadata {self.key(name)} is {value}, not above 0")
        return value

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """A boolean. Raises GgufError."""
        return self.metadata.boolean(self.key(name), default)

    def text(self, name: str, default: str | None = None) -> str:
        """A string. Raises GgufError."""
        return self.metadata.text(self.key(name), default)

    def size(self, name: str, default: int | None = None) -> int:
        """An integer above 0, the same in all layers. Raises GgufError."""
        if isinstance(self.metadata.get(self.key(name)), list):
            return self._uniform_size(name)
        value = self.integer(name, default)
        if not 0 < value <= _MAX_SIZE:
            raise GgufError(f"its metadata {self.key(name)} is {value}, no size")
        return value

    def sizes(self, name: str) -> list[int]:
        """An integer of each layer, 0 or more; one for all layers in most files. Raises GgufError."""
        value = self.metadata.get(self.key(name))
        values = value if isinstance(value, list) else [value] * self.layers
        sizes = [size for size in values if isinstance(size, int) and 0 <= size <= _MAX_SIZE]
        if len(sizes) != len(values) or len(sizes) < self.layers:
            raise GgufError(f"its metadata {self.key(name)} is not one size for each of {self.layers} layers")
        return sizes[: self.layers]

    def factors(self, tensor: str) -> list[float]:
        """The values of a small float32 tensor, such as the factors of rotary frequencies. Raises GgufError."""
        match = self.tensors.get(tensor)
        if match is None:
            raise GgufError(f"it lacks the tensor {tensor}")
        if match.type != GGMLQuantizationType.F32 or len(match.shape) != 1:
            raise GgufError(f"the tensor {tensor} is no vector in F32")
        factors: list[float] = match.data.view(np.float32).tolist()
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise GgufError(f"the tensor {tensor} has factors that are not positive")
        return factors

    def has_tensor(self, part: str) -> bool:
        """Whether a tensor has a part of a name."""
        return any(part in name for name in self.tensors)

    def _uniform_size(self, name: str) -> int:
        sizes = set(self.metadata[self.key(name)])  # type: ignore[arg-type]
        value = sizes.pop() if len(sizes) == 1 else 0
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
            raise GgufError(f"its metadata {self.key(name)} differs between layers, which {self.architecture} excludes")
        return value

    def _attention_heads(self) -> int:
        """The heads of the layers with attention; others may have 0."""
        name = "attention.head_count"
        counts = self.metadata.get(self.key(name))
        heads = {count for count in counts if count != 0} if isinstance(counts, list) else set()
        if len(heads) == 1 and all(isinstance(count, int) and 0 < count <= _MAX_SIZE for count in heads):
            return int(heads.pop())
        return self.size(name)


class Setting(Protocol):
    """One setting, or a few that depend on each other."""

    def read(self, file: Hyperparameters) -> Fields:
        """The attributes of the configuration. Raises GgufError."""
        ...

    def write(self, config: Any) -> Mapping[str, Value]:
        """The metadata, without the name of the architecture. Raises Inexpressible."""
        ...


class _Required:
    """The default of a value that files must have."""


_REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of the metadata that is one attribute of the configuration.

    default  where the file omits it; without one it is required
    zero     attribute for a value of 0 (None, for example: the mechanism is off); by default 0
    """

    key: str
    attribute: str
    kind: Literal["size", "integer", "number", "boolean"]
    default: Any = _REQUIRED
    zero: Any = 0

    def read(self, file: Hyperparameters) -> Fields:
        """See Setting."""
        default = None if isinstance(self.default, _Required) else self.default
        value = getattr(file, self.kind)(self.key, default)
        return {self.attribute: value if value or self.kind == "boolean" else self.zero}

    def write(self, config: Any) -> Mapping[str, Value]:
        """See Setting. An attribute that the configuration lacks is omitted."""
        value = getattr(config, self.attribute, None)
        if value is None:
            return {}
        return {self.key: float(value) if self.kind == "number" else value}


@dataclass(frozen=True, slots=True)
class Fixed:
    """An attribute that has one value in the architecture; models with another one are not written."""

    attribute: str
    value: Any

    def read(self, file: Hyperparameters) -> Fields:
        """See Setting."""
        return {self.attribute: self.value}

    def write(self, config: Any) -> Mapping[str, Value]:
        """See Setting."""
        value = getattr(config, self.attribute, self.value)
        if value != self.value:
            raise Inexpressible(f"{self.attribute} must be {self.value!r} in GGUF, not {value!r}")
        return {}


@dataclass(frozen=True, slots=True)
class Derived:
    """Values and attributes that two functions convert, inverse to each other."""

    reads: Callable[[Hyperparameters], Fields] = lambda file: {}
    writes: Callable[[Any], Mapping[str, Value]] = lambda config: {}

    def read(self, file: Hyperparameters) -> Fields:
        """See Setting."""
        return self.reads(file)

    def write(self, config: Any) -> Mapping[str, Value]:
        """See Setting."""
        return self.writes(config)


def head_size(config: Any) -> int:
    """Columns of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
