"""How the bundled model is presented: as a demonstration, next to models that fit this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.load.hub.catalogue import suggested_models
from engine.types.sizes import format_size
from server.configuration.settings import Settings

TEXT = "a demonstration: it knows Cellar, tools and JSON, and little else"
SMALL_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class OtherModel:
    """Another model for this machine.

    text  what it is, or its size
    """

    name: str
    text: str


def is_demonstration(settings: Settings) -> bool:
    """Whether the bundled model is served."""
    return settings.model is None


def other_models(available_bytes: int) -> Iterator[OtherModel]:
    """A small model, and up to three of the hub that fit the memory."""
    yield OtherModel(SMALL_MODEL, "98 MB, a small real model")
    for model in suggested_models(available_bytes):
        yield OtherModel(model.name, f"{model.size_bytes / 1e9:.1f} GB")


def other_model_lines(available_bytes: int, command: str) -> Iterator[str]:
    """The commands of the other models, after a heading."""
    models = list(other_models(available_bytes))
    yield f"models that fit {format_size(available_bytes)} of memory, downloaded once:"
    width = max(len(model.name) for model in models)
    for model in models:
        yield f"{command} {model.name:<{width}}  {model.text}"
