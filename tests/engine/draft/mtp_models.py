"""Tiny models with an MTP head, with the weight names of published checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.kit.models import END, FAMILIES, save_tokenizer

_SHARED = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": END,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
_GLM = {**_EXPERTS, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "partial_rotary_factor": 0.5}
_DELTA = {key: value for key, value in FAMILIES["qwen3_next"][1].items() if key.startswith("linear")}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": FAMILIES["deepseek_v3"],
    "glm4_moe": ("Glm4MoeConfig", _GLM),
    "qwen3_next": FAMILIES["qwen3_next"],
    "qwen3_5": ("Qwen3_5TextConfig", {**_DELTA, "num_hidden_layers": 4}),
}

Change = Callable[[dict[str, Tensor]], None]


def save_headed(kind: str, folder: Path, change: Change | None = None) -> Path:
    """Write a tiny model with a random head: a layer like its last one, norms and a projection, by published names.

    change  changes the weights before they are written
    """
    name, own = KINDS[kind]
    config = getattr(transformers, name)(**{**_SHARED, **own})
    torch.manual_seed(sum(kind.encode()))
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = END
    model.save_pretrained(folder)
    save_tokenizer(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights |= mtp_weights(weights, config.num_hidden_layers, apart=kind.startswith("qwen"))
    if change is not None:
        change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def mtp_weights(weights: dict[str, Tensor], layers: int, *, apart: bool) -> dict[str, Tensor]:
    """Weights of a head for a model, apart from its layers (Qwen) or after them (DeepSeek)."""
    last = f"model.layers.{layers - 1}."
    block = {key.removeprefix(last): value for key, value in weights.items() if key.startswith(last)}
    width = weights["model.norm.weight"].shape[0]
    norm, wide = weights["model.norm.weight"], 0.2 * torch.randn(width, 2 * width)
    if apart:
        outer = {"mtp.fc.weight": wide, "mtp.norm.weight": norm.clone()}
        outer |= {f"mtp.pre_fc_norm_{part}.weight": norm.clone() for part in ("embedding", "hidden")}
        inner = "mtp.layers.0."
    else:
        inner = f"model.layers.{layers}."
        outer = {f"{inner}{part}.weight": norm.clone() for part in ("enorm", "hnorm", "shared_head.norm")}
        outer |= {f"{inner}eh_proj.weight": wide}
        # Published files repeat the embedding and output layer, which the head shares with the model.
        outer |= {f"{inner}embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}
        outer |= {f"{inner}shared_head.head.weight": weights["lm_head.weight"].clone()}
    shaken = {inner + key: value + 0.05 * torch.randn(value.shape) for key, value in block.items()}
    return outer | shaken


def agree(weights: dict[str, Tensor]) -> None:
    """Make model and head agree: layers add next to nothing, so each token alone determines the next one."""
    for key, value in weights.items():
        if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            value.mul_(1e-4)
        if key.endswith(("eh_proj.weight", "mtp.fc.weight")):
            width = value.shape[0]
            value.copy_(torch.cat((torch.eye(width), torch.zeros(width, width)), 1))
