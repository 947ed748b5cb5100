"""Conversations that the bundled models were not trained on: models/held_out.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerFast

from benchmarks.result import ROOT

MODELS = ROOT / "models"
TARGET, DRAFT = MODELS / "target", MODELS / "draft"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and tools of a request, and the expected answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answer: str


def held_out() -> list[Conversation]:
    """All of them, in the order of the file."""
    with (MODELS / "held_out.jsonl").open(encoding="utf-8") as lines:
        return [Conversation(**json.loads(line)) for line in lines]


def held_out_texts(count: int | None = None) -> list[list[int]]:
    """Tokens of the first `count` conversations with their answers (None: all), as the target model writes them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    texts = []
    for one in islice(held_out(), count):
        prompt = tokenizer.apply_chat_template(
            one.messages, tools=one.tools or None, add_generation_prompt=True, tokenize=False
        )
        texts.append(tokenizer.encode(f"{prompt}{one.answer}{tokenizer.eos_token}", add_special_tokens=False))
    return texts
