"""Reads the weights of a model from a folder of safetensors or a GGUF file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import ModelUnsupported
from engine.gguf.matrices import FileMatrices
from engine.kernels import dispatch
from engine.kernels.blocks import TorchBlocks
from engine.load.read.checkpoint import (
    READ_ERRORS,
    Checkpoint,
    broken_weights_reason,
    error_line,
    incomplete_weights_reason,
    weight_files,
)
from engine.load.read.gguf_model import gguf_model
from engine.load.read.mxfp4 import mxfp4_model
from engine.load.read.skeleton import model_class
from engine.quantize.plan import QuantizationPlanNames
from engine.types.sizes import format_size

log = logging.getLogger("cellar.engine")

# Weight formats without a kernel here, with the bits of a weight and its share of scales: in MXFP4, 32 weights share a
# scale of 8 bits.
_DEQUANTIZED_FORMATS = {"mxfp4": ("MXFP4", 4.25), "fp8": ("FP8", 8.0)}


def read_model(
    name: str,
    checkpoint: Checkpoint,
    config: Any,
    settings: EngineConfig,
    dtype: torch.dtype,
    quantised: QuantizationPlanNames | None,
) -> tuple[Any, FileMatrices | None]:
    """The model in CPU memory, and the quantised matrices of its file that replace layers. Raises ModelUnsupported.

    quantised  the layers to quantise; None: they are not known yet
    """
    # Another dtype or format is that of all weights.
    keeps = keeps_formats(settings)
    repacked = quantised if keeps else None
    try:
        reader = TorchBlocks() if settings.kernels == "torch" else dispatch.best_blocks()
        if checkpoint.gguf is not None:
            model, report, matrices = gguf_model(
                checkpoint.gguf, config, dtype, repacked, reader=reader, defers=keeps, tower=checkpoint.tower
            )
        elif keeps and (read := mxfp4_model(checkpoint.path, config, dtype, repacked, reader)) is not None:
            model, report, matrices = read
        else:
            model, report = _read_weights(name, checkpoint.path, config, dtype, settings)
            matrices = None
    except READ_ERRORS as error:
        raise ModelUnsupported(name, broken_weights_reason(checkpoint.path) or error_line(error)) from error
    if (reason := incomplete_weights_reason(report)) is not None:
        raise ModelUnsupported(name, reason)
    if dtype == torch.float64:
        # The default, a grouped matrix product, does not support float64.
        model.set_experts_implementation("eager")
    kept = matrices if matrices is not None and matrices.quantised and keeps else None
    return model.eval().requires_grad_(False), kept


def keeps_formats(settings: EngineConfig) -> bool:
    """Whether quantised matrices of files keep their formats."""
    return settings.quantize in ("none", "auto") and settings.dtype == "auto" and settings.tensor_parallel == 1


def _read_weights(
    name: str, path: Path, config: Any, dtype: torch.dtype, settings: EngineConfig
) -> tuple[Any, dict[str, Any]]:
    """The model with the weights of a folder, and the report of transformers on them. Raises READ_ERRORS.

    Each of several ranks reads its part of the weights.
    """
    ranks = settings.tensor_parallel
    _dequantize(name, path, config, dtype)
    model, report = model_class(config, contents=not settings.no_media).from_pretrained(
        path,
        config=config,
        dtype=dtype,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="eager",
        output_loading_info=True,
        distributed_config={"tp_size": ranks} if ranks > 1 else None,
    )
    return model, report


def _dequantize(name: str, folder: Path, config: Any, dtype: torch.dtype) -> None:
    """Have transformers dequantise weights in a format without a kernel here."""
    stored = getattr(config, "quantization_config", None)
    if not isinstance(stored, dict) or stored.get("quant_method") not in _DEQUANTIZED_FORMATS:
        return
    kind, bits = _DEQUANTIZED_FORMATS[stored["quant_method"]]
    stored["dequantize"] = True
    size = sum(file.stat().st_size for file in weight_files(folder)) * torch.finfo(dtype).bits / bits
    log.warning(
        "%s has weights in %s: they are read as %s, which takes about %s; --quantize makes them smaller",
        name,
        kind,
        str(dtype).removeprefix("torch."),
        format_size(size),
    )
