"""The configuration of transformers for a model in GGUF files.

Values that files do not carry are those of llama.cpp, because files omit them for this reason; where transformers'
default differs, it is overridden here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType, LlamaFileType
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from transformers import AutoConfig

from engine.gguf.container import GgufError, GgufModel, Metadata
from engine.gguf.vocabulary import read_special_tokens

_MAX_SIZE = 2**31 - 1
# Values of `expert_gating_func`.
_SIGMOID = 2
# Parameters of Llama 3's rotary scaling in published models; files carry the factors of the frequencies instead.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

Fields = dict[str, Any]


class Hyperparameters:
    """The metadata under the name of the architecture, and facts of the tensors."""

    def __init__(self, model: GgufModel) -> None:
        self.metadata, self.tensors = model.metadata, model.tensors
        self.architecture = self.metadata.text("general.architecture")
        self.context = self.size("context_length")
        self.hidden, self.heads = self.size("embedding_length"), self.uniform_size("attention.head_count")
        if self.heads > self.hidden:
            raise GgufError(f"its metadata counts {self.heads} heads for {self.hidden} columns")
        self.layers = self.size("block_count") - self.integer("nextn_predict_layers", 0)
        self.head_width = self.size("attention.key_length", max(self.hidden // self.heads, 1))
        if not 0 < self.layers <= len(self.tensors):
            raise GgufError(f"its metadata counts {self.layers} layers, but it has {len(self.tensors)} tensors")

    def key(self, name: str) -> str:
        """The key of a value of this architecture."""
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether the file carries a value."""
        return self.key(name) in self.metadata

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer. Raises GgufError."""
        return self.metadata.integer(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        """A number. Raises GgufError."""
        return self.metadata.number(self.key(name), default)

    def positive(self, name: str, default: float) -> float:
        """A number above 0. Raises GgufError."""
        value = self.number(name, default)
        if value <= 0:
            raise GgufError(f"its metadata {self.key(name)} is {value}, not above 0")
        return value

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """A boolean. Raises GgufError."""
        return self.metadata.boolean(self.key(name), default)

    def text(self, name: str, default: str | None = None) -> str:
        """A string. Raises GgufError."""
        return self.metadata.text(self.key(name), default)

    def size(self, name: str, default: int | None = None) -> int:
        """An integer above 0. Raises GgufError."""
        value = self.integer(name, default)
        if not 0 < value <= _MAX_SIZE:
            raise GgufError(f"its metadata {self.key(name)} is {value}, no size")
        return value

    def sizes(self, name: str) -> list[int]:
        """An integer of each layer, 0 or more; one for all layers in most files. Raises GgufError."""
        value = self.metadata.get(self.key(name))
        values = value if isinstance(value, list) else [value] * self.layers
        sizes = [size for size in values if isinstance(size, int) and 0 <= size <= _MAX_SIZE]
        if len(sizes) != len(values) or len(sizes) < self.layers:
            raise GgufError(f"its metadata {self.key(name)} is not one size for each of {self.layers} layers")
        return sizes[: self.layers]

    def uniform_size(self, name: str) -> int:
        """A size that all layers share. Raises GgufError."""
        if not isinstance(self.metadata.get(self.key(name)), list):
            return self.size(name)
        sizes = set(self.metadata[self.key(name)])  # type: ignore[arg-type]
        value = sizes.pop() if len(sizes) == 1 else 0
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
            raise GgufError(f"its metadata {self.key(name)} differs between layers, which {self.architecture} excludes")
        return value

    def factors(self, tensor: str) -> list[float]:
        """The values of a small float32 tensor, such as the factors of rotary frequencies. Raises GgufError."""
        found = self.tensors.get(tensor)
        if found is None:
            raise GgufError(f"it lacks the tensor {tensor}")
        if found.type != GGMLQuantizationType.F32 or len(found.shape) != 1:
            raise GgufError(f"the tensor {tensor} is no vector in F32")
        factors: list[float] = found.data.view(np.float32).tolist()
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise GgufError(f"the tensor {tensor} has factors that are not positive")
        return factors


def read_config(model: GgufModel) -> Any:
    """The configuration of a language model; its end tokens are a list. Raises GgufError for other models."""
    reason = _other_model_reason(model)
    if reason is not None:
        raise GgufError(reason)
    own = Hyperparameters(model)
    try:
        model_type, fields = ARCHITECTURES[own.architecture](own)
        return AutoConfig.for_model(model_type, **_common_fields(own) | fields)
    except (ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise GgufError(f"its metadata has values that do not fit together: {reason}") from error


def is_language_model(metadata: Metadata) -> bool:
    """Whether the file is a language model, and no encoder of images, adapter or calibration. Raises GgufError."""
    architecture = metadata.text("general.architecture")
    return metadata.text("general.type", "model") == "model" and architecture != "clip"


def file_type(metadata: Metadata) -> str | None:
    """The name of the mix of types in a file, such as Q4_K_M."""
    try:
        name = str(LlamaFileType(metadata.integer("general.file_type", -1)).name)
    except ValueError:
        return None
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def stored_dtype(model: GgufModel) -> torch.dtype:
    """The dtype that has the precision of the weights: float32 if matrices are in float32 or float16."""
    wide = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.F64)
    matrices = [tensor for tensor in model.tensors.values() if len(tensor.shape) > 1]
    size = sum(tensor.data.nbytes for tensor in matrices)
    wide_size = sum(tensor.data.nbytes for tensor in matrices if tensor.type in wide)
    return torch.float32 if 2 * wide_size > size else torch.bfloat16


def _other_model_reason(model: GgufModel) -> str | None:
    """Why a file is no language model that can be served; None: it is one."""
    metadata = model.metadata
    kind, architecture = metadata.text("general.type", "model"), metadata.text("general.architecture")
    if architecture == "clip" or kind == "mmproj":
        return "it is the encoder of images or audio (mmproj) of a model; pass the file of the language model"
    if kind != "model":
        return f"it is not a model, but has the type {kind} ({_TYPES.get(kind, 'unknown')})"
    if architecture not in ARCHITECTURES:
        return f"the architecture {architecture} is not supported in GGUF files; supported: {', '.join(ARCHITECTURES)}"
    if "token_embd.weight" not in model.tensors:
        return "it lacks the tensor token_embd.weight: it has only a tokenizer, or is damaged"
    if not metadata.boolean(f"{architecture}.attention.causal", True):
        return "its attention is not causal: it is an embedding model, which is not supported in GGUF files"
    return None


_TYPES = {"adapter": "LoRA weights for a model", "imatrix": "importances for a quantiser", "vocab": "a tokenizer"}


def _common_fields(own: Hyperparameters) -> Fields:
    """The fields of all architectures."""
    vocabulary = own.tensors["token_embd.weight"].shape[0]
    tokens = read_special_tokens(own.metadata)
    if tokens.size > vocabulary:
        raise GgufError(f"its tokenizer has {tokens.size} tokens, but its embeddings have {vocabulary} rows")
    return {
        "vocab_size": vocabulary,
        "hidden_size": own.hidden,
        "num_hidden_layers": own.layers,
        "num_attention_heads": own.heads,
        "max_position_embeddings": own.context,
        "tie_word_embeddings": "output.weight" not in own.tensors,
        "eos_token_id": sorted(tokens.end_tokens) or None,
        "bos_token_id": tokens.special.get("bos"),
        "pad_token_id": tokens.special.get("pad"),
    }


def _dense(own: Hyperparameters) -> Fields:
    """Heads, norms, rotation and MLP of most decoders."""
    if own.size("attention.value_length", own.head_width) != own.head_width:
        raise GgufError("its values have another width than its keys")
    key_heads = own.uniform_size("attention.head_count_kv") if own.has("attention.head_count_kv") else own.heads
    return {
        "head_dim": own.head_width,
        "num_key_value_heads": key_heads,
        "intermediate_size": own.uniform_size("feed_forward_length"),
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in own.tensors or "blk.0.attn_qkv.bias" in own.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in own.tensors,
        "rope_parameters": _rope(own),
    }


def _rope(own: Hyperparameters) -> Fields:
    """The rotation of all layers, or of the layers with full attention."""
    rope: Fields = {"rope_type": "default", "rope_theta": own.positive("rope.freq_base", 10000.0)}
    if "rope_freqs.weight" in own.tensors:
        return rope | _frequency_factors(own, rope["rope_theta"])
    if "rope_factors_long.weight" in own.tensors:
        return rope | _long_rope(own)
    kind = own.text("rope.scaling.type", "linear")
    factor = own.number("rope.scaling.factor", own.number("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return rope
    if factor < 0:
        raise GgufError(f"its metadata {own.key('rope.scaling.factor')} is {factor}, not above 0")
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return rope | _yarn(own, factor)
    raise GgufError(f"its metadata {own.key('rope.scaling.type')} is {kind}, which is not supported")


def _yarn(own: Hyperparameters, factor: float) -> Fields:
    rope: Fields = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": own.size("rope.scaling.original_context_length", own.context),
        "beta_fast": own.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": own.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if own.has("rope.scaling.attn_factor"):
        rope["attention_factor"] = own.number("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1)
    return rope


def _long_rope(own: Hyperparameters) -> Fields:
    return {
        "rope_type": "longrope",
        "short_factor": own.factors("rope_factors_short.weight"),
        "long_factor": own.factors("rope_factors_long.weight"),
        "original_max_position_embeddings": own.size("rope.scaling.original_context_length"),
        "attention_factor": own.number("rope.scaling.attn_factor", 1.0),
    }


def _frequency_factors(own: Hyperparameters, base: float) -> Fields:
    """The scaling of Llama 3 if the factors are its own; otherwise they are used as they are, in LongRoPE's form."""
    factors = own.factors("rope_freqs.weight")
    llama3 = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    if np.allclose(factors, llama3_factors(llama3, base, len(factors)), rtol=1e-4, atol=0):
        return llama3
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": own.context,
        "attention_factor": 1.0,
    }


