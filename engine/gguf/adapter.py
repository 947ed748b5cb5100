"""Reads a LoRA adapter in a GGUF file, as llama.cpp's converter writes it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.adapters.adapter import Adapter, LowRank
from engine.adapters.checkpoint import file_version, scaled_factors
from engine.errors import AdapterUnsupported
from engine.gguf.architectures.architecture import Architecture
from engine.gguf.architectures.layouts import Rows, TensorNames, layout_of
from engine.gguf.architectures.settings import Inexpressible
from engine.gguf.architectures.table import writable
from engine.gguf.container import GgufError, GgufTensor, Metadata, parse
from engine.gguf.sources import FileMatrix, whole_rows
from engine.kernels.blocks import TorchBlocks

_SIDES = {".lora_a": "down", ".lora_b": "up"}


def read_gguf_adapter(
    name: str, file: Path, shapes: Mapping[str, tuple[int, int]], config: Any, dtype: torch.dtype
) -> Adapter:
    """The adapter in a file. Raises AdapterUnsupported.

    shapes  [outputs, columns] of the layers that can be adapted, by the name of the module
    config  of the model of transformers
    dtype   of the factors in memory
    """
    try:
        # Not mapped: a file that is truncated while it is mapped would end the process.
        version, content = file_version(file), np.fromfile(file, np.uint8)
        if version != file_version(file):
            raise AdapterUnsupported(name, "its file changed while it was read")
        metadata, tensors = parse(content)
        architecture, alpha = writable(config), _alpha(metadata)
        if metadata.text("general.architecture") != architecture.name:
            raise GgufError(f"it is for the architecture {metadata.text('general.architecture')}")
        pairs = _pairs(tensors, _layers(shapes, architecture, config))
        layers = {
            layer: _factors(name, layer, pair, shapes[layer], architecture, config, alpha, dtype)
            for layer, pair in pairs.items()
        }
    except (ValueError, Inexpressible) as error:
        raise AdapterUnsupported(name, str(error)) from error
    except OSError as error:
        raise AdapterUnsupported(name, f"its file cannot be read ({error.strerror})") from error
    if not layers:
        raise AdapterUnsupported(name, "it has no matrices")
    return Adapter(name, hashlib.sha256(content.data).hexdigest(), layers)


def _alpha(metadata: Metadata) -> float:
    """The numerator of the scaling; 0: the scaling is 1. Raises GgufError for files that are no LoRA adapters."""
    kind = metadata.text("general.type", "model")
    if kind != "adapter" or metadata.text("adapter.type", "") != "lora":
        raise GgufError(f"it is no LoRA adapter, but has the type {kind}")
    refused = next((key for key in metadata if key.startswith("adapter.alora.")), None)
    if refused is not None:
        raise GgufError(f"{refused} is not supported")
    return metadata.number("adapter.lora.alpha")


def _layers(shapes: Mapping[str, tuple[int, int]], architecture: Architecture, config: Any) -> dict[str, str]:
    """The layers by the names of their tensors, where the file has one matrix for the weight of a layer."""
    names = TensorNames(architecture.name, config)
    layers = dict[str, str]()
    for layer in shapes:
        tensor, layout = names.mapped(f"{layer}.weight"), layout_of(f"{layer}.weight", architecture.layouts)
        if tensor is not None and isinstance(layout, Rows) and layout.is_permutation:
            layers[tensor] = layer
    return layers


def _pairs(tensors: Mapping[str, GgufTensor], layers: Mapping[str, str]) -> dict[str, dict[str, GgufTensor]]:
    """The stored factors by layer, "down" and "up". Raises GgufError for other tensors."""
    pairs: defaultdict[str, dict[str, GgufTensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        target, dot, side = key.rpartition(".")
        layer = layers.get(target)
        if layer is None or dot + side not in _SIDES or len(tensor.shape) != 2:
            raise GgufError(f"{key[:200]} is no low-rank matrix of a layer that can be adapted")
        pairs[layer][_SIDES[dot + side]] = tensor
    return dict(pairs)


def _factors(
    name: str,
    layer: str,
    pair: Mapping[str, GgufTensor],
    shape: tuple[int, int],
    architecture: Architecture,
    config: Any,
    alpha: float,
    dtype: torch.dtype,
) -> LowRank:
    """The factors of a layer in the order of transformers' rows and columns."""
    if len(pair) < 2:
        raise AdapterUnsupported(name, f"{layer} has only one of the matrices lora_a and lora_b")
    (rank, columns), (outputs, _) = pair["down"].shape, pair["up"].shape
    if (outputs, columns) != shape:
        stored = [outputs, columns]
        raise AdapterUnsupported(name, f"the matrices of {layer} are for the shape {stored}, not {[*shape]}")
    layout = layout_of(f"{layer}.weight", architecture.layouts)
    assert isinstance(layout, Rows), "_layers leaves out others"
    order = None if layout.order is None else layout.order(config, outputs)
    column_order = None if layout.column_order is None else layout.column_order(config, columns)
    down = FileMatrix((whole_rows(pair["down"]),), None, column_order).read(dtype, TorchBlocks())
    up = FileMatrix((whole_rows(pair["up"]),), order).read(dtype, TorchBlocks())
    return scaled_factors(name, layer, (down, up), shape, rank, alpha / rank if alpha and rank else 1.0, dtype)
