"""The model types of transformers that GGUF has an architecture for, and their hyper-parameters as GGUF metadata.

Keys are without the architecture's prefix. Settings that the architecture cannot express are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, ExpertGatingFuncType

Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

# By model type of transformers.
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "phi3": MODEL_ARCH.PHI3,
    "granite": MODEL_ARCH.GRANITE,
    "glm4": MODEL_ARCH.GLM4,
    "olmo2": MODEL_ARCH.OLMO2,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
    "lfm2": MODEL_ARCH.LFM2,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
}
# Metadata key, and the attribute of a transformers configuration with the same meaning.
_COMMON = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_DEEPSEEK = {
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
# YaRN settings with another name in GGUF.
_YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Settings that have one value in an architecture.
_GELU: dict[str, object] = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_REQUIRED: dict[str, dict[str, object]] = {
    "gemma2": _GELU,
    "gemma3_text": _GELU,
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "lfm2": {"conv_bias": False},
    "deepseek_v2": {"rope_interleave": True},
    "deepseek_v3": {"rope_interleave": True},
}
# Keys with a float, also where a configuration has a whole number.
_float_key = re.compile(r"(scale|epsilon|freq_base(_swa)?|factor|softcapping|beta_(fast|slow)|multiplier)$")
# llama.cpp stores a tenth of DeepSeek's exponent.
_DEEPSEEK_LOG_MULTIPLIER = 0.1


class Inexpressible(Exception):
    """GGUF has no architecture, tensor, token kind or setting for a part of the model; the message names it."""


def architecture(config: Any) -> MODEL_ARCH:
    """GGUF's architecture for a model. Raises Inexpressible."""
    if config.model_type not in ARCHITECTURES:
        raise Inexpressible(f"models of type {config.model_type} are not written; {', '.join(ARCHITECTURES)} are")
    return ARCHITECTURES[config.model_type]


def hyper_parameters(config: Any) -> dict[str, Value]:
    """The metadata of a model's configuration, with the architecture's prefix. Raises Inexpressible."""
    prefix = MODEL_ARCH_NAMES[architecture(config)]
    _require(config, _REQUIRED.get(config.model_type, {}))
    values = _taken(config, _COMMON)
    experts = next((count for name in _EXPERT_COUNTS if (count := getattr(config, name, None))), None)
    if experts is not None:
        values["expert_count"] = int(experts)
    values.update(_head_sizes(config))
    values.update(rotary(config))
    values.update(_windows(config))
    if config.model_type in _OWN:
        values.update(_OWN[config.model_type](config))
    return {f"{prefix}.{key}": _typed(key, value) for key, value in values.items()}


def _typed(key: str, value: Value) -> Value:
    return float(value) if _float_key.search(key) and isinstance(value, int) else value


def _taken(config: Any, names: dict[str, str]) -> dict[str, Value]:
    """The metadata of the attributes that are set."""
    return {key: value for key, name in names.items() if (value := getattr(config, name, None)) is not None}


