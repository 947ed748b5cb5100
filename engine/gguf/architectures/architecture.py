"""One architecture of GGUF files as a model type of transformers, for reading and for writing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.gguf.architectures.layouts import Layout
from engine.gguf.architectures.settings import Fields, Hyperparameters, Setting, Value


def _always(_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Architecture:
    """Later settings override the values of earlier ones.

    name     of the architecture in files
    model    model type of transformers
    layouts  of parameters that files hold otherwise than transformers; the first one with a fitting pattern counts
    applies  whether a file of this architecture is this model; the first one of the table counts
    fits     whether a configuration of this model type is written like this; likewise
    written  further model types that are written as this architecture, and read as `model`
    ignored  pattern of tensors that files may have without an effect
    """

    name: str
    model: str
    settings: tuple[Setting, ...]
    layouts: tuple[Layout, ...] = ()
    applies: Callable[[Hyperparameters], bool] = _always
    fits: Callable[[Any], bool] = _always
    written: tuple[str, ...] = ()
    ignored: str | None = None

    def read(self, file: Hyperparameters) -> Fields:
        """The attributes of the configuration. Raises GgufError."""
        fields: Fields = {}
        for setting in self.settings:
            fields |= setting.read(file)
        return fields

    def write(self, config: Any) -> dict[str, Value]:
        """The metadata of a configuration, with the architecture's prefix. Raises Inexpressible."""
        values: dict[str, Value] = {}
        for setting in self.settings:
            values |= setting.write(config)
        return {f"{self.name}.{key}": value for key, value in values.items()}
