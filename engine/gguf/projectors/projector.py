"""One type of projector in mmproj files: the model of transformers that it makes of a text model, and its processor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.gguf.architectures.settings import Fields
from engine.gguf.container import GgufError, GgufModel, GgufTensor
from engine.gguf.projectors.tower import TowerTensors

_PREFIX = "clip.vision."


class TowerFile:
    """The metadata of a vision tower, and its tensors by their present names."""

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
        finite = [float(f"{number:.7g}") for number in numbers if isinstance(number, float) and math.isfinite(number)]
        if len(finite) != 3:
            raise GgufError(f"its metadata {_PREFIX}{name} is not three numbers")
        return finite

    @property
    def side(self) -> int:
        """Patches in a row of the image that the tower is trained for."""
        return self.size("image_size") // self.size("patch_size")

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
        """The first converters exchanged the names of the two matrices of an MLP."""
        tensors, up = dict(model.tensors), model.tensors.get("v.blk.0.ffn_up.weight")
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
    """

    name: str
    texts: tuple[str, ...]
    model: str
    settings: Callable[[TowerFile, Any], Fields]
    tokens: Mapping[str, str]
    tensors: tuple[TowerTensors, ...]
    processor: Callable[[TowerFile], ProcessorFiles]
    text_prefix: str = "language_model."
    ignored: tuple[str, ...] = ()
