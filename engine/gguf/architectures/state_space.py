"""Decoders with state space layers (Mamba 2), before, next to or in place of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.gguf.architectures.architecture import Architecture
from engine.gguf.architectures.attention import COMMON, DECODER, EPSILON, HEADS, SCALES, SILU, WIDTH
from engine.gguf.architectures.experts import CORRECTION_BIAS, EXPERTS, EXPERTS_PER_TOKEN, ROUTER
from engine.gguf.architectures.layouts import INTERLEAVED_ROTATION, Rows, decode_decay, encode_decay, squeeze_filter
from engine.gguf.architectures.recurrent import attention_layers
from engine.gguf.architectures.rotary import ROTATION
from engine.gguf.architectures.settings import (
    Derived,
    Entry,
    Fields,
    Fixed,
    Hyperparameters,
    Inexpressible,
    Value,
    head_size,
)
from engine.gguf.container import GgufError

Encode = Callable[[Tensor, Any], Tensor]


def _encode_decay_column(values: Tensor, config: Any) -> Tensor:
    return encode_decay(values, config).unsqueeze(1)


def _as_column(values: Tensor, config: Any) -> Tensor:
    return values.unsqueeze(1)


def _by_group(values: Tensor, config: Any) -> Tensor:
    groups = getattr(config, "mamba_n_groups", None) or config.n_groups
    return values.reshape(groups, -1)


def _read_hybrid_layers(file: Hyperparameters) -> Fields:
    attends, key_heads = attention_layers(file)
    kinds = ["full_attention" if attention else "linear_attention" for attention in attends]
    return {"layer_types": kinds, "num_key_value_heads": key_heads, "attention_bias": False}


def _write_hybrid_layers(config: Any) -> Mapping[str, Value]:
    heads = config.num_key_value_heads
    return {"attention.head_count_kv": [heads * (kind == "full_attention") for kind in config.layer_types]}


def _read_granite_sizes(file: Hyperparameters) -> Fields:
    inner, heads = file.size("ssm.inner_size"), file.size("ssm.time_step_rank")
    has_rotation = file.boolean("rope.scaling.finetuned", False)
    return {
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // file.hidden,
        "position_embedding_type": "rope" if has_rotation else "nope",
    }


def _write_granite_sizes(config: Any) -> Mapping[str, Value]:
    return {
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
    }


def _read_dense_width(file: Hyperparameters) -> Fields:
    width = file.size("feed_forward_length")
    return {"num_local_experts": 0, "intermediate_size": width, "shared_intermediate_size": width}


def _write_dense_width(config: Any) -> Mapping[str, Value]:
    return {"feed_forward_length": config.shared_intermediate_size}


def _has_experts(config: Any) -> bool:
    return bool(config.num_local_experts)


def _read_falcon_sizes(file: Hyperparameters) -> Fields:
    inner, heads = file.size("ssm.inner_size"), file.size("ssm.time_step_rank")
    return {
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // heads,
        "mamba_rms_norm": file.has_tensor(".ssm_norm."),
        "mamba_norm_before_gate": False,
    }


def _write_falcon_sizes(config: Any) -> Mapping[str, Value]:
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        raise Inexpressible("a norm before the gate is not written")
    return {"ssm.inner_size": config.mamba_d_ssm}


_MULTIPLIERS = (
    "attention_in_multiplier",
    "attention_out_multiplier",
    "embedding_multiplier",
    "key_multiplier",
    "lm_head_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)


def _read_multipliers(file: Hyperparameters) -> Fields:
    """The weights of files are multiplied already."""
    return dict.fromkeys(_MULTIPLIERS, 1.0) | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}


def _write_multipliers(config: Any) -> Mapping[str, Value]:
    if config.tie_word_embeddings and config.lm_head_multiplier != config.embedding_multiplier:
        raise Inexpressible("tied embeddings with another multiplier than the logits are not written")
    return {}


def _multiplied(factor: Callable[[Any], float]) -> Encode:
    return lambda values, config: values * factor(config)


def _multiplied_inputs(values: Tensor, config: Any) -> Tensor:
    """Rows of gates, inputs, the two projections of the state, and time steps have a factor each."""
    inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = torch.tensor([inner, inner, states, states, config.mamba_n_heads])
    factors = torch.tensor(config.ssm_multipliers, dtype=torch.float64) * config.ssm_in_multiplier
    rows = factors.repeat_interleave(sizes)[:, None].to(values.device)
    multiplied: Tensor = (values * rows).to(values.dtype)
    return multiplied


def _read_nemotron_layers(file: Hyperparameters) -> Fields:
    attends, key_heads = attention_layers(file)
    wide = "moe" if file.integer("expert_count", 0) else "mlp"
    widths = file.sizes("feed_forward_length")
    if len(set(widths) - {0}) > 1:
        raise GgufError("its layers with an MLP have different sizes")
    kinds = [
        "full_attention" if attention else wide if width else "linear_attention"
        for attention, width in zip(attends, widths, strict=True)
    ]
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": key_heads,
        "head_dim": file.head_width,
        "intermediate_size": max(widths),
        "mamba_head_dim": file.size("ssm.inner_size") // file.size("ssm.time_step_rank"),
    }


def _write_nemotron_layers(config: Any) -> Mapping[str, Value]:
    kinds = list(config.layer_types)
    if {"moe", "mlp"} <= set(kinds):
        raise Inexpressible("layers of experts beside those of an MLP are not written")
    width = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
    return {
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds],
        "attention.key_length": head_size(config),
        "attention.value_length": head_size(config),
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }


_STATES = (
    Entry("ssm.conv_kernel", "mamba_d_conv", "size"),
    Entry("ssm.state_size", "mamba_d_state", "size"),
    Entry("ssm.group_count", "mamba_n_groups", "size"),
    Entry("ssm.time_step_rank", "mamba_n_heads", "size"),
    Fixed("mamba_conv_bias", True),
    Fixed("mamba_proj_bias", False),
)
_LAYER = r"\.(mamba|mixer)\."
_STATE_LAYOUTS = (
    Rows(_LAYER + r"conv1d\.weight$", ("ssm_conv1d.weight",), encode=squeeze_filter),
    Rows(_LAYER + r"conv1d\.bias$", ("ssm_conv1d.bias",)),
    Rows(_LAYER + r"A_log$", ("ssm_a",), encode=_encode_decay_column, decode=decode_decay),
    Rows(_LAYER + r"D$", ("ssm_d",), encode=_as_column),
    Rows(_LAYER + r"dt_bias$", ("ssm_dt.bias",)),
    Rows(_LAYER + r"in_proj\.weight$", ("ssm_in.weight",)),
    Rows(_LAYER + r"out_proj\.weight$", ("ssm_out.weight",)),
    Rows(_LAYER + r"norm\.weight$", ("ssm_norm.weight",), encode=_by_group),
)
_GRANITE = (
    COMMON,
    Derived(writes=HEADS.write),
    Derived(_read_hybrid_layers, _write_hybrid_layers),
    EPSILON,
    SILU,
    ROTATION,
    *SCALES,
    *_STATES,
    Derived(_read_granite_sizes, _write_granite_sizes),
)

_NEMOTRON = (
    COMMON,
    Derived(_read_nemotron_layers, _write_nemotron_layers),
    Entry("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", "number"),
    Entry("ssm.conv_kernel", "conv_kernel", "size"),
    Entry("ssm.state_size", "ssm_state_size", "size"),
    Entry("ssm.group_count", "n_groups", "size"),
    Entry("ssm.time_step_rank", "mamba_num_heads", "size"),
    Fixed("mlp_hidden_act", "relu2"),
    Fixed("mamba_hidden_act", "silu"),
    Fixed("attention_bias", False),
    Fixed("mlp_bias", False),
    Fixed("use_bias", False),
    Fixed("use_conv_bias", True),
    Fixed("mamba_proj_bias", False),
)
_NEMOTRON_LAYOUTS = (
    *_STATE_LAYOUTS,
    *(Rows(rf"\.mixer\.{part}_proj\.weight$", (f"attn_{part}.weight",)) for part in "qkv"),
    Rows(r"\.mixer\.o_proj\.weight$", ("attn_output.weight",)),
    Rows(r"\.mixer\.up_proj\.weight$", ("ffn_up.weight",)),
    Rows(r"\.mixer\.down_proj\.weight$", ("ffn_down.weight",)),
    Rows(r"\.layers\.\d+\.norm\.weight$", ("attn_norm.weight",)),
)

STATE_SPACES = (
    Architecture(
        "granitehybrid",
        "granitemoehybrid",
        (
            *_GRANITE,
            WIDTH,
            Entry("expert_count", "num_local_experts", "size"),
            EXPERTS_PER_TOKEN,
            Entry("expert_shared_feed_forward_length", "shared_intermediate_size", "size"),
        ),
        (
            *_STATE_LAYOUTS,
            INTERLEAVED_ROTATION,
            *EXPERTS,
            ROUTER,
            Rows(r"\.shared_mlp\.input_linear\.weight$", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
            Rows(r"\.shared_mlp\.output_linear\.weight$", ("ffn_down_shexp.weight",)),
        ),
        applies=lambda file: file.integer("expert_count", 0) > 0,
        fits=_has_experts,
    ),
    Architecture(
        "granitehybrid",
        "granitemoehybrid",
        (*_GRANITE, Derived(_read_dense_width, _write_dense_width)),
        (
            *_STATE_LAYOUTS,
            INTERLEAVED_ROTATION,
            Rows(r"\.shared_mlp\.input_linear\.weight$", ("ffn_gate.weight", "ffn_up.weight")),
            Rows(r"\.shared_mlp\.output_linear\.weight$", ("ffn_down.weight",)),
        ),
    ),
    Architecture(
        "falcon-h1",
        "falcon_h1",
        (
            *DECODER,
            SILU,
            ROTATION,
            *_STATES,
            Fixed("attention_bias", False),
            Fixed("mlp_bias", False),
            Fixed("projectors_bias", False),
            Derived(_read_falcon_sizes, _write_falcon_sizes),
            Derived(_read_multipliers, _write_multipliers),
        ),
        (
            Rows(r"\.mamba\.in_proj\.weight$", ("ssm_in.weight",), encode=_multiplied_inputs),
            Rows(
                r"\.mamba\.out_proj\.weight$",
                ("ssm_out.weight",),
                encode=_multiplied(lambda config: config.ssm_out_multiplier),
            ),
            *_STATE_LAYOUTS,
            Rows(r"\.[qv]_proj\.", encode=_multiplied(lambda config: config.attention_in_multiplier)),
            Rows(
                r"\.k_proj\.",
                encode=_multiplied(lambda config: config.attention_in_multiplier * config.key_multiplier),
            ),
            Rows(r"\.o_proj\.", encode=_multiplied(lambda config: config.attention_out_multiplier)),
            Rows(r"\.gate_proj\.", encode=_multiplied(lambda config: config.mlp_multipliers[0])),
            Rows(r"\.down_proj\.", encode=_multiplied(lambda config: config.mlp_multipliers[1])),
            Rows(r"^lm_head\.", encode=_multiplied(lambda config: config.lm_head_multiplier)),
            Rows(r"\.embed_tokens\.", encode=_multiplied(lambda config: config.embedding_multiplier)),
            Rows(r"\.pre_ff_layernorm\.weight$", ("ffn_norm.weight",)),
        ),
    ),
    Architecture(
        "nemotron_h", "nemotron_h", _NEMOTRON, _NEMOTRON_LAYOUTS, fits=lambda config: "moe" not in config.layer_types
    ),
    Architecture(
        "nemotron_h_moe",
        "nemotron_h",
        (
            *_NEMOTRON,
            Entry("expert_feed_forward_length", "moe_intermediate_size", "size"),
            Entry("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", "size"),
            Entry("expert_count", "n_routed_experts", "size"),
            Entry("expert_shared_count", "n_shared_experts", "size"),
            EXPERTS_PER_TOKEN,
            Entry("expert_weights_norm", "norm_topk_prob", "boolean", default=True),
            Entry("expert_weights_scale", "routed_scaling_factor", "number", 1.0, zero=1.0),
            Entry("moe_latent_size", "moe_latent_size", "integer", 0, zero=None),
            Entry("expert_group_count", "n_group", "integer", 1, zero=1),
            Fixed("topk_group", 1),
        ),
        (
            Rows(r"\.experts\.up_proj$", ("ffn_up_exps.weight",), stacked=True),
            Rows(r"\.experts\.down_proj$", ("ffn_down_exps.weight",), stacked=True),
            Rows(r"\.mixer\.gate\.weight$", ("ffn_gate_inp.weight",)),
            CORRECTION_BIAS,
            Rows(r"\.shared_experts\.up_proj\.weight$", ("ffn_up_shexp.weight",)),
            Rows(r"\.shared_experts\.down_proj\.weight$", ("ffn_down_shexp.weight",)),
            Rows(r"\.fc1_latent_proj\.weight$", ("ffn_latent_down.weight",)),
            Rows(r"\.fc2_latent_proj\.weight$", ("ffn_latent_up.weight",)),
            *_NEMOTRON_LAYOUTS,
        ),
    ),
)
