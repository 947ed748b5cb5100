"""A checkpoint of transformers as a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_VERSION
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine.convert.gguf_file import OnProgress, TensorPlan, WeightType, file_type, plan_tensors, write_gguf
from engine.convert.tensors import gguf_tensors
from engine.convert.vocabulary import tokenizer_metadata
from engine.gguf.architectures.settings import Inexpressible, Value
from engine.gguf.architectures.table import writable
from engine.gguf.pre_tokenizers import PRE_TOKENIZERS
from engine.load.read.checkpoint import (
    broken_weights_reason,
    incomplete_weights_reason,
    missing_weights_reason,
    weight_files,
)
from engine.load.read.mtp_layer import has_mtp_layer, mtp_parameters, read_mtp_layer
from engine.load.read.tokenizer_files import read_tokenizer

# The weight type of a checkpoint's dtype.
_STORED_TYPES: dict[torch.dtype, WeightType] = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A GGUF file before it is written.

    parameters  of the model, by the names of transformers
    """

    config: Any
    weight_type: WeightType
    metadata: Mapping[str, Value]
    tensors: list[TensorPlan]
    parameters: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.size for tensor in self.tensors)

    def write(self, path: Path, on_progress: OnProgress) -> None:
        """Write the file."""
        write_gguf(path, self.metadata, self.tensors, gguf_tensors(self.parameters, self.config), on_progress)


def plan_file(
    folder: Path, weight_type: WeightType | None, pre_tokenizer: str | None, on_phase: Callable[[str], None]
) -> PlannedFile:
    """Read a checkpoint for a GGUF file. Raises Inexpressible and the errors of transformers."""
    if pre_tokenizer is not None and pre_tokenizer not in PRE_TOKENIZERS:
        raise Inexpressible(f"the pre-tokenizer {pre_tokenizer} is none of {', '.join(PRE_TOKENIZERS)}")
    if not weight_files(folder):
        raise Inexpressible(missing_weights_reason(folder))
    broken = broken_weights_reason(folder)
    if broken is not None:
        raise Inexpressible(broken)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    metadata: dict[str, Value] = writable(config).write(config)
    on_phase("tokenizer")
    tokenizer = read_tokenizer(folder)
    metadata |= tokenizer_metadata(tokenizer, config, pre_tokenizer)
    on_phase("weights")
    model = _read_model(folder, config)
    weights = weight_type or _STORED_TYPES.get(model.dtype, "f32")
    parameters = model.state_dict()
    if has_mtp_layer(folder, config):
        parameters |= mtp_parameters(read_mtp_layer(folder, model), config)
        name = writable(config).name
        metadata |= {f"{name}.block_count": config.num_hidden_layers + 1, f"{name}.nextn_predict_layers": 1}
    shapes = {name: parameter.to("meta") for name, parameter in parameters.items()}
    tensors = plan_tensors(gguf_tensors(shapes, config), weights, config.num_hidden_layers)
    return PlannedFile(config, weights, _general(folder, config, weights) | metadata, tensors, parameters)


def _read_model(folder: Path, config: Any) -> Any:
    """The model in the dtype of its files; weights of a quantised checkpoint are dequantised."""
    stored = getattr(config, "quantization_config", None)
    if isinstance(stored, dict):
        stored["dequantize"] = True
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype="auto",
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="eager",
        output_loading_info=True,
    )
    if (reason := incomplete_weights_reason(report)) is not None:
        raise Inexpressible(reason)
    return model


def _general(folder: Path, config: Any, weight_type: WeightType) -> dict[str, Value]:
    return {
        "general.architecture": writable(config).name,
        "general.type": "model",
        "general.name": folder.resolve().name,
        "general.file_type": file_type(weight_type),
        "general.quantization_version": GGML_QUANT_VERSION,
    }
