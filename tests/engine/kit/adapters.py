"""Adapters of tiny models, made, saved and computed by PEFT."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.adapters.checkpoint import CONFIG_FILE, WEIGHTS_FILE

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Every accepted setting that changes ranks, scalings or the choice of layers.
KINDS: tuple[dict[str, Any], ...] = (
    {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    {"r": 16, "target_modules": LINEAR},
    {"r": 4, "target_modules": LINEAR, "use_rslora": True},
    {
        "r": 8,
        "target_modules": LINEAR,
        "rank_pattern": {"down_proj": 3, r"layers\.1\.self_attn\.q_proj": 2},
    },
    {"r": 8, "target_modules": ["o_proj", "down_proj"], "alpha_pattern": {"o_proj": 32}},
    {"r": 1, "target_modules": LINEAR},
    # A rank above the width of the layers.
    {"r": 64, "target_modules": ["gate_proj", "up_proj"], "layers_to_transform": [0]},
    {"r": 24, "target_modules": r".*self_attn.*_proj", "init_lora_weights": "gaussian"},
)


@contextmanager
def _ignored_warnings() -> Iterator[None]:
    """PEFT uses names that transformers deprecates, and warns when it saves an adapted output layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_adapter(model: Path, folder: Path, kind: dict[str, Any], seed: int = 0) -> Path:
    """Write an adapter of the model in a folder, with random matrices."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = {"lora_alpha": 16, "lora_dropout": 0.1, "task_type": "CAUSAL_LM"} | kind
    with _ignored_warnings():
        adapted = get_peft_model(base, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15, generator=generator)
    with _ignored_warnings():
        adapted.save_pretrained(folder)
    return folder


def change_config(folder: Path, **settings: Any) -> None:
    """Set settings of a saved adapter."""
    file = folder / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def change_weights(folder: Path, change: Any) -> None:
    """Replace the tensors of a saved adapter by what `change` makes of them."""
    file = folder / WEIGHTS_FILE
    tensors: dict[str, Tensor] = change(load_file(file))
    save_file(tensors, file)


class AdaptedReference:
    """A model with one adapter in PEFT, alone."""

    def __init__(self, model: Path, adapter: Path | None, dtype: torch.dtype) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        with _ignored_warnings():
            self.model = base if adapter is None else PeftModel.from_pretrained(base, adapter).eval()

    def greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """The tokens that `generate` appends to a prompt; end tokens do not end it."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            answer = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        tokens: list[int] = answer[0, len(prompt) :].tolist()
        return tokens

    def logits(self, tokens: tuple[int, ...]) -> Tensor:
        """The logits after each token."""
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return logits[0]
