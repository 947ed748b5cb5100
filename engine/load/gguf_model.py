"""Models of transformers from GGUF files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.gguf.config import file_type, read_config, stored_dtype
from engine.gguf.container import GgufError, read_model
from engine.gguf.matrices import FileMatrices
from engine.gguf.weights import parameter_sources, read_parameters
from engine.load.construction import construct
from engine.load.resources import processor_count


def read_gguf_config(file: Path) -> Any:
    """The configuration of the language model in a file, with the dtype of its weights. Raises GgufError, OSError."""
    model = read_model(file)
    config = read_config(model)
    config.dtype = stored_dtype(model)
    return config


def read_gguf_model(file: Path, config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any], FileMatrices]:
    """The model with dequantised weights, the report of transformers on them, and the matrices of the file.

    Raises GgufError, OSError.
    """
    content = read_model(file)
    with torch.device("meta"):
        skeleton = construct(partial(AutoModelForCausalLM.from_config, config))
    sources = parameter_sources(content, skeleton, config)
    try:
        parameters = read_parameters(sources, dtype, threads=processor_count())
    except MemoryError as error:
        raise GgufError("its dequantised weights exceed the memory") from error
    read = partial(
        type(skeleton).from_pretrained,
        None,
        config=config,
        state_dict=parameters,
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    model, report = construct(read)
    return model, report, FileMatrices(sources, skeleton, file_type(content.metadata) or "GGUF")
