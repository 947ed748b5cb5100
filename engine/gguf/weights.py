"""The weights of a model from the tensors of its GGUF files, by the names of transformers' parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from engine.gguf.architectures.layouts import FileTensors, layout_of
from engine.gguf.architectures.table import readable
from engine.gguf.container import GgufError, GgufModel
from engine.gguf.sources import ParameterSource
from engine.kernels.blocks import BlockReader

# Tensors of which the configuration is made, and tables that are computed.
_NO_PARAMETERS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\b.*")
_LAYER = re.compile(r"blk\.(\d+)\.")


def skeleton_shapes(skeleton: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of a model on any device, without those with the values of another one."""
    tied = set(getattr(skeleton, "all_tied_weights_keys", {}))
    return {name: tuple(values.shape) for name, values in skeleton.state_dict().items() if name not in tied}


def parameter_sources(
    model: GgufModel, shapes: Mapping[str, tuple[int, ...]], config: Any
) -> dict[str, ParameterSource]:
    """The source of each parameter of a model of transformers.

    shapes  see `skeleton_shapes`

    Raises GgufError if the file lacks a parameter, has one of another shape, or has tensors that no parameter holds.
    """
    architecture = readable(model)
    tensors = FileTensors(model, architecture.name, config)
    sources = dict[str, ParameterSource]()
    for name, shape in shapes.items():
        sources[name] = layout_of(name, architecture.layouts).source(name, shape, tensors)
        if sources[name].shape != shape:
            raise GgufError(f"{name} has the shape {list(sources[name].shape)}, not {list(shape)}")
    _refuse_unused(model, sources, config.num_hidden_layers, architecture.ignored)
    return sources


def draft_layer_sources(
    model: GgufModel, config: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ParameterSource]:
    """The sources of the parameters of a layer after the model's own, by name. Raises GgufError."""
    architecture = readable(model)
    tensors = FileTensors(model, architecture.name, config)
    layouts = architecture.layouts
    return {name: layout_of(name, layouts).source(name, shape, tensors) for name, shape in shapes.items()}


def read_parameters(
    sources: Mapping[str, ParameterSource], dtype: torch.dtype, reader: BlockReader, *, threads: int
) -> dict[str, Tensor]:
    """The values of all parameters: vectors in float32, others in `dtype`. Raises GgufError."""

    def read(source: ParameterSource) -> Tensor:
        return source.read(torch.float32 if len(source.shape) < 2 else dtype, reader)

    with ThreadPoolExecutor(threads) as pool:
        values = pool.map(read, sources.values())
        return dict(zip(sources, values, strict=True))


def _refuse_unused(model: GgufModel, sources: Mapping[str, ParameterSource], layers: int, ignored: str | None) -> None:
    """Raise GgufError for tensors that no parameter holds, but those of layers for drafts beyond the model's own."""
    used = {tensor.name for source in sources.values() for tensor in source.tensors}
    unused = [name for name in model.tensors if name not in used and not _NO_PARAMETERS.fullmatch(name)]
    unused = [name for name in unused if (match := _LAYER.match(name)) is None or int(match[1]) < layers]
    unused = [name for name in unused if ignored is None or not re.fullmatch(ignored, name)]
    if unused:
        raise GgufError(f"it has tensors that its architecture lacks, {len(unused)} in all, such as {unused[0]}")
