"""Decoders with attention and an MLP in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from engine.gguf.architectures.architecture import Architecture
from engine.gguf.architectures.layouts import INTERLEAVED_ROTATION, shifted_norms
from engine.gguf.architectures.rotary import (
    FIXED_ALPHA_ROTATION,
    PARTIAL_ROTATION,
    ROTATION,
    TEMPERED_ROTATION,
    rotation_by_layer,
)
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
from engine.gguf.vocabulary import read_special_tokens

# Layers of the 27B models of Gemma 2 and 3: their queries have another scale.
_LARGE_GEMMA2, _LARGE_GEMMA3 = 46, 62


def _read_common(file: Hyperparameters) -> Fields:
    vocabulary = file.tensors["token_embd.weight"].shape[0]
    tokens = read_special_tokens(file.metadata)
    if tokens.size > vocabulary:
        raise GgufError(f"its tokenizer has {tokens.size} tokens, but its embeddings have {vocabulary} rows")
    return {
        "vocab_size": vocabulary,
        "hidden_size": file.hidden,
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.heads,
        "max_position_embeddings": file.context,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": sorted(tokens.end_tokens) or None,
        "bos_token_id": tokens.special.get("bos"),
        "pad_token_id": tokens.special.get("pad"),
    }


def _write_common(config: Any) -> Mapping[str, Value]:
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    # "vision": only the tokens of images attend to later ones.
    if bidirectional not in (None, False, "vision"):
        raise Inexpressible(f"use_bidirectional_attention={bidirectional!r} is not written: GGUF has causal attention")
    return {
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "context_length": config.max_position_embeddings,
    }


def _read_heads(file: Hyperparameters) -> Fields:
    if file.size("attention.value_length", file.head_width) != file.head_width:
        raise GgufError("its values have another width than its keys")
    key_heads = file.size("attention.head_count_kv") if file.has("attention.head_count_kv") else file.heads
    return {"head_dim": file.head_width, "num_key_value_heads": key_heads}


def _write_heads(config: Any) -> Mapping[str, Value]:
    width = head_size(config)
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.head_count_kv": key_heads,
    }


def _read_biases(file: Hyperparameters) -> Fields:
    return {
        "attention_bias": file.has_tensor(".attn_q.bias") or file.has_tensor(".attn_qkv.bias"),
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def sliding_layers(file: Hyperparameters, period: int) -> list[str]:
    """The attention of each layer; by default the last layer of each period has full attention. Raises GgufError."""
    pattern = file.metadata.get(file.key("attention.sliding_window_pattern"), period)
    if isinstance(pattern, int):
        sliding = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(file.layers)]
    elif isinstance(pattern, list) and len(pattern) >= file.layers:
        sliding = [bool(slides) for slides in pattern[: file.layers]]
    else:
        raise GgufError(f"its metadata {file.key('attention.sliding_window_pattern')} is not one value for each layer")
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]


def sliding_window(file: Hyperparameters, default: int) -> int | None:
    """The window in tokens; None: the file says that there is none."""
    return file.integer("attention.sliding_window", default) or None


def _read_windows(default: int, period: int, file: Hyperparameters) -> Fields:
    return {"sliding_window": sliding_window(file, default), "layer_types": sliding_layers(file, period)}


def _write_windows(config: Any) -> Mapping[str, Value]:
    kinds = list(config.layer_types or [])
    if not config.sliding_window or "sliding_attention" not in kinds:
        return {"attention.sliding_window": 0}
    return {
        "attention.sliding_window": int(config.sliding_window),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
    }


def windows(default: int, period: int) -> Derived:
    """Layers with a window; by default all but the last one of each period."""
    return Derived(partial(_read_windows, default, period), _write_windows)


def _write_limited_context(config: Any) -> Mapping[str, Value]:
    """The architecture has no window, which has no effect within its size."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return {}
    return {"context_length": min(int(window), int(config.max_position_embeddings))}


def _read_sections(file: Hyperparameters) -> Fields:
    sections = file.metadata.get(file.key("rope.dimension_sections"))
    return {"mrope_section": sections[:3]} if isinstance(sections, list) else {}


