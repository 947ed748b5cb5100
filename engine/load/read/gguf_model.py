"""Models of transformers from GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.gguf.config import file_type, read_config, stored_dtype
from engine.gguf.container import GgufModel, read_model
from engine.gguf.matrices import FileMatrices
from engine.gguf.projectors.pair import Tower
from engine.gguf.sources import ParameterSource
from engine.gguf.weights import parameter_sources, skeleton_shapes
from engine.kernels.blocks import BlockReader, TorchBlocks
from engine.load.read.file_model import file_model, file_skeleton
from engine.quantize.plan import QuantizationPlanNames


def read_gguf_config(file: Path) -> Any:
    """The configuration of the language model in a file, with the dtype of its weights. Raises GgufError, OSError."""
    return gguf_config(read_model(file))


def gguf_config(content: GgufModel) -> Any:
    """See `read_gguf_config`. Raises GgufError."""
    config = read_config(content)
    config.dtype = stored_dtype(content)
    return config


def gguf_sources(content: GgufModel, skeleton: Any, config: Any, tower: Tower | None) -> dict[str, ParameterSource]:
    """The source of each parameter of `skeleton`. Raises GgufError."""
    if tower is not None:
        return tower.sources(content, skeleton, config)
    return parameter_sources(content, skeleton_shapes(skeleton), config)


def read_gguf_model(file: Path, config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any], FileMatrices]:
    """The model with dequantised weights, the report of transformers on them, and the matrices of the file.

    Raises GgufError, OSError.
    """
    return gguf_model(read_model(file), config, dtype)


def gguf_model(
    content: GgufModel,
    config: Any,
    dtype: torch.dtype,
    repacked: QuantizationPlanNames | None = None,
    *,
    reader: BlockReader | None = None,
    defers: bool = False,
    tower: Tower | None = None,
) -> tuple[Any, dict[str, Any], FileMatrices]:
    """See `read_gguf_model`, and `file_model` for `repacked` and `defers`. Raises GgufError.

    tower  of a configuration with one
    """
    skeleton = file_skeleton(config)
    sources = gguf_sources(content, skeleton, config, tower)
    matrices = FileMatrices(sources, skeleton, file_type(content.metadata) or "GGUF", reader or TorchBlocks())
    model, report = file_model(matrices, skeleton, config, dtype, repacked, defers=defers)
    return model, report, matrices
