"""The configuration of transformers for a model in GGUF files."""

from __future__ import annotations

from typing import Any

import torch
from gguf.constants import GGMLQuantizationType, LlamaFileType
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from engine.gguf.architectures.settings import Hyperparameters
from engine.gguf.architectures.table import readable, unreadable_reason
from engine.gguf.container import GgufError, GgufModel, Metadata

_TYPES = {"adapter": "LoRA weights for a model", "imatrix": "importances for a quantiser", "vocab": "a tokenizer"}


def read_config(model: GgufModel) -> Any:
    """The configuration of a language model; its end tokens are a list. Raises GgufError for other models."""
    reason = _other_model_reason(model)
    if reason is not None:
        raise GgufError(reason)
    architecture, file = readable(model), Hyperparameters(model)
    try:
        config = AutoConfig.for_model(architecture.model, **architecture.read(file))
    except (ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise GgufError(f"its metadata has values that do not fit together: {reason}") from error
    has_draft_layer = f"blk.{file.layers}.nextn.eh_proj.weight" in file.tensors
    if has_draft_layer or hasattr(config, "num_mtp_layers"):
        config.num_mtp_layers = int(has_draft_layer)
    return config


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
    unreadable = unreadable_reason(architecture)
    if unreadable is not None:
        return unreadable
    if "token_embd.weight" not in model.tensors:
        return "it lacks the tensor token_embd.weight: it has only a tokenizer, or is damaged"
    if not metadata.boolean(f"{architecture}.attention.causal", True):
        return "its attention is not causal: it is an embedding model, which is not supported in GGUF files"
    return None
