"""Rotary embeddings: metadata and the tensors of factors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from gguf import MODEL_TENSOR, TENSOR_NAMES
from numpy.typing import NDArray
from torch import Tensor

from engine.gguf.architectures.settings import Derived, Fields, Hyperparameters, Inexpressible, Value, head_size
from engine.gguf.container import GgufError

# Parameters of Llama 3's rotary scaling in published models; files carry the factors of the frequencies instead.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# YaRN: metadata, the rotary parameter, and the default.
_YARN = (
    ("rope.scaling.yarn_beta_fast", "beta_fast", 32.0),
    ("rope.scaling.yarn_beta_slow", "beta_slow", 1.0),
)
# llama.cpp stores a tenth of DeepSeek's exponent.
_LOG_MULTIPLIER = 0.1
_NO_ROTATION = 1e30


def read_rotation(file: Hyperparameters) -> Fields:
    """The rotary parameters of all layers, or of the layers with full attention. Raises GgufError."""
    rope: Fields = {"rope_type": "default", "rope_theta": file.positive("rope.freq_base", 10000.0)}
    if "rope_freqs.weight" in file.tensors:
        return rope | _frequency_factors(file, rope["rope_theta"])
    if "rope_factors_long.weight" in file.tensors:
        return rope | _long_rotation(file)
    kind = file.text("rope.scaling.type", "linear")
    factor = file.number("rope.scaling.factor", file.number("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return rope
    if factor < 0:
        raise GgufError(f"its metadata {file.key('rope.scaling.factor')} is {factor}, not above 0")
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return rope | _yarn(file, factor)
    raise GgufError(f"its metadata {file.key('rope.scaling.type')} is {kind}, which is not supported")


def _yarn(file: Hyperparameters, factor: float) -> Fields:
    rope: Fields = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.size("rope.scaling.original_context_length", file.context),
    }
    rope |= {name: file.number(key, default) for key, name, default in _YARN}
    if file.has("rope.scaling.attn_factor"):
        # Files have the ratio to the default.
        rope["attention_factor"] = file.number("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1)
    return rope


def _long_rotation(file: Hyperparameters) -> Fields:
    return {
        "rope_type": "longrope",
        "short_factor": file.factors("rope_factors_short.weight"),
        "long_factor": file.factors("rope_factors_long.weight"),
        "original_max_position_embeddings": file.size("rope.scaling.original_context_length"),
        "attention_factor": file.number("rope.scaling.attn_factor", 1.0),
    }


def _frequency_factors(file: Hyperparameters, base: float) -> Fields:
    """The scaling of Llama 3 if the factors are its own; otherwise they are used unchanged, in LongRoPE's form."""
    factors = file.factors("rope_freqs.weight")
    llama3 = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    if np.allclose(factors, _llama3_factors(llama3, base, len(factors)), rtol=1e-4, atol=0):
        return llama3
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": file.context,
        "attention_factor": 1.0,
    }


def _llama3_factors(rope: Fields, base: float, pairs: int) -> NDArray[np.float64]:
    """Divisors of the rotary frequencies: 1 for short wavelengths, the factor for long ones, a mix between."""
    lengths = 2 * math.pi * base ** (np.arange(pairs) / pairs)
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((original / lengths - low) / (high - low), 0.0, 1.0)
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return factors


def rotary_parameters(config: Any) -> Fields:
    """The rotary parameters of the layers with full attention."""
    parameters: Fields = config.rope_parameters
    return dict(parameters.get("full_attention", parameters))


def write_rotation(config: Any) -> dict[str, Value]:
    """The metadata of rotary embeddings. Raises Inexpressible."""
    rope = rotary_parameters(config)
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    values: dict[str, Value] = {
        "rope.dimension_count": int(head_size(config) * share),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    local = config.rope_parameters.get("sliding_attention")
    if local is not None:
        values["rope.freq_base_swa"] = float(local["rope_theta"])
    return values | _written_scaling(config, rope)


def _written_scaling(config: Any, rope: Fields) -> dict[str, Value]:
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):
        # The factors of llama3 are a tensor.
        return {}
    if kind not in ("linear", "yarn", "longrope"):
        raise Inexpressible(f"rotary embeddings of type {kind} are not written")
    values: dict[str, Value] = {"rope.scaling.type": kind}
    if kind == "longrope":
        return values | _written_long_rotation(config, rope)
    values["rope.scaling.factor"] = float(rope["factor"])
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings")
        if original is not None:
            values["rope.scaling.original_context_length"] = int(original)
        values |= {key: float(rope[name]) for key, name, _ in _YARN if rope.get(name) is not None}
        if rope.get("attention_factor") is not None:
            values["rope.scaling.attn_factor"] = rope["attention_factor"] / (0.1 * math.log(rope["factor"]) + 1)
    return values


