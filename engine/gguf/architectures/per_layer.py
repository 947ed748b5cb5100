"""Decoders with an embedding for each layer, and keys and values that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.gguf.architectures.architecture import Architecture
from engine.gguf.architectures.attention import COMMON, EPSILON, sliding_layers, sliding_window
from engine.gguf.architectures.experts import EXPERTS
from engine.gguf.architectures.layouts import Rows
from engine.gguf.architectures.settings import Derived, Entry, Fields, Fixed, Hyperparameters, Inexpressible, Value
from engine.gguf.container import GgufError

_PER_LAYER_TABLE = "per_layer_token_embd.weight"
# Factors from here on belong to columns without rotation.
_UNROTATED = 1e29


def _read_heads(file: Hyperparameters) -> Fields:
    kinds = sliding_layers(file, 6)
    key_heads = file.sizes("attention.head_count_kv")
    local, full = (
        {heads for heads, kind in zip(key_heads, kinds, strict=True) if kind == layer_kind} for layer_kind in _KINDS
    )
    if len(local) > 1 or len(full) > 1:
        raise GgufError("its layers of one kind have different numbers of heads")
    first = kinds.index("full_attention") if "full_attention" in kinds else 0
    heads = max(local or full)
    return {
        "layer_types": kinds,
        "sliding_window": sliding_window(file, 512),
        "head_dim": file.size("attention.key_length_swa", file.head_width),
        "global_head_dim": file.head_width,
        "num_key_value_heads": heads,
        "num_global_key_value_heads": max(full or local),
        # Values of layers without value matrices are the keys.
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in file.tensors,
    }


def _write_heads(config: Any) -> Mapping[str, Value]:
    kinds = list(config.layer_types)
    layers = [config.per_layer_config[number] for number in range(len(kinds))]
    widths = {kind: layer.head_dim for kind, layer in zip(kinds, layers, strict=True)}
    # The last layer always has full attention.
    full = widths["full_attention"]
    local = widths.get("sliding_attention", full)
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": local,
        "attention.value_length_swa": local,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": local,
    }


def _read_widths(file: Hyperparameters) -> Fields:
    widths = file.sizes("feed_forward_length")
    return {"intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] == 2 * widths[0]}


def _write_widths(config: Any) -> Mapping[str, Value]:
    doubled = [config.use_double_wide_mlp and mode == "reuse" for mode in config.kv_sharing_modes]
    return {"feed_forward_length": [config.intermediate_size * (2 if doubles else 1) for doubles in doubled]}


def _read_rotation(file: Hyperparameters) -> Fields:
    factors = file.factors("rope_freqs.weight") if "rope_freqs.weight" in file.tensors else [1.0]
    rotated = sum(factor < _UNROTATED for factor in factors) / len(factors)
    full = {"rope_theta": file.positive("rope.freq_base", 10000.0), "partial_rotary_factor": rotated}
    local = {"rope_type": "default", "rope_theta": file.positive("rope.freq_base_swa", 10000.0)}
    return {"rope_parameters": {"full_attention": full | {"rope_type": "proportional"}, "sliding_attention": local}}


def _write_rotation(config: Any) -> Mapping[str, Value]:
    full, local = (config.rope_parameters[kind] for kind in reversed(_KINDS))
    if full.get("rope_type") != "proportional" or local.get("rope_type", "default") != "default":
        raise Inexpressible("rotary embeddings other than proportional and default ones are not written")
    return {"rope.freq_base": float(full["rope_theta"]), "rope.freq_base_swa": float(local["rope_theta"])}


def _read_tables(file: Hyperparameters) -> Fields:
    table = file.tensors.get(_PER_LAYER_TABLE)
    return {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}


def _read_mixture(file: Hyperparameters) -> Fields:
    if not file.integer("expert_count", 0):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": file.size("expert_count"),
        "top_k_experts": file.size("expert_used_count"),
        "moe_intermediate_size": file.size("expert_feed_forward_length"),
    }


def _write_mixture(config: Any) -> Mapping[str, Value]:
    if not config.enable_moe_block:
        return {}
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


_KINDS = ("sliding_attention", "full_attention")

PER_LAYER = (
    Architecture(
        "gemma4",
        "gemma4_text",
        (
            COMMON,
            EPSILON,
            Fixed("hidden_activation", "gelu_pytorch_tanh"),
            Fixed("attention_bias", False),
            Derived(_read_heads, _write_heads),
            Derived(_read_widths, _write_widths),
            Derived(_read_rotation, _write_rotation),
            Derived(_read_tables),
            Derived(_read_mixture, _write_mixture),
            Entry("attention.shared_kv_layers", "num_kv_shared_layers", "integer", 0),
            Entry("embedding_length_per_layer_input", "hidden_size_per_layer_input", "integer", 0),
            Entry("final_logit_softcapping", "final_logit_softcapping", "number", 0.0, zero=None),
        ),
        (
            Rows(r"\.layer_scalar$", ("layer_output_scale.weight",)),
            Rows(r"\.router\.proj\.weight$", ("ffn_gate_inp.weight",)),
            Rows(r"\.router\.scale$", ("ffn_gate_inp.scale",)),
            Rows(r"\.router\.per_expert_scale$", ("ffn_down_exps.scale",)),
            *EXPERTS,
        ),
        # Of layers with the keys and values of others.
        ignored=r"blk\.\d+\.attn_(k|v|k_norm)\.weight",
    ),
)
