"""Tiny random models with images or sounds in their prompts, and contents as their processors return them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM

from engine.media.encoder import ContentSample
from engine.model.encoder import to_numpy
from engine.types.array import Array
from engine.types.content import Content, ContentKind
from tests.engine.kit.families import plant

VOCABULARY = 300
IMAGE, VIDEO, AUDIO, BREAK, END, START = 290, 291, 292, 293, 294, 295

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 299,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_CLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 16,
    "initializer_range": 0.2,
}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
_PIXTRAL = {**_CLIP, "model_type": "pixtral", "head_dim": 8, "image_size": 32}
_WINDOWS = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_IMAGE_TOKEN = {"image_token_id": IMAGE, "image_token_index": IMAGE}
_VISION_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_INTERLEAVED = {**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_QWEN2_VISION = {
    "depth": 2,
    "embed_dim": 16,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "mlp_ratio": 2,
    "spatial_merge_size": 2,
}
_QWEN25_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "intermediate_size": 24,
    "spatial_merge_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
_QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "intermediate_size": 24,
    "spatial_merge_size": 2,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 64,
    "initializer_range": 0.2,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

Tensors = dict[str, Tensor]
# The inputs of one content, and its prompt tokens.
MakeContent = Callable[[Any, torch.Generator], tuple[Tensors, list[int]]]


@dataclass(frozen=True)
class Family:
    """A configuration, and contents of random size."""

    model_type: str
    settings: dict[str, Any]
    content: MakeContent
    kind: ContentKind = "image"


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator) * 2 - 1


def _choice(generator: torch.Generator, *options: Any) -> Any:
    return options[int(torch.randint(0, len(options), (), generator=generator))]


def _rows(model: Any, modality: str, inputs: Mapping[str, Tensor]) -> int:
    """The rows of features, by the method of the model."""
    name = f"get_{modality}_features"
    owner = model if hasattr(model, name) else model.base_model
    cast = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    with torch.no_grad():
        output = getattr(owner, name)(**cast, return_dict=True)
    features = getattr(output, "pooler_output", None)
    features = output.last_hidden_state if features is None else features
    parts = features if isinstance(features, list | tuple) else [features]
    return sum(part.reshape(-1, part.shape[-1]).shape[0] for part in parts)


def _square(
    model: Any, generator: torch.Generator, *, before: tuple[int, ...] = (), after: tuple[int, ...] = ()
) -> tuple[Tensors, list[int]]:
    arrays = {"pixel_values": _random(generator, 1, 3, 16, 16)}
    return arrays, [*before, *[IMAGE] * _rows(model, "image", arrays), *after]


def _tiles(model: Any, generator: torch.Generator) -> tuple[Tensors, list[int]]:
    """A small image and tiles of it, with the size before."""
    size = _choice(generator, [24, 40], [40, 24], [30, 30])
    arrays = {"pixel_values": _random(generator, 1, 5, 3, 16, 16), "image_sizes": torch.tensor([size])}
    return arrays, [IMAGE] * _rows(model, "image", arrays)


def _grid(_: Any, generator: torch.Generator) -> tuple[Tensors, list[int]]:
    height, width = (2 * int(torch.randint(2, 5, (), generator=generator)) for _ in range(2))
    pixels = _random(generator, height * width, 3 * 2 * 4 * 4)
    arrays = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}
    return arrays, [START, *[IMAGE] * (height * width // 4), END]


def _lines(_: Any, generator: torch.Generator) -> tuple[Tensors, list[int]]:
    """With a break token after each line but the last, which has an end token.

    Of two lines at least: transformers' Mistral 3 fails for an image of one feature.
    """
    height, width = (8 * int(torch.randint(2, 4, (), generator=generator)) for _ in range(2))
    arrays = {"pixel_values": _random(generator, 1, 3, height, width), "image_sizes": torch.tensor([[height, width]])}
    line = [*[IMAGE] * (width // 8), BREAK]
    return arrays, [*(line * (height // 8))[:-1], END]


def _split(model: Any, generator: torch.Generator) -> tuple[Tensors, list[int]]:
    """Several tiles with tokens before each."""
    count = int(torch.randint(1, 4, (), generator=generator))
    mask = torch.ones(1, count, 16, 16, dtype=torch.long)
    arrays = {"pixel_values": _random(generator, 1, count, 3, 16, 16), "pixel_attention_mask": mask}
    rows = _rows(model, "image", arrays) // count
    return arrays, [token for tile in range(count) for token in (START, 20 + tile, *[IMAGE] * rows)] + [START]


def _patches(model: Any, generator: torch.Generator, *, masked: bool) -> tuple[Tensors, list[int]]:
    """Padded patches, with their positions or with a mask."""
    height, width = _choice(generator, (4, 6), (6, 4), (4, 4))
    arrays = {"pixel_values": _random(generator, 1, 36, 3 * 4 * 4)}
    if masked:
        arrays["spatial_shapes"] = torch.tensor([[height, width]])
        arrays["pixel_attention_mask"] = (torch.arange(36) < height * width).long()[None]
    else:
        places = torch.full((1, 36, 2), -1)
        places[0, : height * width] = torch.tensor([(x, y) for y in range(height) for x in range(width)])
        arrays["image_position_ids"] = places
    return arrays, [START, *[IMAGE] * _rows(model, "image", arrays), END]


def _spectrogram(model: Any, generator: torch.Generator) -> tuple[Tensors, list[int]]:
    arrays = {"input_features": _random(generator, 1, 4, 24)}
    return arrays, [START, *[AUDIO] * _rows(model, "audio", arrays), END]


def _masked_spectrogram(
    _: Any, generator: torch.Generator, *, start: int = START, end: int = END
) -> tuple[Tensors, list[int]]:
    frames = _choice(generator, 16, 20, 24)
    mask = (torch.arange(24) < frames).long()[None]
    arrays = {"input_features": _random(generator, 1, 4, 24), "feature_attention_mask": mask}
    return arrays, [start, *[AUDIO] * (frames // 4), end]


def _omni(kind: ContentKind) -> Family:
    audio = {
        "num_mel_bins": 4,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "d_model": 16,
        "max_source_positions": 12,
        "n_window": 4,
        "output_dim": 32,
    }
    settings = {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": _QWEN25_VISION,
        "audio_config": audio,
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "audio_token_index": AUDIO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "audio_start_token_id": 280,
        "audio_end_token_id": 281,
    }
    content: MakeContent = _grid if kind == "image" else partial(_masked_spectrogram, start=280, end=281)
    return Family("qwen2_5_omni_thinker", settings, content, kind)


def _text(kind: str | None = None, **settings: Any) -> dict[str, Any]:
    return {**_TEXT, **settings, **({} if kind is None else {"model_type": kind})}


_CLIP_VISION = {**_CLIP, "model_type": "clip_vision_model"}
_FULL_PIXTRAL = {**_PIXTRAL, "patch_size": 8}
_TILED = {"image_grid_pinpoints": _PINPOINTS}

FAMILIES: dict[str, Family] = {
    "llava": Family("llava", {"text_config": _text("llama"), "vision_config": _CLIP_VISION, **_IMAGE_TOKEN}, _square),
    "llava_next": Family(
        "llava_next",
        {"text_config": _text("llama"), "vision_config": _CLIP_VISION, **_IMAGE_TOKEN, **_TILED},
        _tiles,
    ),
    "llava_onevision": Family(
        "llava_onevision",
        {
            "text_config": _text("qwen2"),
            "vision_config": _SIGLIP,
            **_IMAGE_TOKEN,
            "video_token_id": VIDEO,
            "video_token_index": VIDEO,
            **_TILED,
            "vision_feature_layer": -1,
        },
        _tiles,
    ),
    "pixtral": Family(
        "llava",
        {
            "text_config": _text("mistral"),
            "vision_config": _FULL_PIXTRAL,
            **_IMAGE_TOKEN,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        _lines,
    ),
    "mistral3": Family(
        "mistral3",
        {
            "text_config": _text("mistral"),
            "vision_config": _PIXTRAL,
            **_IMAGE_TOKEN,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        _lines,
    ),
    "qwen2_vl": Family(
        "qwen2_vl",
        {"text_config": _text(rope_parameters=_MROPE), "vision_config": _QWEN2_VISION, **_VISION_TOKENS},
        _grid,
    ),
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        {"text_config": _text(rope_parameters=_MROPE), "vision_config": _QWEN25_VISION, **_VISION_TOKENS},
        _grid,
    ),
    "qwen3_vl": Family(
        "qwen3_vl",
        {"text_config": _text(rope_parameters=_INTERLEAVED), "vision_config": _QWEN3_VISION, **_VISION_TOKENS},
        _grid,
    ),
    "qwen3_5": Family(
        "qwen3_5",
        {
            "text_config": _text(rope_parameters=_INTERLEAVED, **_DELTA),
            "vision_config": _QWEN3_VISION,
            **_VISION_TOKENS,
        },
        _grid,
    ),
    "gemma3": Family(
        "gemma3",
        {
            "text_config": _text(query_pre_attn_scalar=8, **_WINDOWS),
            "vision_config": _SIGLIP,
            **_IMAGE_TOKEN,
            "boi_token_index": START,
            "eoi_token_index": END,
            "mm_tokens_per_image": 4,
        },
        partial(_square, before=(START,), after=(END,)),
    ),
    "gemma4": Family(
        "gemma4",
        {
            "text_config": _text(
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=VOCABULARY,
                global_head_dim=8,
                use_bidirectional_attention="vision",
                **_WINDOWS,
            ),
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 32,
            },
            "audio_config": None,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": AUDIO,
            "boi_token_id": START,
            "eoi_token_id": END,
        },
        partial(_patches, masked=False),
    ),
    "paligemma": Family(
        "paligemma",
        {
            "text_config": _text("gemma"),
            "vision_config": {**_SIGLIP, "projection_dim": 32},
            **_IMAGE_TOKEN,
            "projection_dim": 32,
            "hidden_size": 32,
        },
        _square,
    ),
    "idefics3": Family(
        "idefics3",
        {
            "text_config": _text("llama"),
            "vision_config": {**_CLIP, "model_type": "idefics3_vision"},
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        _split,
    ),
    "smolvlm": Family(
        "smolvlm",
        {
            "text_config": _text("llama"),
            "vision_config": {**_CLIP, "model_type": "smolvlm_vision"},
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        _split,
    ),
    "internvl": Family(
        "internvl",
        {
            "text_config": _text("qwen2"),
            "vision_config": {**_CLIP, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
            "downsample_ratio": 0.5,
        },
        partial(_square, before=(START,)),
    ),
    "llama4": Family(
        "llama4",
        {
            "text_config": _text(
                num_local_experts=2, attention_chunk_size=16, intermediate_size_mlp=48, num_hidden_layers=4
            ),
            "vision_config": {
                **_CLIP,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "pixel_shuffle_ratio": 0.5,
                "intermediate_size": 64,
            },
            **_IMAGE_TOKEN,
        },
        _square,
    ),
    "glm4v": Family(
        "glm4v",
        {
            "text_config": _text(rope_parameters=_MROPE),
            "vision_config": {
                "depth": 2,
                "hidden_size": 16,
                "out_hidden_size": 32,
                "num_heads": 2,
                "patch_size": 4,
                "intermediate_size": 24,
                "image_size": 32,
                "spatial_merge_size": 2,
                "initializer_range": 0.2,
            },
            **_VISION_TOKENS,
            "image_start_token_id": START,
            "image_end_token_id": END,
            "video_start_token_id": 280,
            "video_end_token_id": 281,
        },
        _grid,
    ),
    "aya_vision": Family(
        "aya_vision",
        {
            "text_config": _text("cohere2", **_WINDOWS),
            "vision_config": _SIGLIP,
            **_IMAGE_TOKEN,
            "downsample_factor": 2,
            "vision_feature_layer": -1,
        },
        partial(_square, before=(START,)),
    ),
    "lfm2_vl": Family(
        "lfm2_vl",
        {
            "text_config": _text("lfm2", layer_types=["conv", "full_attention", "conv"], block_multiple_of=8),
            "vision_config": {
                **_CLIP,
                "model_type": "siglip2_vision_model",
                "num_patches": 36,
                "vision_use_head": False,
            },
            "image_token_id": IMAGE,
            "projector_hidden_size": 32,
            "downsample_factor": 2,
        },
        partial(_patches, masked=True),
    ),
    "qwen2_5_omni (image)": _omni("image"),
    "qwen2_5_omni (audio)": _omni("audio"),
    "qwen2_audio": Family(
        "qwen2_audio",
        {
            "text_config": _text("qwen2"),
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "d_model": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 24,
                "num_mel_bins": 4,
                "max_source_positions": 12,
            },
            "audio_token_index": AUDIO,
            "audio_token_id": AUDIO,
        },
        _masked_spectrogram,
        "audio",
    ),
    "voxtral": Family(
        "voxtral",
        {
            "text_config": _text("llama"),
            "audio_config": {
                "model_type": "voxtral_encoder",
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "num_mel_bins": 4,
                "max_source_positions": 12,
            },
            "audio_token_id": AUDIO,
        },
        _spectrogram,
        "audio",
    ),
}


def tiny_model(family: Family, dtype: torch.dtype = torch.float64) -> Any:
    """The whole model of a family."""
    torch.manual_seed(0)
    # Gemma 4 changes the list of its layer types in place.
    config = AutoConfig.for_model(family.model_type, **deepcopy(family.settings))
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    plant(model)
    model = model.to(dtype).requires_grad_(False)
    if dtype == torch.float64:
        # The default, a grouped matrix product, does not support float64.
        model.set_experts_implementation("eager")
    return model


def sample(family: Family, model: Any, seed: int) -> ContentSample:
    """A random content of a family."""
    tensors, tokens = family.content(model, torch.Generator().manual_seed(seed))
    arrays = tuple((name, array_of(tensor)) for name, tensor in tensors.items())
    digest = hashlib.sha256(f"{seed}".encode()).digest()
    return ContentSample(Content(family.kind, 0, len(tokens), digest, arrays), tuple(tokens))


def array_of(tensor: Tensor) -> Array:
    """The values of a tensor."""
    values = tensor.numpy()
    return Array(str(values.dtype), tuple(values.shape), values.tobytes())


@dataclass(frozen=True)
class Prompt:
    """A prompt with contents, and the inputs of the whole model for it."""

    tokens: tuple[int, ...]
    contents: tuple[Content, ...]
    inputs: Tensors


def prompt_of(family: Family, model: Any, *parts: int | ContentSample) -> Prompt:
    """The prompt of tokens and contents in this order."""
    tokens: list[int] = []
    contents: list[Content] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            contents.append(replace(part.content, start=len(tokens), stop=len(tokens) + len(part.tokens)))
            tokens += part.tokens
    return Prompt(tuple(tokens), tuple(contents), _inputs(family, model, tokens, contents))


def _inputs(family: Family, model: Any, tokens: list[int], contents: list[Content]) -> Tensors:
    ids = torch.tensor([tokens])
    # To PaliGemma, images are a part of the prefix as its text.
    placeholders = {} if family.model_type == "paligemma" else {IMAGE: 1, VIDEO: 2, AUDIO: 3}
    kinds = torch.tensor([[placeholders.get(token, 0) for token in tokens]])
    accepted = inspect.signature(type(model).forward).parameters
    inputs = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
    arrays: dict[str, list[Tensor]] = {}
    for content in contents:
        for name, array in content.arrays:
            tensor = torch.from_numpy(to_numpy(array).copy())
            arrays.setdefault(name, []).append(tensor.to(model.dtype) if tensor.is_floating_point() else tensor)
    joined = {name: _joined(tensors, tiles="pixel_attention_mask" in arrays) for name, tensors in arrays.items()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs, **joined}


def _joined(tensors: list[Tensor], *, tiles: bool) -> Tensor:
    """As a processor joins them: the tiles of a prompt are in one row, the others are padded to the largest."""
    if tiles and tensors[0].dim() >= 4:
        return torch.cat(tensors, 1)
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(tensors)
    sizes = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = [tensor.new_zeros(tensor.shape[0], *sizes) for tensor in tensors]
    for target, tensor in zip(padded, tensors, strict=True):
        target[tuple(map(slice, tensor.shape))] = tensor
    return torch.cat(padded)