def _write_sections(config: Any) -> Mapping[str, Value]:
    return {"rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0]}


def _read_gemma3_windows(file: Hyperparameters) -> Fields:
    window = sliding_window(file, 0)
    return {
        # A window that no layer uses is not None, as transformers computes with it.
        "sliding_window": window or file.context,
        "layer_types": ["full_attention"] * file.layers if window is None else sliding_layers(file, 6),
        "attn_logit_softcapping": None,
    }


def _read_query_scale(large: int, file: Hyperparameters) -> Fields:
    return {"query_pre_attn_scalar": file.hidden // file.heads if file.layers == large else file.head_width}


def _write_query_scale(large: int, config: Any) -> Mapping[str, Value]:
    scale = config.hidden_size // config.num_attention_heads if config.num_hidden_layers == large else head_size(config)
    if config.query_pre_attn_scalar != scale:
        raise Inexpressible(f"query_pre_attn_scalar={config.query_pre_attn_scalar} is not the size of a head")
    return {}


def _query_scale(large: int) -> Derived:
    """The scale of queries; models of `large` layers have another one."""
    return Derived(partial(_read_query_scale, large), partial(_write_query_scale, large))


def _read_phi3(file: Hyperparameters) -> Fields:
    return {
        "sliding_window": sliding_window(file, 0),
        "original_max_position_embeddings": file.size("rope.scaling.original_context_length", file.context),
    }


def _write_phi3(config: Any) -> Mapping[str, Value]:
    return {"attention.sliding_window": int(getattr(config, "sliding_window", None) or 0)}


def _read_no_experts(file: Hyperparameters) -> Fields:
    if file.integer("expert_count", 0):
        raise GgufError(f"its architecture {file.architecture} has experts, which is not supported in GGUF files")
    return {}


def _read_no_image_sections(file: Hyperparameters) -> Fields:
    if file.has("rope.dimension_sections"):
        raise GgufError("its rotation has sections for images, which are not supported in GGUF files")
    return {}


def _read_attention_scale(file: Hyperparameters) -> Fields:
    return {"attention_multiplier": file.number("attention.scale", 0.0) or file.head_width**-0.5}


def _write_attention_scale(config: Any) -> Mapping[str, Value]:
    return {"attention.scale": float(config.attention_multiplier)}


def _read_optional_windows(file: Hyperparameters) -> Fields:
    """Layers without a window have no rotation if others have one."""
    window = sliding_window(file, 0)
    return {
        "sliding_window": window,
        "layer_types": ["full_attention"] * file.layers if window is None else sliding_layers(file, 4),
    }


def _write_optional_windows(config: Any) -> Mapping[str, Value]:
    if config.sliding_window and "sliding_attention" not in config.layer_types:
        raise Inexpressible("a window that no layer has is not written")
    return _write_windows(config) if config.sliding_window else {}


def _read_rotated_layers(file: Hyperparameters) -> Fields:
    # Every fourth layer has no rotation.
    rotated = [int((layer + 1) % 4 != 0) for layer in range(file.layers)]
    return {"no_rope_layers": rotated, "no_rope_layer_interval": 4}


def _write_rotated_layers(config: Any) -> Mapping[str, Value]:
    if list(config.no_rope_layers) != [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]:
        raise Inexpressible("no_rope_layers other than every fourth layer are not written")
    return {}


COMMON = Derived(_read_common, _write_common)
HEADS = Derived(_read_heads, _write_heads)
WIDTH = Entry("feed_forward_length", "intermediate_size", "size")
EPSILON = Entry("attention.layer_norm_rms_epsilon", "rms_norm_eps", "number")
BIASES = Derived(_read_biases)
SILU = Fixed("hidden_act", "silu")
DECODER = (COMMON, HEADS, WIDTH, EPSILON, BIASES)
DENSE = (*DECODER, SILU, ROTATION)
LIMITED_CONTEXT = Derived(writes=_write_limited_context)
SCALES = (
    Derived(_read_attention_scale, _write_attention_scale),
    Entry("embedding_scale", "embedding_multiplier", "number", 1.0, zero=1.0),
    Entry("residual_scale", "residual_multiplier", "number", 1.0, zero=1.0),
    Entry("logit_scale", "logits_scaling", "number"),
)
# Of three-axis rotary positions, which are equal on all axes in a text.
_SECTIONS = Derived(_read_sections, _write_sections)
_NO_WINDOW = Derived(lambda file: {"sliding_window": None})
_GELU = Fixed("hidden_activation", "gelu_pytorch_tanh")
_GEMMA_NORMS = (shifted_norms(r"norm\.weight$"),)

ATTENTION = (
    Architecture("llama", "llama", (*DENSE, LIMITED_CONTEXT), (INTERLEAVED_ROTATION,), written=("mistral",)),
    Architecture("qwen2", "qwen2", (*DENSE, LIMITED_CONTEXT)),
    Architecture("qwen3", "qwen3", (*DENSE, LIMITED_CONTEXT)),
    Architecture(
        "qwen2vl", "qwen2", (*DENSE, LIMITED_CONTEXT, _SECTIONS), written=("qwen2_vl_text", "qwen2_5_vl_text")
    ),
    Architecture("qwen3vl", "qwen3", (*DENSE, LIMITED_CONTEXT, _SECTIONS), written=("qwen3_vl_text",)),
    Architecture(
        "gemma2",
        "gemma2",
        (
            *DECODER,
            _GELU,
            ROTATION,
            windows(4096, 2),
            Entry("attn_logit_softcapping", "attn_logit_softcapping", "number", 50.0, zero=None),
            Entry("final_logit_softcapping", "final_logit_softcapping", "number", 30.0, zero=None),
            _query_scale(_LARGE_GEMMA2),
        ),
        _GEMMA_NORMS,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        (
            *DECODER,
            _GELU,
            rotation_by_layer(10000.0),
            Derived(_read_gemma3_windows, _write_windows),
            Entry("final_logit_softcapping", "final_logit_softcapping", "number", 0.0, zero=None),
            _query_scale(_LARGE_GEMMA3),
        ),
        _GEMMA_NORMS,
    ),
    Architecture("phi3", "phi3", (*DECODER, SILU, PARTIAL_ROTATION, Derived(_read_phi3, _write_phi3))),
    Architecture(
        "granite", "granite", (*DENSE, LIMITED_CONTEXT, *SCALES, Derived(_read_no_experts)), (INTERLEAVED_ROTATION,)
    ),
    Architecture("glm4", "glm4", (*DECODER, SILU, PARTIAL_ROTATION, Derived(_read_no_image_sections))),
    Architecture("olmo2", "olmo2", DENSE, applies=lambda file: sliding_window(file, 0) is None),
    Architecture("olmo2", "olmo3", (*DECODER, SILU, rotation_by_layer(None), windows(0, 4))),
    Architecture(
        "smollm3",
        "smollm3",
        (*DENSE, LIMITED_CONTEXT, Derived(_read_rotated_layers, _write_rotated_layers)),
        (INTERLEAVED_ROTATION,),
    ),
    Architecture("seed_oss", "seed_oss", (*DENSE, Fixed("attention_out_bias", False))),
    Architecture(
        "exaone4",
        "exaone4",
        (*DENSE, Derived(_read_optional_windows, _write_optional_windows)),
    ),
    Architecture("ernie4_5", "ernie4_5", (*DENSE, Fixed("use_bias", False))),
    Architecture("hunyuan-dense", "hunyuan_v1_dense", (*DECODER, SILU, FIXED_ALPHA_ROTATION)),
    Architecture(
        "mistral3",
        "ministral3",
        (*DECODER, SILU, TEMPERED_ROTATION, LIMITED_CONTEXT, _NO_WINDOW, Derived(_read_no_experts)),
        (INTERLEAVED_ROTATION,),
        applies=lambda file: file.has("attention.temperature_scale"),
    ),
    # Models of this architecture without a temperature; they are written as llama.
    Architecture("mistral3", "mistral", (*DENSE, _NO_WINDOW, Derived(_read_no_experts)), (INTERLEAVED_ROTATION,)),
)
