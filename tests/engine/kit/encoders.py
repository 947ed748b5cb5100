"""Tiny random models with cross attention to an encoder, in folders for the loader, and media for them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.generation import GenerationMixin

from engine.types.array import Array
from engine.types.request import Media
from tests.engine.kit.models import CONTEXT, END, VOCABULARY, save_tokenizer

START = 256
# Beyond the vocabulary, as in Llama 3.2 Vision.
IMAGE = VOCABULARY
# Sizes of a spectrogram and an image, and the tiles of an image.
BINS, FRAMES, SIZE, TILES = 4, 24, 8, 4

_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "eos_token_id": END, "pad_token_id": 0, "bos_token_id": START}
_ENCODER_DECODER: dict[str, Any] = {
    **_TEXT,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "init_std": 0.2,
    "decoder_start_token_id": START,
    "tie_word_embeddings": False,
}
_MLLAMA: dict[str, Any] = {
    "text_config": {
        **_TEXT,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": [1],
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": SIZE,
        "patch_size": 4,
        "vision_output_dim": 32,
        "intermediate_layers_indices": [0],
        "initializer_range": 0.2,
    },
    "image_token_index": IMAGE,
}

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {**_ENCODER_DECODER, "max_position_embeddings": CONTEXT, "forced_eos_token_id": None},
    ),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **_ENCODER_DECODER,
            "num_mel_bins": BINS,
            "max_source_positions": FRAMES // 2,
            "max_target_positions": CONTEXT,
        },
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            **_TEXT,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
            "decoder_start_token_id": START,
            "tie_word_embeddings": False,
        },
    ),
    "mllama": ("MllamaConfig", "MllamaForConditionalGeneration", _MLLAMA),
}


def save_encoder_model(kind: str, folder: Path) -> Path:
    """Write a tiny model of a kind, the same at every call, with a tokenizer."""
    config_name, class_name, settings = KINDS[kind]
    torch.manual_seed(sum(kind.encode()))
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**settings))
    for parameter in model.parameters():
        # Wide enough to make the media change the text; zero gates would hide them.
        if parameter.dim() > 1 or parameter.numel() == 1:
            torch.nn.init.normal_(parameter, std=2.0 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = END
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def array(numbers: np.ndarray[Any, Any]) -> Array:
    """A numpy array as an Array of a request."""
    return Array(str(numbers.dtype), numbers.shape, numbers.tobytes())


def media(kind: str, seed: int, size: int = 7) -> Media:
    """Media for a kind of model; a free length (of images: their number) is `size`."""
    generator = np.random.default_rng(seed)
    if kind == "whisper":
        return Media.of({"input_features": array(generator.standard_normal((BINS, FRAMES)).astype(np.float32))})
    if kind == "mllama":
        tiles = np.zeros((size, TILES), np.int64)
        for image in range(size):
            tiles[image, : generator.integers(1, TILES + 1)] = 1
        pixels = generator.standard_normal((size, TILES, 3, SIZE, SIZE)).astype(np.float32)
        ratios = tiles.sum(-1).astype(np.int64)
        return Media.of(
            {"pixel_values": array(pixels), "aspect_ratio_ids": array(ratios), "aspect_ratio_mask": array(tiles)}
        )
    return Media.of({"input_ids": array(generator.integers(3, 250, (size,)))})


def prompt(kind: str, seed: int, length: int, images: int = 0) -> tuple[int, ...]:
    """A prompt for the decoder, with the tokens of some images in it."""
    generator = random.Random(seed)
    tokens = [START, *(generator.randrange(3, 250) for _ in range(length - 1))]
    for _ in range(images if kind == "mllama" else 0):
        tokens.insert(generator.randrange(1, len(tokens) + 1), IMAGE)
    return tuple(tokens)


class Alone:
    """transformers alone: one sequence, its own encoder run and caches."""

    def __init__(self, kind: str, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        self.model = getattr(transformers, KINDS[kind][1]).from_pretrained(folder, dtype=dtype).eval()
        self.encoder_decoder = bool(self.model.config.is_encoder_decoder)
        self.greedy = cache(self._greedy)

    def _greedy(self, prompt: tuple[int, ...], media: Media | None, count: int) -> tuple[int, ...]:
        """The tokens that `generate` appends to a prompt with media, without the end token."""
        tokens = torch.tensor([prompt])
        inputs: dict[str, Tensor] = {} if media is None else self._inputs(media, prompt)
        if self.encoder_decoder:
            inputs["decoder_input_ids"] = tokens
        else:
            inputs |= {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        with torch.inference_mode():
            # Whisper's own `generate` splits long audio; this one is common to all models.
            answer = GenerationMixin.generate(self.model, **inputs, max_new_tokens=count, do_sample=False, num_beams=1)
        generated = tuple(answer[0, len(prompt) :].tolist())
        return generated[: generated.index(END)] if END in generated else generated

    def logits(self, prompt: tuple[int, ...], media: Media) -> Tensor:
        """The logits after a prompt, computed in one forward."""
        inputs = self._inputs(media, prompt)
        inputs["decoder_input_ids" if self.encoder_decoder else "input_ids"] = torch.tensor([prompt])
        with torch.inference_mode():
            logits: Tensor = self.model(**inputs, use_cache=False).logits
        return logits[0, -1]

    def _inputs(self, media: Media, prompt: tuple[int, ...]) -> dict[str, Tensor]:
        inputs = {}
        for name, one in media.arrays:
            numbers = torch.from_numpy(np.frombuffer(one.data, one.dtype).reshape(one.shape).copy())[None]
            inputs[name] = numbers.to(self.model.dtype) if numbers.is_floating_point() else numbers
        if self.encoder_decoder:
            if "input_ids" in inputs:
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        else:
            inputs["cross_attention_mask"] = _cross_mask(inputs["aspect_ratio_mask"][0], prompt)
        return inputs


def _cross_mask(tiles: Tensor, prompt: tuple[int, ...]) -> Tensor:
    """The cross-attention mask by the functions of the model's processor."""
    from transformers.models.mllama import processing_mllama as processing

    seen = processing.get_cross_attention_token_mask(list(prompt), IMAGE)
    counts = [tiles.sum(-1).tolist()]
    return torch.from_numpy(processing.convert_sparse_cross_attention_mask_to_dense([seen], counts, TILES, len(prompt)))
