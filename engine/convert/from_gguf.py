"""A GGUF file as a checkpoint of transformers, with dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.convert.architectures import Inexpressible
from engine.convert.gguf_file import WeightType
from engine.gguf.config import read_config, stored_dtype
from engine.gguf.container import GgufModel, read_model
from engine.gguf.tokenizer import read_tokenizer
from engine.gguf.weights import parameter_sources, read_parameters
from engine.load.resources import processor_count

_DTYPES: dict[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def write_folder(file: Path, folder: Path, weight_type: WeightType | None, on_phase: Callable[[str], None]) -> None:
    """Write a checkpoint with a tokenizer. Raises Inexpressible, GgufError and the errors of transformers."""
    if weight_type is not None and weight_type not in _DTYPES:
        raise Inexpressible(f"safetensors are written as {', '.join(_DTYPES)}, not as {weight_type}")
    gguf = read_model(file)
    on_phase("tokenizer")
    read_tokenizer(gguf.metadata).save_pretrained(folder)
    on_phase("weights")
    model = _model(gguf, _DTYPES.get(weight_type or "", stored_dtype(gguf)))
    on_phase("write")
    model.save_pretrained(folder)


def _model(gguf: GgufModel, dtype: torch.dtype) -> Any:
    """The model with dequantised weights, all of them in `dtype`."""
    config = read_config(gguf)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    values = read_parameters(parameter_sources(gguf, model, config), dtype, threads=processor_count())
    model.load_state_dict({name: value.to(dtype) for name, value in values.items()}, strict=False, assign=True)
    model.tie_weights()
    return model
