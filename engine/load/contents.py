"""Prepares a loaded multimodal model for images in its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import ModelUnsupported
from engine.load.read.checkpoint import error_line
from engine.load.read.text_part import RUN_ERRORS
from engine.media.capture import ContentsUnsupported
from engine.media.encoder import CapturingEncoder
from engine.media.samples import image_sample
from engine.model import hooks


def content_encoder(name: str, folder: Path, model: Any, *, budget_bytes: int) -> CapturingEncoder:
    """The encoder of a model in the dtype of its computation, after a check of one image. Raises ModelUnsupported."""
    try:
        sample = image_sample(folder)
        model.set_attn_implementation(_tower_attention(model))
        return CapturingEncoder(model, [sample], budget_bytes=budget_bytes)
    except ContentsUnsupported as error:
        raise ModelUnsupported(name, error.reason) from error
    except RUN_ERRORS as error:
        raise ModelUnsupported(name, f"its vision tower does not run ({error_line(error)})") from error


def _tower_attention(model: Any) -> dict[str, str]:
    """The attention implementation of the parts beside the text."""
    config, text = model.config, model.config.get_text_config(decoder=True)
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    attention = hooks.default_attention(model)
    return {key: attention for key, part in parts.items() if part is not None and part is not text}
