"""Decoders with attention and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import ExpertGatingFuncType

from engine.gguf.architectures.architecture import Architecture
from engine.gguf.architectures.attention import (
    BIASES,
    COMMON,
    DECODER,
    DENSE,
    EPSILON,
    HEADS,
    LIMITED_CONTEXT,
    SCALES,
    SILU,
    WIDTH,
    windows,
)
from engine.gguf.architectures.layouts import INTERLEAVED_ROTATION, Rows, alternating
from engine.gguf.architectures.rotary import FIXED_ALPHA_ROTATION, PARTIAL_ROTATION, read_rotation, write_rotation
from engine.gguf.architectures.settings import (
    Derived,
    Entry,
    Fields,
    Fixed,
    Hyperparameters,
    Inexpressible,
    Value,
)
from engine.gguf.container import GgufError

EXPERT_WIDTH = Entry("expert_feed_forward_length", "moe_intermediate_size", "size")
EXPERTS_PER_TOKEN = Entry("expert_used_count", "num_experts_per_tok", "size")
# Routed experts next to shared ones, after layers without experts.
ROUTED = (
    Entry("leading_dense_block_count", "first_k_dense_replace", "integer", 0),
    EXPERT_WIDTH,
    Entry("expert_count", "n_routed_experts", "size"),
    Entry("expert_shared_count", "n_shared_experts", "size"),
    EXPERTS_PER_TOKEN,
    Entry("expert_weights_scale", "routed_scaling_factor", "number", 1.0, zero=1.0),
    Entry("expert_weights_norm", "norm_topk_prob", "boolean", default=False),
)
EXPERTS = (
    Rows(
        r"\.experts\.gate_up_proj$",
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        fused="ffn_gate_up_exps.weight",
        stacked=True,
    ),
    Rows(r"\.experts\.down_proj$", ("ffn_down_exps.weight",), stacked=True),
)
ROUTER = Rows(r"\.router\.weight$", ("ffn_gate_inp.weight",))
CORRECTION_BIAS = Rows(
    r"\.(e_score_correction_bias|expert_bias)$", ("exp_probs_b.bias",), encode=lambda values, config: values.flatten()
)


def _has_experts(file: Hyperparameters) -> bool:
    return file.integer("expert_count", 0) > 0


def _read_query_norms(file: Hyperparameters) -> Fields:
    return {"use_qk_norm": file.has_tensor(".attn_q_norm."), "topk_group": 1}


def gate(function: ExpertGatingFuncType) -> Derived:
    """The function of the router's logits, which each model of transformers has one of."""
    return Derived(writes=lambda config: {"expert_gating_func": int(function)})


def _read_end_of_mixtures(file: Hyperparameters) -> Fields:
    return {"moe_layer_end_index": file.layers - 1}


def _write_end_of_mixtures(config: Any) -> Mapping[str, Value]:
    end = config.moe_layer_end_index
    if end not in (-1, config.num_hidden_layers - 1):
        raise Inexpressible("experts that end before the last layer are not written")
    return {"expert_shared_feed_forward_length": config.moe_intermediate_size * config.moe_num_shared_experts}


def _read_shared_width(file: Hyperparameters) -> Fields:
    width = file.size("expert_feed_forward_length")
    shared = file.size("expert_shared_feed_forward_length", width) * file.size("expert_shared_count", 1)
    if shared != width:
        raise GgufError(f"its shared experts have {shared} columns and its others {width}, which is not supported")
    return {"intermediate_size": width}


def _write_shared_width(config: Any) -> Mapping[str, Value]:
    width = config.intermediate_size
    return {
        "feed_forward_length": width,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
        "expert_shared_count": 1,
    }


def _read_moe_top_k(file: Hyperparameters) -> Fields:
    return {"moe_topk": file.size("expert_used_count")}


def _write_moe_top_k(config: Any) -> Mapping[str, Value]:
    counts = config.moe_topk if isinstance(config.moe_topk, list) else [config.moe_topk]
    if len(set(counts)) != 1:
        raise Inexpressible("different numbers of experts in layers are not written")
    return {"expert_used_count": counts[0]}


def _read_gpt_oss_rotation(file: Hyperparameters) -> Fields:
    # Published models do not round the range of scaled frequencies.
    return {"rope_parameters": read_rotation(file) | {"truncate": False}}


