"""Folders with tiny processors of many families, as their checkpoints have them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.media.processor import MediaProcessor
from engine.media.read_processor import read_processor

# Writes a marker for each image and sound, and texts as they are.
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% elif p.type == 'audio' %}AUDIO{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
_TILE = {"height": 28, "width": 28}
_CLIP = {"size": {"shortest_edge": 28}, "crop_size": _TILE}
_PATCHES = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_ROWS]
_QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_PIXELS = {"min_pixels": 28 * 28, "max_pixels": 56 * 84}


@dataclass(frozen=True)
class Family:
    """A processor: its class, its image processor or feature extractor, and special tokens of its tokenizer."""

    processor: str
    part: str
    part_settings: Mapping[str, Any]
    tokens: list[str]
    marker: str
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    audio_marker: str = "AUDIO"


FAMILIES = {
    "llava": Family("LlavaProcessor", "LlavaImageProcessorPil", _CLIP, ["<image>"], "<image>", settings=_PATCHES),
    "llava_next": Family(
        "LlavaNextProcessor",
        "LlavaNextImageProcessorPil",
        {**_CLIP, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
        ["<image>"],
        "<image>",
        settings=_PATCHES,
    ),
    "pixtral": Family(
        "PixtralProcessor",
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 64}, "patch_size": {"height": 16, "width": 16}},
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "[IMG]",
        settings={"patch_size": 16},
    ),
    "gemma3": Family(
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        {"size": _TILE},
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        "<start_of_image>",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {"image_seq_length": 4},
    ),
    "gemma4": Family(
        "Gemma4Processor",
        "Gemma4ImageProcessorPil",
        {"patch_size": 4, "pooling_kernel_size": 2},
        ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"],
        "<|image|>",
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        {"feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}},
        audio_marker="<|audio|>",
    ),
    "idefics3": Family(
        "Idefics3Processor",
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        _IDEFICS,
        "<image>",
        settings={"image_seq_len": 2},
    ),
    "smolvlm": Family(
        "SmolVLMProcessor",
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        _IDEFICS,
        "<image>",
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        },
        {"image_seq_len": 2},
    ),
    "qwen2_vl": Family("Qwen2VLProcessor", "Qwen2VLImageProcessorPil", _PIXELS, _QWEN, "<|image_pad|>"),
    "qwen2_5_vl": Family("Qwen2_5_VLProcessor", "Qwen2VLImageProcessorPil", _PIXELS, _QWEN, "<|image_pad|>"),
    "qwen3_vl": Family("Qwen3VLProcessor", "Qwen2VLImageProcessorPil", _PIXELS, _QWEN, "<|image_pad|>"),
    "internvl": Family(
        "InternVLProcessor",
        "GotOcr2ImageProcessorPil",
        {"size": _TILE, "crop_to_patches": True, "max_patches": 3},
        ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
        "<IMG_CONTEXT>",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        {"image_seq_length": 4},
    ),
    "qwen2_audio": Family(
        "Qwen2AudioProcessor",
        "WhisperFeatureExtractor",
        {"feature_size": 8, "chunk_length": 2},
        ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
        "IMAGE",
        audio_marker="<|AUDIO|>",
    ),
}
IMAGE_FAMILIES = [name for name in FAMILIES if name != "qwen2_audio"]


def save_processor(
    folder: Path, name: str, template: str = TEMPLATE, part_settings: Mapping[str, Any] | None = None
) -> Path:
    """The files of a family's processor in a folder."""
    family = FAMILIES[name]
    tokenizer = _tokenizer(family)
    tokenizer.chat_template = template.replace("IMAGE", family.marker).replace("AUDIO", family.audio_marker)
    tokenizer.save_pretrained(folder)
    getattr(transformers, family.part)(**(part_settings or family.part_settings)).save_pretrained(folder)
    settings = {"processor_class": family.processor, **family.settings}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


@cache
def media_processor(folder: Path) -> MediaProcessor:
    """The processor of a folder, in this process."""
    return MediaProcessor(read_processor(folder))


def random_image(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    """An image as the bytes of a file."""
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A random image as a file."""
    return encoded(random_image(width, height, seed))


def _tokenizer(family: Family) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>", *family.tokens])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=dict(family.named_tokens),
        model_input_names=["input_ids", "attention_mask"],
    )