def llama3_factors(rope: Fields, base: float, pairs: int) -> NDArray[np.float64]:
    """Divisors of the rotary frequencies: 1 for short wavelengths, the factor for long ones, a mix between."""
    lengths = 2 * math.pi * base ** (np.arange(pairs) / pairs)
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((original / lengths - low) / (high - low), 0.0, 1.0)
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return factors


def _partial_rope(own: Hyperparameters) -> Fields:
    """The rotation of some columns of each head."""
    rotated = own.size("rope.dimension_count", own.head_width)
    return _rope(own) | {"partial_rotary_factor": rotated / own.head_width}


def _sliding_layers(own: Hyperparameters, period: int) -> list[str]:
    """The attention of each layer; by default the last layer of each period has full attention."""
    pattern = own.metadata.get(own.key("attention.sliding_window_pattern"), period)
    if isinstance(pattern, int):
        sliding = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(own.layers)]
    elif isinstance(pattern, list) and len(pattern) >= own.layers:
        sliding = [bool(each) for each in pattern[: own.layers]]
    else:
        raise GgufError(f"its metadata {own.key('attention.sliding_window_pattern')} is not one value for each layer")
    return ["sliding_attention" if each else "full_attention" for each in sliding]


def _sliding_window(own: Hyperparameters, default: int) -> int | None:
    """The window in tokens; None: the file says that there is none."""
    return own.integer("attention.sliding_window", default) or None