MIXTURES = (
    Architecture(
        "llama",
        "mixtral",
        (
            *DENSE,
            LIMITED_CONTEXT,
            Entry("expert_count", "num_local_experts", "size"),
            EXPERTS_PER_TOKEN,
            Derived(lambda file: {"sliding_window": None}),
        ),
        (INTERLEAVED_ROTATION, *EXPERTS),
        applies=_has_experts,
    ),
    Architecture(
        "granitemoe",
        "granitemoe",
        (*DENSE, LIMITED_CONTEXT, *SCALES, Entry("expert_count", "num_local_experts", "size"), EXPERTS_PER_TOKEN),
        (INTERLEAVED_ROTATION, *EXPERTS, ROUTER),
    ),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        (
            *DENSE,
            LIMITED_CONTEXT,
            Entry("expert_count", "num_experts", "size"),
            EXPERTS_PER_TOKEN,
            EXPERT_WIDTH,
            Fixed("norm_topk_prob", True),
            Derived(lambda file: {"norm_topk_prob": file.boolean("expert_weights_norm", True)}),
            Fixed("decoder_sparse_step", 1),
            Fixed("mlp_only_layers", []),
        ),
        EXPERTS,
    ),
    Architecture(
        "glm4moe",
        "glm4_moe",
        (
            *DECODER,
            SILU,
            PARTIAL_ROTATION,
            *ROUTED,
            Fixed("n_group", 1),
            Derived(_read_query_norms),
            gate(ExpertGatingFuncType.SIGMOID),
        ),
        (*EXPERTS, CORRECTION_BIAS),
    ),
    Architecture(
        "ernie4_5-moe",
        "ernie4_5_moe",
        (
            *DENSE,
            Fixed("use_bias", False),
            Entry("expert_count", "moe_num_experts", "size"),
            Entry("expert_used_count", "moe_k", "size"),
            EXPERT_WIDTH,
            Entry("expert_shared_count", "moe_num_shared_experts", "size"),
            Entry("leading_dense_block_count", "moe_layer_start_index", "integer", 0),
            Entry("interleave_moe_layer_step", "moe_layer_interval", "integer", 1),
            Derived(_read_end_of_mixtures, _write_end_of_mixtures),
        ),
        (*EXPERTS, CORRECTION_BIAS),
    ),
    Architecture(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        (
            COMMON,
            HEADS,
            EPSILON,
            BIASES,
            SILU,
            FIXED_ALPHA_ROTATION,
            Entry("expert_count", "num_experts", "size"),
            Derived(_read_moe_top_k, _write_moe_top_k),
            Derived(_read_shared_width, _write_shared_width),
        ),
        EXPERTS,
    ),
    Architecture(
        "minimax-m2",
        "minimax_m2",
        (
            COMMON,
            HEADS,
            EPSILON,
            SILU,
            PARTIAL_ROTATION,
            Derived(writes=WIDTH.write),
            Entry("expert_feed_forward_length", "intermediate_size", "size"),
            Entry("expert_count", "num_local_experts", "size"),
            EXPERTS_PER_TOKEN,
            gate(ExpertGatingFuncType.SIGMOID),
        ),
        (*EXPERTS, CORRECTION_BIAS),
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        (
            COMMON,
            HEADS,
            EPSILON,
            BIASES,
            SILU,
            Entry("expert_feed_forward_length", "intermediate_size", "size"),
            Entry("expert_count", "num_local_experts", "size"),
            EXPERTS_PER_TOKEN,
            windows(128, 2),
            Derived(_read_gpt_oss_rotation, write_rotation),
        ),
        (
            Rows(
                r"\.experts\.gate_up_proj$",
                ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
                fused="ffn_gate_up_exps.weight",
                stacked=True,
                transposed=True,
                order=alternating,
            ),
            Rows(
                r"\.experts\.gate_up_proj_bias$",
                ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
                fused="ffn_gate_up_exps.bias",
                stacked=True,
                order=alternating,
            ),
            Rows(r"\.experts\.down_proj$", ("ffn_down_exps.weight",), stacked=True, transposed=True),
            Rows(r"\.experts\.down_proj_bias$", ("ffn_down_exps.bias",)),
            Rows(r"\.sinks$", ("attn_sinks.weight",)),
        ),
    ),
)
