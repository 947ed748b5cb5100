"""Greedy answers of a bundled model by transformers alone, many prompts in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages and tools, as a client sends them."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of the prompt and the answer, with its end token if it was generated, and the answer's text."""

    prompt: list[int]
    ids: list[int]
    text: str


class Model:
    """Model and tokenizer of a folder, in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Greedy answers in the order of the prompts."""
        encoded = [self._encode(prompt) for prompt in prompts]
        batch = self.tokenizer.pad({"input_ids": encoded}, padding_side="left", return_tensors="pt")
        output = self.network.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
        answers = output[:, batch["input_ids"].shape[1] :].tolist()
        return [self._answer(prompt, ids) for prompt, ids in zip(encoded, answers, strict=True)]

    @torch.inference_mode()
    def agreement(self, answer: Answer) -> list[bool]:
        """For each token of another model's answer, whether this model's most likely token is the same."""
        ids = torch.tensor([answer.prompt + answer.ids])
        likely = self.network(input_ids=ids).logits[0].argmax(-1)[len(answer.prompt) - 1 : -1]
        return [int(token) == expected for token, expected in zip(likely, answer.ids, strict=True)]

    def _encode(self, prompt: Prompt) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            list(prompt.messages), tools=list(prompt.tools) or None, add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _answer(self, prompt: list[int], ids: list[int]) -> Answer:
        end: Any = self.tokenizer.eos_token_id
        if end in ids:
            ids = ids[: ids.index(end) + 1]
        return Answer(prompt, ids, self.tokenizer.decode(ids, skip_special_tokens=True))
