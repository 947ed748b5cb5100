"""Decoders with recurrent layers: short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import ExpertGatingFuncType

from engine.gguf.architectures.architecture import Architecture
from engine.gguf.architectures.attention import COMMON, HEADS, SILU, WIDTH
from engine.gguf.architectures.experts import CORRECTION_BIAS, EXPERT_WIDTH, EXPERTS, EXPERTS_PER_TOKEN, gate
from engine.gguf.architectures.layouts import Rows, squeeze_filter
from engine.gguf.architectures.rotary import ROTATION
from engine.gguf.architectures.settings import Derived, Entry, Fields, Fixed, Hyperparameters, Value
from engine.gguf.container import GgufError


def attention_layers(file: Hyperparameters) -> tuple[list[bool], int]:
    """Whether each layer has attention, and the key and value heads of those that do. Raises GgufError."""
    key_heads = file.sizes("attention.head_count_kv")
    if len(set(key_heads) - {0}) != 1:
        raise GgufError("its attention layers have different numbers of heads")
    return [heads > 0 for heads in key_heads], max(key_heads)


def _read_convolved_layers(file: Hyperparameters) -> Fields:
    attends, key_heads = attention_layers(file)
    kinds = ["full_attention" if attention else "conv" for attention in attends]
    return {"num_key_value_heads": key_heads, "layer_types": kinds}


def _write_convolved_layers(config: Any) -> Mapping[str, Value]:
    heads = config.num_key_value_heads
    return {"attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in config.layer_types]}


def _write_width(config: Any) -> Mapping[str, Value]:
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = int((config.block_ffn_dim_multiplier or 1) * int(2 * width / 3))
        width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return {"feed_forward_length": width}


CONVOLUTIONS = (
    COMMON,
    Derived(writes=HEADS.write),
    Derived(_read_convolved_layers, _write_convolved_layers),
    SILU,
    ROTATION,
    Entry("shortconv.l_cache", "conv_L_cache", "size"),
    Entry("attention.layer_norm_rms_epsilon", "norm_eps", "number"),
    Fixed("conv_bias", False),
    Derived(lambda file: {"conv_bias": file.has_tensor("shortconv.conv.bias")}),
)
CONVOLUTION_FILTER = Rows(r"\.conv\.conv\.weight$", encode=squeeze_filter)

RECURRENT = (
    Architecture(
        "lfm2",
        "lfm2",
        (*CONVOLUTIONS, WIDTH, Derived(lambda file: {"block_auto_adjust_ff_dim": False}, _write_width)),
        (CONVOLUTION_FILTER,),
    ),
    Architecture(
        "lfm2moe",
        "lfm2_moe",
        (
            *CONVOLUTIONS,
            WIDTH,
            EXPERT_WIDTH,
            Entry("expert_count", "num_experts", "size"),
            EXPERTS_PER_TOKEN,
            Entry("leading_dense_block_count", "num_dense_layers", "integer", 0),
            Fixed("norm_topk_prob", True),
            Fixed("routed_scaling_factor", 1.0),
            Derived(lambda file: {"use_expert_bias": file.has_tensor(".exp_probs_b")}),
            gate(ExpertGatingFuncType.SIGMOID),
        ),
        (CONVOLUTION_FILTER, *EXPERTS, CORRECTION_BIAS),
    ),
)
