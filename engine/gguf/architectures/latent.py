"""Decoders with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import ExpertGatingFuncType

from engine.gguf.architectures.architecture import Architecture
from engine.gguf.architectures.attention import COMMON, EPSILON, SILU, WIDTH
from engine.gguf.architectures.experts import CORRECTION_BIAS, EXPERTS, ROUTED, gate
from engine.gguf.architectures.layouts import LatentKeysAndValues
from engine.gguf.architectures.rotary import LATENT_ROTATION
from engine.gguf.architectures.settings import Derived, Entry, Fields, Fixed, Hyperparameters, Inexpressible, Value


def _read_heads(file: Hyperparameters) -> Fields:
    rotated = file.size("rope.dimension_count")
    key_width = file.size("attention.key_length_mla", file.head_width)
    return {
        "num_key_value_heads": file.heads,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_width - rotated,
        "v_head_dim": file.size("attention.value_length_mla", file.size("attention.value_length", key_width)),
        "attention_bias": False,
    }


def _write_heads(config: Any) -> Mapping[str, Value]:
    """Latent attention is one head of the latent's width, next to the rotated columns."""
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.value_length_mla": config.v_head_dim,
    }


def _has_sigmoid_gate(file: Hyperparameters) -> bool:
    gate = file.integer("expert_gating_func", 0)
    return gate == int(ExpertGatingFuncType.SIGMOID) or file.has_tensor(".exp_probs_b")


def _write_dense_layers(config: Any) -> Mapping[str, Value]:
    """The number of layers before those with experts, where the configuration has the kind of each layer."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is None:
        return {}
    count = list(kinds).count("dense")
    if "dense" in kinds[count:]:
        raise Inexpressible("layers without experts after the first layer with experts are not written")
    return {"leading_dense_block_count": count}


def _read_top_k(file: Hyperparameters) -> Fields:
    groups = file.integer("expert_group_count", 0) or 1
    return {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


_SETTINGS = (
    COMMON,
    Derived(_read_heads, _write_heads),
    WIDTH,
    EPSILON,
    SILU,
    Fixed("rope_interleave", True),
    LATENT_ROTATION,
    Entry("attention.kv_lora_rank", "kv_lora_rank", "size"),
    Entry("attention.q_lora_rank", "q_lora_rank", "integer", 0, zero=None),
    *ROUTED,
    Entry("expert_group_count", "n_group", "integer", 0, zero=1),
    Entry("expert_group_used_count", "topk_group", "integer", 0, zero=1),
)
_LAYOUTS = (
    LatentKeysAndValues(r"\.kv_b_proj\.weight$", "attn_k_b.weight", "attn_v_b.weight"),
    *EXPERTS,
    CORRECTION_BIAS,
)

LATENT = (
    Architecture(
        "deepseek2",
        "deepseek_v3",
        (*_SETTINGS, gate(ExpertGatingFuncType.SIGMOID), Derived(writes=_write_dense_layers)),
        _LAYOUTS,
        applies=_has_sigmoid_gate,
        written=("glm4_moe_lite",),
    ),
    Architecture(
        "deepseek2",
        "deepseek_v2",
        (*_SETTINGS, gate(ExpertGatingFuncType.SOFTMAX), Derived(_read_top_k)),
        _LAYOUTS,
    ),
)
