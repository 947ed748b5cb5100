"""Greedy answers of a finished model, many prompts at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.recipe.conversation import Schema
from models.recipe.rows import END

LONGEST = 128
TOGETHER = 32


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages and tools, as a client sends them."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Schema] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The prompt's ids, the answer's ids with its end token if it came to one, and the answer's text."""

    prompt: list[int]
    ids: list[int]
    text: str


class Model:
    """A folder's model and tokenizer, in float32, as the server would load them."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt through the chat template."""
        text = self.tokenizer.apply_chat_template(
            list(prompt.messages), tools=list(prompt.tools) or None, add_generation_prompt=True, tokenize=False
        )
        return cast("list[int]", self.tokenizer.encode(text, add_special_tokens=False))

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Greedy answers in the order of the prompts."""
        encoded = [self.encode(prompt) for prompt in prompts]
        order = sorted(range(len(encoded)), key=lambda at: len(encoded[at]))
        answers: dict[int, Answer] = {}
        for start in range(0, len(order), TOGETHER):
            group = order[start : start + TOGETHER]
            answers |= zip(group, self._generate([encoded[at] for at in group]), strict=True)
        return [answers[at] for at in range(len(encoded))]

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]]) -> list[Answer]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made = self.network.generate(input_ids=ids, attention_mask=mask, max_new_tokens=LONGEST, do_sample=False)
        return [self._answer(prompt, row) for prompt, row in zip(prompts, made[:, longest:].tolist(), strict=True)]

    def _answer(self, prompt: list[int], ids: list[int]) -> Answer:
        if END in ids:
            ids = ids[: ids.index(END) + 1]
        return Answer(prompt, ids, self.tokenizer.decode(ids, skip_special_tokens=True))
