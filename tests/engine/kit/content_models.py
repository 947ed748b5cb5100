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

    tower         settings of its tower for the sizes of the processor
    placeholder   and other tokens of the processor, by their names in the configuration
    processor     settings of the processor that differ
    text          settings of its text that differ
    family        its name in `tests.engine.kit.contents`, if another one
    processor_of  the family of its processor, if another one
    """

    tower: dict[str, Any]
    placeholder: str
    tokens: dict[str, str] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    kind: str = "image"
    family: str | None = None
    processor_of: str | None = None


_PATCHES = {"image_size": 28, "patch_size": 14}
_QWEN_TOKENS = {
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_GEMMA3_TOKENS = {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
_GEMMA4_TOKENS = {"video_token_id": "<|video|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
_GEMMA4_TOWER = {"position_embedding_size": 288}
CONTENT_MODELS = {
    "llava": ContentModel(_PATCHES, "<image>"),
    "gemma3": ContentModel(_PATCHES, "<image_soft_token>", _GEMMA3_TOKENS),
    # Rows of whole blocks of quantised types.
    "gemma3_wide": ContentModel(
        {**_PATCHES, "hidden_size": 32, "intermediate_size": 64},
        "<image_soft_token>",
        _GEMMA3_TOKENS,
        family="gemma3",
    ),
    "gemma4": ContentModel(
        {**_GEMMA4_TOWER, "use_clipped_linears": True},
        "<|image|>",
        _GEMMA4_TOKENS,
        text={"use_bidirectional_attention": None},
    ),
    "gemma4_large": ContentModel(
        {**_GEMMA4_TOWER, "standardize": True},
        "<|image|>",
        _GEMMA4_TOKENS,
        text={"hidden_size_per_layer_input": 0},
        family="gemma4",
    ),
    "smolvlm": ContentModel(_PATCHES, "<image>", processor={"image_seq_len": 1}),
    "qwen2_vl": ContentModel({"patch_size": 14}, "<|image_pad|>", _QWEN_TOKENS),
    "qwen2_5_vl": ContentModel({"patch_size": 14, "window_size": 112}, "<|image_pad|>", _QWEN_TOKENS),
    "qwen3_vl": ContentModel({"patch_size": 14}, "<|image_pad|>", _QWEN_TOKENS),
    # The last layer is of full attention, as in published models.
    "qwen3_5": ContentModel(
        {"patch_size": 14, "deepstack_visual_indexes": []},
        "<|image_pad|>",
        _QWEN_TOKENS,
        text={"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        processor_of="qwen3_vl",
    ),
    "pixtral": ContentModel({"patch_size": 16, "image_size": 64}, "[IMG]"),
    "internvl": ContentModel({"image_size": [28, 28], "patch_size": [7, 7]}, "<IMG_CONTEXT>"),
    "qwen2_audio": ContentModel({"num_mel_bins": 8, "max_source_positions": 100}, "<|AUDIO|>", kind="audio"),
}


def save_content_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The whole model of a family, after it has been saved with its tokenizer and its processor."""
    content_model = CONTENT_MODELS[name]
    family_name = content_model.family or name
    family = FAMILIES[family_name]
    save_processor(folder, content_model.processor_of or family_name)
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
        "text_config": family.settings["text_config"] | content_model.text,
        **dict.fromkeys(placeholders, identity(content_model.placeholder)),
        **{key: identity(token) for key, token in content_model.tokens.items()},
    }
    model = tiny_model(replace(family, settings=settings), dtype)
    _vary_constants(model)
    model.save_pretrained(folder)
    return model


def _vary_constants(model: Any) -> None:
    """Random values for norms, biases, tables and limits, which are initialised to one value: exchanged or missing
    ones would have no effect.
    """
    generator = torch.Generator().manual_seed(0)
    for values in model.state_dict().values():
        if not values.is_floating_point() or not (values == values.flatten()[0]).all():
            continue
        noise = torch.randn(values.shape, generator=generator).to(values.dtype) / 4
        values.copy_(noise + (values.sign() if values.isinf().all() else values))
