"""Folders of tiny models with the processors of their images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.engine.kit.contents import FAMILIES, VOCABULARY, tiny_model

_CROP = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}


def _tokenizer(*special: str, **named: str) -> Any:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>", *special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=named,
        model_input_names=["input_ids", "attention_mask"],
    )


def _llava() -> Any:
    return transformers.LlavaProcessor(
        transformers.LlavaImageProcessorPil(**_CROP),
        _tokenizer("<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _gemma3() -> Any:
    tokens = {"image_token": "<image_soft_token>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    return transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16}),
        _tokenizer(*tokens.values(), **tokens),
        image_seq_length=4,
    )


def _idefics3() -> Any:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    return transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        _tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places),
        image_seq_len=4,
    )


@dataclass(frozen=True)
class ImageModel:
    """A processor, and the names of its tokens in the configuration of the model."""

    processor: Callable[[], Any]
    placeholder: str
    tokens: dict[str, str]


IMAGE_MODELS = {
    "llava": ImageModel(_llava, "<image>", {}),
    "gemma3": ImageModel(_gemma3, "<image_soft_token>", {"boi_token_index": "<boi>", "eoi_token_index": "<eoi>"}),
    "idefics3": ImageModel(_idefics3, "<image>", {}),
}


def save_image_model(name: str, folder: Path, dtype: torch.dtype = torch.float32, *, processor: bool = True) -> Any:
    """The whole model of a family, after it has been saved with its tokenizer and its processor."""
    image_model, family = IMAGE_MODELS[name], FAMILIES[name]
    prepared = image_model.processor()
    identity = prepared.tokenizer.convert_tokens_to_ids
    placeholder = identity(image_model.placeholder)
    assert len(prepared.tokenizer) <= VOCABULARY
    settings = {**family.settings, "image_token_id": placeholder, "image_token_index": placeholder}
    settings |= {key: identity(token) for key, token in image_model.tokens.items()}
    model = tiny_model(replace(family, settings=settings), dtype)
    model.save_pretrained(folder)
    (prepared if processor else prepared.tokenizer).save_pretrained(folder)
    return model
