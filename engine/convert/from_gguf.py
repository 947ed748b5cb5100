"""A GGUF file as a checkpoint of transformers, with dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engine.convert.gguf_file import WeightType
from engine.gguf.architectures.settings import Inexpressible
from engine.load.read.gguf_model import read_gguf_config, read_gguf_model
from engine.load.read.tokenizer_files import read_tokenizer

_DTYPES: dict[WeightType, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def write_folder(file: Path, folder: Path, weight_type: WeightType | None, on_phase: Callable[[str], None]) -> None:
    """Write a checkpoint with a tokenizer. Raises Inexpressible, GgufError and the errors of transformers."""
    if weight_type is not None and weight_type not in _DTYPES:
        raise Inexpressible(f"safetensors are written as {', '.join(_DTYPES)}, not as {weight_type}")
    config = read_gguf_config(file)
    dtype = config.dtype if weight_type is None else _DTYPES[weight_type]
    on_phase("tokenizer")
    tokenizer = read_tokenizer(file)
    tokenizer.save_pretrained(folder)
    on_phase("weights")
    model, *_ = read_gguf_model(file, config, dtype)
    on_phase(f"write {str(dtype).removeprefix('torch.')}")
    model.to(dtype).save_pretrained(folder)
