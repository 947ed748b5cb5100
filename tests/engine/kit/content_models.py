"""Folders of tiny models with the processors of their images or sounds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from tests.engine.kit.contents import FAMILIES, VOCABULARY, tiny_model
from tests.engine.media.processors import save_processor


@dataclass(frozen=True)
class ContentModel:
    """A model for the processor of its family.

    tower        settings of its tower for the sizes of the processor
    placeholder  and other tokens of the processor, by their names in the configuration
    processor    settings of the processor that differ
    """

    tower: dict[str, Any]
    placeholder: str
    tokens: dict[str, str] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    kind: str = "image"


_PATCHES = {"image_size": 28, "patch_size": 14}
_QWEN_TOKENS = {
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
CONTENT_MODELS = {
    "llava": ContentModel(_PATCHES, "<image>"),
    "gemma3": ContentModel(
        _PATCHES,
        "<image_soft_token>",
        {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
    ),
    "smolvlm": ContentModel(_PATCHES, "<image>", processor={"image_seq_len": 1}),
    "qwen2_vl": ContentModel({"patch_size": 14}, "<|image_pad|>", _QWEN_TOKENS),
    "qwen2_5_vl": ContentModel({"patch_size": 14, "window_size": 112}, "<|image_pad|>", _QWEN_TOKENS),
    "qwen3_vl": ContentModel({"patch_size": 14}, "<|image_pad|>", _QWEN_TOKENS),
    "pixtral": ContentModel({"patch_size": 16, "image_size": 64}, "[IMG]"),
    "qwen2_audio": ContentModel({"num_mel_bins": 8, "max_source_positions": 100}, "<|AUDIO|>", kind="audio"),
}


def save_content_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The whole model of a family, after it has been saved with its tokenizer and its processor."""
    content_model, family = CONTENT_MODELS[name], FAMILIES[name]
    save_processor(folder, name)
    file = folder / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | content_model.processor))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) <= VOCABULARY
    identity = tokenizer.convert_tokens_to_ids
    tower = "audio_config" if content_model.kind == "audio" else "vision_config"
    placeholders = dict.fromkeys((f"{content_model.kind}_token_id", f"{content_model.kind}_token_index"))
    settings = {
        **family.settings,
        tower: family.settings[tower] | content_model.tower,
        **dict.fromkeys(placeholders, identity(content_model.placeholder)),
        **{key: identity(token) for key, token in content_model.tokens.items()},
    }
    model = tiny_model(replace(family, settings=settings), dtype)
    model.save_pretrained(folder)
    return model
