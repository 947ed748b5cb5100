"""Whether a model is loaded with its vision and audio towers."""

from __future__ import annotations

from typing import Any

from engine.config import EngineConfig
from engine.load.read.checkpoint import Checkpoint
from engine.load.read.skeleton import unread_modalities

# Kinds of content that prompts may have.
_CONTENT_KINDS = ("image", "audio")
# Files of which a folder has at least one if its model can read images or audio.
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def text_only_reason(checkpoint: Checkpoint, config: Any, settings: EngineConfig) -> str | None:
    """Why the model is loaded without its towers, or has none; None: it is loaded with them."""
    if settings.no_media:
        return "--no-media"
    if checkpoint.tower_fault:
        return checkpoint.tower_fault
    if not set(_CONTENT_KINDS).intersection(unread_modalities(config)):
        return "its prompts have no images and no audio"
    if checkpoint.gguf is not None and checkpoint.tower is None:
        return "a GGUF file has no vision or audio tower"
    if settings.tensor_parallel > 1:
        return "--tensor-parallel computes text only"
    if checkpoint.gguf is None and not any((checkpoint.path / name).is_file() for name in _PROCESSOR_FILES):
        return f"the folder has no {' or '.join(_PROCESSOR_FILES)}"
    return None