def head_size(config: Any) -> int:
    """Columns of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _head_sizes(config: Any) -> dict[str, Value]:
    size = head_size(config)
    return {"attention.key_length": size, "attention.value_length": size}


def rope_parameters(config: Any) -> dict[str, Any]:
    """The rotary settings of the layers with full attention."""
    parameters: dict[str, Any] = config.rope_parameters
    return dict(parameters.get("full_attention", parameters))


def rotary(config: Any) -> Iterator[tuple[str, Value]]:
    """The metadata of rotary embeddings. Raises Inexpressible."""
    rope = rope_parameters(config)
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    yield "rope.dimension_count", int(head_size(config) * share)
    yield "rope.freq_base", float(rope["rope_theta"])
    local = config.rope_parameters.get("sliding_attention")
    if local is not None:
        yield "rope.freq_base_swa", float(local["rope_theta"])
    yield from _rotary_scaling(config, rope)


def _rotary_scaling(config: Any, rope: dict[str, Any]) -> Iterator[tuple[str, Value]]:
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):
        # The factors of llama3 are a tensor.
        return
    if kind not in ("linear", "yarn", "longrope"):
        raise Inexpressible(f"rotary embeddings of type {kind} are not written")
    yield "rope.scaling.type", kind
    if kind == "longrope":
        yield from _long_rotary(config, rope)
        return
    yield "rope.scaling.factor", float(rope["factor"])
    if kind == "yarn":
        yield from ((key, rope[name]) for key, name in _YARN.items() if rope.get(name) is not None)
        if rope.get("attention_factor") is not None:
            # GGUF has the ratio to the default.
            yield "rope.scaling.attn_factor", rope["attention_factor"] / (0.1 * math.log(rope["factor"]) + 1)


def _long_rotary(config: Any, rope: dict[str, Any]) -> Iterator[tuple[str, Value]]:
    original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    ratio = config.max_position_embeddings / original
    factor = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    yield "rope.scaling.original_context_length", int(original)
    yield "rope.scaling.attn_factor", float(rope.get("attention_factor") or factor)


def _windows(config: Any) -> Iterator[tuple[str, Value]]:
    """The sliding window, and the layers with one."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    if not window or getattr(config, "use_sliding_window", True) is False:
        return
    if config.model_type in ("gemma2", "gemma3_text", "gpt_oss"):
        yield "attention.sliding_window", int(window)
        yield "attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds]
    elif config.model_type == "phi3":
        yield "attention.sliding_window", int(window)
    else:
        # The architecture has no window, which has no effect within its size.
        yield "context_length", min(int(window), int(config.max_position_embeddings))


def _require(config: Any, expected: dict[str, object]) -> None:
    """Raise Inexpressible for a setting that GGUF lacks because it has one value in the architecture."""
    for name, value in ({"hidden_act": "silu"} | expected).items():
        own = getattr(config, name, value)
        if own != value:
            raise Inexpressible(f"{name} must be {value!r} in GGUF, not {own!r}")


def _gemma(config: Any) -> dict[str, Value]:
    if config.query_pre_attn_scalar != head_size(config) and config.num_hidden_layers not in (46, 62):
        # The 27B models of Gemma 2 and 3, recognised by their layers, have another scale.
        raise Inexpressible(f"query_pre_attn_scalar={config.query_pre_attn_scalar} is not the size of a head")
    return {}


def _granite(config: Any) -> dict[str, Value]:
    return _taken(config, _GRANITE)


def _phi(config: Any) -> dict[str, Value]:
    return {} if getattr(config, "sliding_window", None) else {"attention.sliding_window": 0}


def _smollm(config: Any) -> dict[str, Value]:
    expected = [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]
    if list(config.no_rope_layers) != expected:
        raise Inexpressible("no_rope_layers other than every fourth layer are not written")
    return {}


def _lfm(config: Any) -> dict[str, Value]:
    heads, width = config.num_key_value_heads, config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = int((config.block_ffn_dim_multiplier or 1) * int(2 * width / 3))
        width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return {
        "feed_forward_length": width,
        "shortconv.l_cache": config.conv_L_cache,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.head_count_kv": [0 if kind == "conv" else heads for kind in config.layer_types],
    }


def _deepseek(config: Any) -> dict[str, Value]:
    """Latent attention is one head of the latent's width, beside the rotated columns."""
    rope = rope_parameters(config)
    nope, rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
    sigmoid = config.model_type == "deepseek_v3"
    values = _taken(config, _DEEPSEEK) | {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + rotated,
        "attention.key_length_mla": nope + rotated,
        "rope.dimension_count": rotated,
        "expert_gating_func": int(ExpertGatingFuncType.SIGMOID if sigmoid else ExpertGatingFuncType.SOFTMAX),
    }
    if rope.get("mscale_all_dim"):
        values["rope.scaling.yarn_log_multiplier"] = _DEEPSEEK_LOG_MULTIPLIER * rope["mscale_all_dim"]
    return values


def _gpt_oss(config: Any) -> dict[str, Value]:
    return {"expert_feed_forward_length": config.intermediate_size}


_OWN: dict[str, Callable[[Any], dict[str, Value]]] = {
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "granite": _granite,
    "phi3": _phi,
    "smollm3": _smollm,
    "lfm2": _lfm,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}