def _llama(own: Hyperparameters) -> tuple[str, Fields]:
    if not own.integer("expert_count", 0):
        return "llama", _dense(own)
    experts = {"num_local_experts": own.size("expert_count"), "num_experts_per_tok": own.size("expert_used_count")}
    return "mixtral", _dense(own) | experts | {"sliding_window": None}


def _qwen2(own: Hyperparameters) -> tuple[str, Fields]:
    return "qwen2", _dense(own)


def _qwen3(own: Hyperparameters) -> tuple[str, Fields]:
    return "qwen3", _dense(own)


def _qwen3moe(own: Hyperparameters) -> tuple[str, Fields]:
    experts = {
        "num_experts": own.size("expert_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "moe_intermediate_size": own.uniform_size("expert_feed_forward_length"),
        "norm_topk_prob": own.boolean("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return "qwen3_moe", _dense(own) | experts


def _gemma2(own: Hyperparameters) -> tuple[str, Fields]:
    fields = {
        "sliding_window": _sliding_window(own, 4096),
        "layer_types": _sliding_layers(own, 2),
        "attn_logit_softcapping": own.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": own.number("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": own.hidden // own.heads if own.layers == 46 else own.head_width,
    }
    return "gemma2", _dense(own) | fields


def _gemma3(own: Hyperparameters) -> tuple[str, Fields]:
    window = _sliding_window(own, 0)
    local = {"rope_type": "default", "rope_theta": own.positive("rope.freq_base_swa", 10000.0)}
    fields = {
        # A window that no layer uses is not None, as transformers computes with it.
        "sliding_window": window or own.context,
        "layer_types": ["full_attention"] * own.layers if window is None else _sliding_layers(own, 6),
        "rope_parameters": {"full_attention": _rope(own), "sliding_attention": local},
        "final_logit_softcapping": own.number("final_logit_softcapping", 0.0) or None,
        "attn_logit_softcapping": None,
        "query_pre_attn_scalar": own.hidden // own.heads if own.layers == 62 else own.head_width,
    }
    return "gemma3_text", _dense(own) | fields


def _phi3(own: Hyperparameters) -> tuple[str, Fields]:
    fields = {
        "sliding_window": _sliding_window(own, 0),
        "original_max_position_embeddings": own.size("rope.scaling.original_context_length", own.context),
        "rope_parameters": _partial_rope(own),
    }
    return "phi3", _dense(own) | fields


def _granite(own: Hyperparameters) -> tuple[str, Fields]:
    if own.integer("expert_count", 0):
        raise GgufError("its architecture granite has experts, which is not supported in GGUF files")
    scale = own.number("attention.scale", 0.0)
    fields = {
        "embedding_multiplier": own.number("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": own.number("residual_scale", 1.0) or 1.0,
        "attention_multiplier": scale or own.head_width**-0.5,
        "logits_scaling": own.number("logit_scale"),
    }
    return "granite", _dense(own) | fields


def _glm4(own: Hyperparameters) -> tuple[str, Fields]:
    if own.has("rope.dimension_sections"):
        raise GgufError("its rotation has sections for images, which are not supported in GGUF files")
    return "glm4", _dense(own) | {"rope_parameters": _partial_rope(own)}


def _olmo2(own: Hyperparameters) -> tuple[str, Fields]:
    window = _sliding_window(own, 0)
    if window is None:
        return "olmo2", _dense(own)
    full = _rope(own)
    local = {"rope_type": "default", "rope_theta": own.positive("rope.freq_base_swa", full["rope_theta"])}
    fields = {
        "sliding_window": window,
        "layer_types": _sliding_layers(own, 4),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }
    return "olmo3", _dense(own) | fields


def _smollm3(own: Hyperparameters) -> tuple[str, Fields]:
    # Every fourth layer has no rotation.
    rotated = [int((layer + 1) % 4 != 0) for layer in range(own.layers)]
    return "smollm3", _dense(own) | {"no_rope_layers": rotated, "no_rope_layer_interval": 4}


def _lfm2(own: Hyperparameters) -> tuple[str, Fields]:
    key_heads = own.sizes("attention.head_count_kv")
    if len(set(key_heads) - {0}) != 1:
        raise GgufError("its attention layers have different numbers of heads")
    fields = {
        "num_key_value_heads": max(key_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in key_heads],
        "intermediate_size": own.uniform_size("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": own.size("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in own.tensors),
        "norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(own),
    }
    return "lfm2", fields


def _gpt_oss(own: Hyperparameters) -> tuple[str, Fields]:
    fields = {
        "num_local_experts": own.size("expert_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "intermediate_size": own.uniform_size("expert_feed_forward_length"),
        "sliding_window": _sliding_window(own, 128),
        "layer_types": _sliding_layers(own, 2),
        # Published models do not round the range of scaled frequencies.
        "rope_parameters": _rope(own) | {"truncate": False},
    }
    return "gpt_oss", _dense(own) | fields


def _deepseek2(own: Hyperparameters) -> tuple[str, Fields]:
    sigmoid = own.integer("expert_gating_func", 0) == _SIGMOID or any(".exp_probs_b" in name for name in own.tensors)
    rotated = own.size("rope.dimension_count")
    key_width = own.size("attention.key_length_mla", own.head_width)
    groups = own.integer("expert_group_count", 0) or 1
    fields: Fields = {
        "num_key_value_heads": own.heads,
        "kv_lora_rank": own.size("attention.kv_lora_rank"),
        "q_lora_rank": own.integer("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_width - rotated,
        "v_head_dim": own.size("attention.value_length_mla", own.size("attention.value_length", key_width)),
        "intermediate_size": own.uniform_size("feed_forward_length"),
        "moe_intermediate_size": own.uniform_size("expert_feed_forward_length"),
        "n_routed_experts": own.size("expert_count"),
        "n_shared_experts": own.size("expert_shared_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "first_k_dense_replace": own.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": own.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": own.boolean("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": own.integer("expert_group_used_count", 0) or 1,
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _latent_rope(own),
        "attention_bias": False,
    }
    if sigmoid:
        return "deepseek_v3", fields
    return "deepseek_v2", fields | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


def _latent_rope(own: Hyperparameters) -> Fields:
    rope = _rope(own)
    if rope["rope_type"] == "yarn" and own.has("rope.scaling.yarn_log_multiplier"):
        # Files carry a tenth of the scale.
        scale = 10 * own.number("rope.scaling.yarn_log_multiplier")
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    return rope


ARCHITECTURES: dict[str, Callable[[Hyperparameters], tuple[str, Fields]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "glm4": _glm4,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "lfm2": _lfm2,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
}