def _written_long_rotation(config: Any, rope: Fields) -> dict[str, Value]:
    original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    ratio = config.max_position_embeddings / original
    factor = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return {
        "rope.scaling.original_context_length": int(original),
        "rope.scaling.attn_factor": float(rope.get("attention_factor") or factor),
    }


def rotary_factors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of rotary factors: llama3's by frequency, LongRoPE's short and long ones."""
    if not getattr(config, "rope_parameters", None):
        return
    rope = rotary_parameters(config)
    kind = rope.get("rope_type")
    if kind == "llama3":
        factors = _llama3_factors(rope, rope["rope_theta"], head_size(config) // 2)
        yield f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]}.weight", torch.from_numpy(factors).float()
    if kind == "proportional":
        # Columns without rotation have the frequency of a large divisor.
        width = config.per_layer_config[list(config.layer_types).index("full_attention")].head_dim
        rotated = int(rope.get("partial_rotary_factor", 1.0) * width / 2)
        divisors = torch.where(torch.arange(width // 2) < rotated, 1.0, _NO_ROTATION)
        yield f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]}.weight", divisors
    if kind == "longrope":
        for which, name in ((MODEL_TENSOR.ROPE_FACTORS_LONG, "long"), (MODEL_TENSOR.ROPE_FACTORS_SHORT, "short")):
            yield f"{TENSOR_NAMES[which]}.weight", torch.tensor(rope[f"{name}_factor"], dtype=torch.float32)


def _read_partial(file: Hyperparameters) -> Fields:
    rotated = file.size("rope.dimension_count", file.head_width)
    return {"rope_parameters": read_rotation(file) | {"partial_rotary_factor": rotated / file.head_width}}


def _read_by_layer(local: float | None, file: Hyperparameters) -> Fields:
    full = read_rotation(file)
    base = file.positive("rope.freq_base_swa", full["rope_theta"] if local is None else local)
    sliding = {"rope_type": "default", "rope_theta": base}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _read_latent(file: Hyperparameters) -> Fields:
    rope = read_rotation(file)
    if rope["rope_type"] == "yarn" and file.has("rope.scaling.yarn_log_multiplier"):
        scale = file.number("rope.scaling.yarn_log_multiplier") / _LOG_MULTIPLIER
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    return {"rope_parameters": rope}


def _write_latent(config: Any) -> Mapping[str, Value]:
    values = write_rotation(config) | {"rope.dimension_count": config.qk_rope_head_dim}
    scale = rotary_parameters(config).get("mscale_all_dim")
    return values | ({"rope.scaling.yarn_log_multiplier": _LOG_MULTIPLIER * scale} if scale else {})


def _write_fixed_alpha(config: Any) -> Mapping[str, Value]:
    """A fixed alpha has the effect of a larger base."""
    rope = rotary_parameters(config)
    if rope.get("rope_type") != "dynamic" or not rope.get("alpha"):
        return write_rotation(config)
    width = head_size(config)
    base = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
    return {"rope.dimension_count": width, "rope.freq_base": float(base), "rope.scaling.type": "none"}


def _read_tempered(file: Hyperparameters) -> Fields:
    rope = read_rotation(file)
    if rope["rope_type"] == "yarn":
        scale = file.number("rope.scaling.yarn_log_multiplier", 0.0)
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    original = file.size("rope.scaling.original_context_length", file.context)
    beta = file.number("attention.temperature_scale")
    return {
        "rope_parameters": rope | {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original},
    }


def _write_tempered(config: Any) -> Mapping[str, Value]:
    rope = rotary_parameters(config)
    values = write_rotation(config)
    values["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    if rope.get("original_max_position_embeddings"):
        values["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
    if rope.get("mscale_all_dim"):
        if rope.get("mscale") != rope["mscale_all_dim"]:
            raise Inexpressible("mscale other than mscale_all_dim is not written")
        values["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
    return values


def rotation_by_layer(local: float | None) -> Derived:
    """The rotations of layers with full attention and of layers with a window; `local` is the base of the latter that
    files omit, None: the one of the former.
    """
    return Derived(partial(_read_by_layer, local), write_rotation)


ROTATION = Derived(lambda file: {"rope_parameters": read_rotation(file)}, write_rotation)
# Some columns of each head.
PARTIAL_ROTATION = Derived(_read_partial, write_rotation)
# Separate columns of the keys, next to the latent ones.
LATENT_ROTATION = Derived(_read_latent, _write_latent)
# With a fixed alpha, which files hold as a larger base.
FIXED_ALPHA_ROTATION = Derived(lambda file: {"rope_parameters": read_rotation(file)}, _write_fixed_alpha)
# Queries are scaled by their position.
TEMPERED_ROTATION = Derived(_read_tempered, _write_tempered)
