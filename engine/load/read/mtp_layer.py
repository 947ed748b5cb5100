"""The MTP layer (multi-token prediction) that some checkpoints and GGUF files have after the model's own layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.modeling_layers import MtpModel

from engine.gguf.container import read_model
from engine.gguf.weights import draft_layer_sources, read_parameters
from engine.kernels.blocks import TorchBlocks
from engine.load.machine.resources import processor_count
from engine.load.read.checkpoint import is_gguf, weight_files


def has_mtp_layer(path: Path, text: Any) -> bool:
    """Whether a checkpoint has MTP layers, at one of the published keys.

    text  its text configuration
    """
    if is_gguf(path):
        return bool(getattr(text, "num_mtp_layers", 0))
    pattern = re.compile(_weight_keys(text))
    return any(pattern.search(key) for file in weight_files(path) for key in _keys(file))


def read_mtp_layer(path: Path, model: Any) -> Any:
    """The module of transformers (MtpModel) with the first MTP layer of a checkpoint, in the dtype of `model`.

    Raises the errors of transformers, GgufError.
    """
    text = model.config.get_text_config()
    text.num_mtp_layers = 1
    # One layer of full attention, which not all configurations name.
    if getattr(text, "layer_types", None) is not None:
        text.mtp_layer_types = ["full_attention"]
    if getattr(text, "mlp_layer_types", None) is not None:
        text.mtp_mlp_layer_types = text.mlp_layer_types[-1:]
    if is_gguf(path):
        return _read_gguf_layer(path, model, text)
    # transformers' own pattern fits one published size of each architecture.
    model._keys_to_ignore_on_load_unexpected = [_weight_keys(text)]
    return MtpModel.from_pretrained(model)


def mtp_parameters(layer: Any, text: Any) -> dict[str, Tensor]:
    """The parameters of the first MTP layer under the names of a layer after the model's own, as DeepSeek has them."""
    return {
        _published_name(name, text.num_hidden_layers): values for name, values in layer.layers[0].state_dict().items()
    }


def _published_name(name: str, layer: int) -> str:
    name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"model.layers.{layer}.{name}"


def _read_gguf_layer(path: Path, model: Any, text: Any) -> Any:
    with torch.device("meta"):
        layer = MtpModel(model, 1)
    shapes = {name: tuple(values.shape) for name, values in mtp_parameters(layer, text).items()}
    sources = draft_layer_sources(read_model(path), text, shapes)
    values = read_parameters(sources, model.dtype, TorchBlocks(), threads=processor_count())
    # In the order of the module's own names.
    layer.layers[0].load_state_dict(dict(zip(layer.layers[0].state_dict(), values.values(), strict=True)), assign=True)
    layer.tie_with_main_model(model)
    return layer


def _weight_keys(text: Any) -> str:
    """Pattern of the first MTP layer's keys: after the model's layers (DeepSeek, GLM), or apart from them (Qwen)."""
    return rf"^mtp\.(?!layers\.[1-9])|^model\.layers\.{text.num_hidden_layers}\."


def _keys(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as content:
        return list(content.keys())
