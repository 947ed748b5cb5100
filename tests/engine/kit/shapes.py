"""A small LLaVA that is trained to name coloured shapes: what it answers shows what it sees."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoTokenizer

from tests.engine.kit.contents import FAMILIES
from tests.engine.media.processors import media_processor, save_processor

QUESTION = "What is it?"
COLOURS = {"red": "#d62728", "green": "#2ca02c", "blue": "#1f5fd6", "yellow": "#f2c71d", "black": "#181818"}
SHAPES = ("circle", "cross", "triangle")
SIDE = 28
_PATCH, _IGNORED, _END = 7, -100, "</s>"
_TEXT = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 24, "num_hidden_layers": 3, "initializer_range": 0.05}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "image_size": SIDE,
    "patch_size": _PATCH,
}
_STEPS, _BATCH, _RATE = 300, 32, 3e-3


def draw(colour: str, shape: str, side: int = SIDE, place: tuple[float, float, float] = (0.2, 0.2, 0.6)) -> Image.Image:
    """A shape on white. place: left, top and size, as parts of the side"""
    left, top, size = (part * side for part in place)
    image = Image.new("RGB", (side, side), "white")
    pen, box = ImageDraw.Draw(image), (left, top, left + size, top + size)
    if shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == "cross":
        bar = 0.36 * size
        pen.rectangle((left, top + bar, left + size, top + size - bar), fill=COLOURS[colour])
        pen.rectangle((left + bar, top, left + size - bar, top + size), fill=COLOURS[colour])
    else:
        pen.polygon([(left, top + size), (left + size / 2, top), (left + size, top + size)], fill=COLOURS[colour])
    return image


def answer_to(colour: str, shape: str) -> str:
    return f"A {colour} {shape}."


def save_shape_model(folder: Path, steps: int = _STEPS) -> Path:
    """Train the model and save it with its tokenizer and its processor."""
    save_processor(folder, "llava")
    file = folder / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"patch_size": _PATCH}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = _model(tokenizer)
    _train(model, tokenizer, folder, steps)
    model.eval().save_pretrained(folder)
    return folder


def _model(tokenizer: Any) -> Any:
    family = FAMILIES["llava"]
    end = tokenizer.convert_tokens_to_ids(_END)
    settings = {
        **family.settings,
        "text_config": {**family.settings["text_config"], **_TEXT, "eos_token_id": end},
        "vision_config": {**family.settings["vision_config"], **_VISION},
        **dict.fromkeys(("image_token_id", "image_token_index"), tokenizer.convert_tokens_to_ids("<image>")),
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **settings)
    return AutoModelForMultimodalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def _train(model: Any, tokenizer: Any, folder: Path, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    for ids, labels, pixels in _batches(tokenizer, folder, steps):
        logits = model(input_ids=ids, pixel_values=pixels).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _batches(tokenizer: Any, folder: Path, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Conversations of two pictures: tokens and labels [conversations, tokens], pixels [pictures, 3, side, side]."""
    processor = media_processor(folder)._processor
    chance = random.Random(0)
    for _ in range(steps):
        conversations, images = [], []
        for _ in range(_BATCH):
            kinds = [(chance.choice([*COLOURS]), chance.choice(SHAPES)) for _ in range(2)]
            images += [draw(*kind, side=2 * SIDE, place=_place(chance)) for kind in kinds]
            conversations.append(_tokens(tokenizer, [answer_to(*kind) for kind in kinds]))
        length = max(len(tokens) for tokens, _ in conversations)
        ids = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in conversations])
        labels = torch.tensor([marks + [_IGNORED] * (length - len(marks)) for _, marks in conversations])
        pixels = processor.image_processor(images, return_tensors="np")["pixel_values"]
        yield ids, labels, torch.from_numpy(np.asarray(pixels))


def _place(chance: random.Random) -> tuple[float, float, float]:
    size = chance.uniform(0.55, 0.75)
    return chance.uniform(0.05, 0.95 - size), chance.uniform(0.05, 0.95 - size), size


def _tokens(tokenizer: Any, answers: list[str]) -> tuple[list[int], list[int]]:
    """The tokens of a conversation as the chat template writes it, and the labels of its answers."""
    ids: list[int] = []
    labels: list[int] = []
    placeholders = "<image>" * (SIDE // _PATCH) ** 2
    for answer in answers:
        for text, is_answer in (
            (f"<s>user: {placeholders}{QUESTION}</s><s>assistant: ", False),
            (answer + _END, True),
        ):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += tokens
            labels += tokens if is_answer else [_IGNORED] * len(tokens)
    return ids, labels
