"""One type of projector in mmproj files: the model of transformers that it makes of a text model, and its processor."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.gguf.architectures.settings import Fields
from engine.gguf.container import GgufError, GgufModel, GgufTensor
from engine.gguf.projectors.tower import TowerTensors

_PREFIX = "clip.vision."
_deep = re.compile(r"v\.deepstack\.(\d+)\.")


class TowerFile:
    """The metadata of a vision tower, and its tensors by their present names.

    deep_layers  whose features the text model gets beside those of the last layer
    """

    def __init__(self, model: GgufModel) -> None:
        self._metadata = model.metadata
        self.name = model.files[0].name
        self.tensors = self._renamed(model)

    @property
    def projector(self) -> str:
        """The type of the projector. Raises GgufError."""
        return self._metadata.text(f"{_PREFIX}projector_type", self._metadata.text("clip.projector_type", "mlp"))

    def size(self, name: str, default: int | None = None) -> int:
        """An integer above 0. Raises GgufError."""
        value = self._metadata.integer(_PREFIX + name, default)
        if value <= 0:
            raise GgufError(f"its metadata {_PREFIX}{name} is {value}, no size")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number. Raises GgufError."""
        return self._metadata.number(_PREFIX + name, default)

    def channels(self, name: str) -> list[float]:
        """A finite number for each of three colours. Raises GgufError."""
        values = self._metadata.get(_PREFIX + name)
        numbers = values if isinstance(values, list) else []
        # The shortest decimal number of a float32 is the original.
        finite = [float(str(np.float32(x))) for x in numbers if isinstance(x, float) and math.isfinite(x)]
        if len(finite) != 3:
            raise GgufError(f"its metadata {_PREFIX}{name} is not three numbers")
        return finite

    @property
    def side(self) -> int:
        """Patches in a row of the image that the tower is trained for."""
        return self.size("image_size") // self.size("patch_size")

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor."""
        return tensor in self.tensors

    def rows(self, tensor: str) -> int:
        """The outputs of a matrix. Raises GgufError."""
        return self.shape(tensor)[0]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor, its columns last. Raises GgufError."""
        if tensor not in self.tensors:
            raise GgufError(f"it lacks the tensor {tensor}")
        return tuple(self.tensors[tensor].shape)

    def integers(self, name: str) -> list[int]:
        """A list of integers; empty without it. Raises GgufError."""
        values = self._metadata.get(_PREFIX + name) if self.knows(name) else []
        integers = [value for value in values if isinstance(value, int)] if isinstance(values, list) else None
        if integers is None or integers != values:
            raise GgufError(f"its metadata {_PREFIX}{name} is no list of integers")
        return integers

    def flag(self, key: str) -> bool:
        """A boolean that is the same for images and audio; false without it. Raises GgufError."""
        return self._metadata.boolean(f"clip.{key}", False)

    def knows(self, name: str) -> bool:
        """Whether the file carries a value."""
        return _PREFIX + name in self._metadata

    def tower(self) -> Fields:
        """The settings that all towers have. Raises GgufError."""
        return {
            "hidden_size": self.size("embedding_length"),
            "intermediate_size": self.size("feed_forward_length"),
            "num_hidden_layers": self.size("block_count"),
            "num_attention_heads": self.size("attention.head_count"),
            "image_size": self.size("image_size"),
            "patch_size": self.size("patch_size"),
        }

    def pixels(self) -> Fields:
        """The normalisation of an image. Raises GgufError."""
        return {"image_mean": self.channels("image_mean"), "image_std": self.channels("image_std")}

    def _renamed(self, model: GgufModel) -> dict[str, GgufTensor]:
        """The mergers of deep layers by their number, not by their layer. The first converters exchanged the names of
        the two matrices of an MLP.
        """
        layers = sorted({int(match[1]) for name in model.tensors if (match := _deep.match(name))})
        numbers = {layer: number for number, layer in enumerate(layers)}
        tensors = {
            _deep.sub(lambda match: f"v.deepstack.{numbers[int(match[1])]}.", name): tensor
            for name, tensor in model.tensors.items()
        }
        self.deep_layers, up = layers, tensors.get("v.blk.0.ffn_up.weight")
        width, inner = (self._metadata.integer(_PREFIX + key, 0) for key in ("embedding_length", "feed_forward_length"))
        if up is None or width == inner or up.shape != (width, inner):
            return tensors
        names = {".ffn_up.": ".ffn_down.", ".ffn_down.": ".ffn_up."}
        return {
            next((name.replace(old, new) for old, new in names.items() if old in name), name): tensor
            for name, tensor in tensors.items()
        }


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """What the files of a processor say, for transformers.

    named_tokens  attributes of its tokenizer
    """

    processor_class: str
    image_processor: str
    image_settings: Fields
    settings: Fields = field(default_factory=dict)
    named_tokens: Mapping[str, str] = field(default_factory=dict)


def _same(text: Fields) -> Fields:
    return text


def _projection_width(file: TowerFile) -> int:
    return file.size("projection_dim")


def _always(_: TowerFile) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Projector:
    """A type of projector with the text models of one family.

    name         in files
    texts        model types of the text
    model        model type of the whole
    settings     of the whole model, beside its text
    tokens       texts of special tokens by the attribute of the configuration; all must be in the vocabulary
    tensors      of the parameters, whose names begin with `model.`
    processor    of images
    text_prefix  of the parameters of the text, after `model.`
    text         the settings of the text for those of the language model alone
    applies      whether a file is of this model; the first one of the table counts
    ignored      patterns of tensors that files may have without an effect
    width        of the language model that a file is for
    """

    name: str
    texts: tuple[str, ...]
    model: str
    settings: Callable[[TowerFile, Any], Fields]
    tokens: Mapping[str, str]
    tensors: tuple[TowerTensors, ...]
    processor: Callable[[TowerFile], ProcessorFiles]
    text_prefix: str = "language_model."
    text: Callable[[Fields], Fields] = _same
    applies: Callable[[TowerFile], bool] = _always
    ignored: tuple[str, ...] = ()
    width: Callable[[TowerFile], int] = _projection_width
