"""The parameters of a transformers model as GGUF tensors: names, and layouts where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, TENSOR_NAMES, TensorNameMap, get_tensor_name_map
from torch import Tensor

from engine.convert.architectures import Inexpressible, architecture, head_size, rope_parameters
from engine.gguf.config import llama3_factors
from engine.gguf.weights import INTERLEAVED_ROTATION, SHIFTED_NORMS

_SUFFIXES = (".weight", ".bias")


def gguf_tensors(parameters: Mapping[str, Tensor], config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the GGUF tensors of a model's parameters (may be meta tensors), by name. Raises Inexpressible."""
    kind = architecture(config)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in parameters.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, piece in _parts(name, tensor, config):
            yield _gguf_name(part, names), _layout(part, piece, config, kind)
    yield from rotary_factors(config)


def _gguf_name(name: str, names: TensorNameMap) -> str:
    found = names.get_name(name, try_suffixes=_SUFFIXES)
    if found is None:
        raise Inexpressible(f"GGUF has no tensor for {name}")
    return str(found)


def _parts(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a parameter, with the names of checkpoints in place of the fused names of transformers."""
    if config.model_type == "gpt_oss":
        yield from _gpt_oss_parts(name, tensor)
    elif name.endswith(".experts.gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith(".experts.down_proj"):
        yield f"{name}.weight", tensor
    elif name.endswith(".kv_b_proj.weight"):
        yield from _latent_parts(name, tensor, config)
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _gpt_oss_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Experts are [experts, inputs, outputs] with gate and up outputs alternating."""
    suffix = ".bias" if name.endswith("_bias") else ".weight"
    base = name.removesuffix("_bias")
    if base.endswith(("gate_up_proj", "down_proj")):
        tensor = tensor if suffix == ".bias" else tensor.transpose(1, 2)
    if base.endswith("gate_up_proj"):
        yield base.replace("gate_up_proj", "gate_proj") + suffix, tensor[:, ::2]
        yield base.replace("gate_up_proj", "up_proj") + suffix, tensor[:, 1::2]
    elif base.endswith((".experts.down_proj", ".sinks")):
        yield base + suffix, tensor
    else:
        yield name, tensor


def _latent_parts(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """The key part is transposed, to be absorbed into the queries."""
    width = config.qk_nope_head_dim
    heads = tensor.view(-1, width + config.v_head_dim, tensor.shape[1])
    yield name.replace("kv_b_proj", "k_b_proj"), heads[:, :width].transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), heads[:, width:]


def _layout(name: str, tensor: Tensor, config: Any, kind: MODEL_ARCH) -> Tensor:
    if MODEL_ARCH_NAMES[kind] in INTERLEAVED_ROTATION and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
        return interleaved(tensor, head_size(config))
    if MODEL_ARCH_NAMES[kind] in SHIFTED_NORMS and name.endswith("norm.weight"):
        return tensor.float() + 1
    if kind is MODEL_ARCH.LFM2 and name.endswith("conv.conv.weight"):
        return tensor.squeeze(1)
    return tensor


def interleaved(projection: Tensor, width: int) -> Tensor:
    """A projection [heads * width, ...] with the two halves of each head interleaved."""
    halves = projection.view(-1, 2, width // 2, *projection.shape[1:])
    return halves.transpose(1, 2).reshape(projection.shape)


def rotary_factors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of rotary factors: llama3's by frequency, LongRoPE's short and long ones."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type")
    if kind == "llama3":
        factors = llama3_factors(rope, rope["rope_theta"], head_size(config) // 2)
        yield f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]}.weight", torch.from_numpy(factors).float()
    if kind == "longrope":
        for which, name in ((MODEL_TENSOR.ROPE_FACTORS_LONG, "long"), (MODEL_TENSOR.ROPE_FACTORS_SHORT, "short")):
            yield f"{TENSOR_NAMES[which]}.weight", torch.tensor(rope[f"{name}_factor"], dtype=torch.float32)
