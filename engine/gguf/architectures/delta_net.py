"""Decoders with gated delta nets, and attention in every few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.gguf.architectures.architecture import Architecture
from engine.gguf.architectures.attention import BIASES, COMMON, EPSILON, HEADS, SILU, WIDTH
from engine.gguf.architectures.experts import EXPERT_WIDTH, EXPERTS, EXPERTS_PER_TOKEN
from engine.gguf.architectures.layouts import Rows, decode_decay, encode_decay, shifted_norms, squeeze_filter
from engine.gguf.architectures.rotary import PARTIAL_ROTATION, write_rotation
from engine.gguf.architectures.settings import Derived, Entry, Fields, Fixed, Hyperparameters, Inexpressible, Value

# Rotary columns of the axes of images; tokens of a text have the same position on all of them.
_SECTIONS = [11, 11, 10]


def _read_value_width(file: Hyperparameters) -> Fields:
    return {"linear_value_head_dim": file.size("ssm.inner_size") // file.size("ssm.time_step_rank")}


def _write_value_width(config: Any) -> Mapping[str, Value]:
    return {"ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads}


def _layer_types(layers: int, interval: int) -> list[str]:
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


def _read_layers(file: Hyperparameters) -> Fields:
    return {"layer_types": _layer_types(file.layers, file.size("full_attention_interval", 4))}


def _write_layers(config: Any) -> Mapping[str, Value]:
    kinds = list(config.layer_types)
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if kinds != _layer_types(len(kinds), interval):
        raise Inexpressible("attention in other layers than every n-th one is not written")
    return {"full_attention_interval": interval}


def _read_sections(file: Hyperparameters) -> Fields:
    fields = PARTIAL_ROTATION.read(file)
    sections = file.metadata.get(file.key("rope.dimension_sections"))
    if isinstance(sections, list):
        fields["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return fields


def _write_sections(config: Any) -> Mapping[str, Value]:
    sections = config.rope_parameters.get("mrope_section") or _SECTIONS
    return write_rotation(config) | {"rope.dimension_sections": [*sections, 0]}


def _split_rows(config: Any, rows: int) -> list[int]:
    """The rows of queries, keys and values, and of the output gate."""
    gates = config.linear_num_value_heads * config.linear_value_head_dim
    return [rows - gates, gates]


def _by_key_head(config: Any, rows: int) -> NDArray[np.intp]:
    """Order of rows that a parameter groups by key head: all queries, all keys, all values, all gates in files."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim, config.linear_key_head_dim, values // keys, values // keys]
    starts = np.cumsum([0, *(keys * size for size in sizes[:-1])])
    parts = [start + np.arange(keys * size).reshape(keys, size) for start, size in zip(starts, sizes, strict=True)]
    return np.concatenate(parts, 1).ravel()


def _tiled_heads(config: Any, width: int) -> NDArray[np.intp]:
    """Order of value heads that a parameter groups by key head: the first ones of all groups come first in files."""
    keys = config.linear_num_key_heads
    heads = np.arange(config.linear_num_value_heads * width).reshape(-1, keys, width)
    return heads.swapaxes(0, 1).ravel()


def _tiled(config: Any, rows: int) -> NDArray[np.intp]:
    return _tiled_heads(config, rows // config.linear_num_value_heads)


def _tiled_values(config: Any, rows: int) -> NDArray[np.intp]:
    """Only the value rows, which follow the query and key rows."""
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate((np.arange(before), before + _tiled_heads(config, config.linear_value_head_dim)))


_DELTA_NET = (
    Entry("ssm.conv_kernel", "linear_conv_kernel_dim", "size"),
    Entry("ssm.state_size", "linear_key_head_dim", "size"),
    Entry("ssm.group_count", "linear_num_key_heads", "size"),
    Entry("ssm.time_step_rank", "linear_num_value_heads", "size"),
    Derived(_read_value_width, _write_value_width),
    Derived(_read_layers, _write_layers),
)
_SHARED_EXPERT_WIDTH = Entry("expert_shared_feed_forward_length", "shared_expert_intermediate_size", "size")
_MIXTURE = (Entry("expert_count", "num_experts", "size"), EXPERTS_PER_TOKEN, EXPERT_WIDTH, _SHARED_EXPERT_WIDTH)
_DECODER = (COMMON, HEADS, EPSILON, BIASES, SILU, *_DELTA_NET)
_IMAGE_ROTATION = Derived(_read_sections, _write_sections)
_NORMS = shifted_norms(r"(?<!linear_attn\.)\bnorm\.weight$|(layernorm|_norm|enorm|hnorm)\.weight$")
_TILED = (
    Rows(r"\.linear_attn\.in_proj_qkv\.", order=_tiled_values),
    Rows(r"\.linear_attn\.in_proj_[zab]\.", order=_tiled),
    Rows(r"\.linear_attn\.conv1d\.weight$", order=_tiled_values, encode=squeeze_filter),
    Rows(r"\.linear_attn\.A_log$", order=_tiled, encode=encode_decay, decode=decode_decay),
    Rows(r"\.linear_attn\.dt_bias$", ("ssm_dt.bias",), order=_tiled),
    Rows(r"\.linear_attn\.out_proj\.", column_order=_tiled),
    _NORMS,
)

DELTA_NETS = (
    Architecture("qwen35", "qwen3_5_text", (*_DECODER, WIDTH, _IMAGE_ROTATION), _TILED),
    Architecture("qwen35moe", "qwen3_5_moe_text", (*_DECODER, *_MIXTURE, _IMAGE_ROTATION), (*_TILED, *EXPERTS)),
    Architecture(
        "qwen3next",
        "qwen3_next",
        (
            *_DECODER,
            Derived(writes=WIDTH.write),
            *_MIXTURE,
            PARTIAL_ROTATION,
            Fixed("norm_topk_prob", True),
            Fixed("decoder_sparse_step", 1),
            Fixed("mlp_only_layers", []),
        ),
        (
            Rows(
                r"\.linear_attn\.in_proj_qkvz\.weight$",
                ("attn_qkv.weight", "attn_gate.weight"),
                fused="ssm_in.weight",
                parts=_split_rows,
                order=_by_key_head,
            ),
            Rows(r"\.linear_attn\.conv1d\.weight$", encode=squeeze_filter),
            Rows(r"\.linear_attn\.A_log$", encode=encode_decay, decode=decode_decay),
            Rows(r"\.linear_attn\.dt_bias$", ("ssm_dt.bias",)),
            _NORMS,
            *EXPERTS,
        ),
    ),
)
