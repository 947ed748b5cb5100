"""A checkpoint of transformers as a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_VERSION
from torch import Tensor
from transformers import AutoConfig

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
from engine.load.read.skeleton import model_class, unread_modalities
from engine.load.read.text_part import text_parameters
from engine.load.read.tokenizer_files import read_tokenizer

# The weight type of a checkpoint's dtype.
_STORED_TYPES: dict[torch.dtype, WeightType] = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A GGUF file before it is written.

    config             of the text
    parameters         of the text, by the names of transformers
    unread_modalities  inputs of the model other than text, whose weights are not written
    """

    config: Any
    weight_type: WeightType
    metadata: Mapping[str, Value]
    tensors: list[TensorPlan]
    parameters: Mapping[str, Tensor]
    unread_modalities: tuple[str, ...]

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
    text = config.get_text_config()
    text.eos_token_id = getattr(config, "eos_token_id", None) or text.eos_token_id
    metadata: dict[str, Value] = writable(text).write(text)
    on_phase("tokenizer")
    tokenizer = read_tokenizer(folder)
    metadata |= tokenizer_metadata(tokenizer, text, pre_tokenizer)
    on_phase("weights")
    model = _read_model(folder, config)
    weights = weight_type or _STORED_TYPES.get(model.dtype, "f32")
    # The whole model decides, not the configuration of its text.
    text.tie_word_embeddings = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    unread = unread_modalities(config)
    parameters = text_parameters(model) if unread else model.state_dict()
    if has_mtp_layer(folder, text):
        parameters |= mtp_parameters(read_mtp_layer(folder, model), text)
        name = writable(text).name
        metadata |= {f"{name}.block_count": text.num_hidden_layers + 1, f"{name}.nextn_predict_layers": 1}
    shapes = {name: parameter.to("meta") for name, parameter in parameters.items()}
    tensors = plan_tensors(gguf_tensors(shapes, text), weights, text.num_hidden_layers)
    metadata = _general(folder, text, weights) | metadata
    return PlannedFile(text, weights, metadata, tensors, parameters, unread)


def _read_model(folder: Path, config: Any) -> Any:
    """The model in the dtype of its files; weights of a quantised checkpoint are dequantised."""
    stored = getattr(config, "quantization_config", None)
    if isinstance(stored, dict):
        stored["dequantize"] = True
    model, report = model_class(config).from_pretrained(
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
