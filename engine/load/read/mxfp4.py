"""Experts in MXFP4 in safetensors, as gpt-oss is published: codes of 4 bits, 32 of which share an exponent.

Their matrices keep codes and exponents, in the blocks that GGUF files have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig

from engine.gguf.container import Bytes, GgufError, GgufTensor
from engine.gguf.matrices import FileMatrices
from engine.gguf.sources import PLAIN_TYPES, FileMatrix, Matrices, ParameterSource, whole_rows
from engine.kernels.blocks import BlockReader
from engine.load.read.checkpoint import weight_files
from engine.load.read.file_model import file_model, file_skeleton
from engine.quantize.plan import QuantizationPlanNames
from engine.quantize.stacks import experts_of

_TYPE = GGMLQuantizationType.MXFP4
_COLUMNS = GGML_QUANT_SIZES[_TYPE][0]
_PLAIN = {dtype: kind for kind, dtype in PLAIN_TYPES.items()}


@dataclass(frozen=True, slots=True)
class _ExpertTensor(GgufTensor):
    """The matrix of an expert.

    data       its codes, uint8 [outputs, groups, 16]: two neighbouring columns in a byte
    exponents  uint8 [outputs, groups]
    """

    exponents: Bytes

    @property
    def rows(self) -> Bytes:
        """See GgufTensor: a copy. A byte has column i and column i + 16 of a group."""
        codes = np.stack((self.data & 15, self.data >> 4), -1).reshape(*self.exponents.shape, 2, -1)
        blocks = np.concatenate((self.exponents[..., None], codes[..., 0, :] | codes[..., 1, :] << 4), -1)
        return blocks.reshape(len(blocks), -1)


def mxfp4_model(
    folder: Path, config: Any, dtype: torch.dtype, repacked: QuantizationPlanNames | None, reader: BlockReader
) -> tuple[Any, dict[str, Any], FileMatrices] | None:
    """The model in a folder, the report of transformers on its weights, and its matrices; see `file_model`.

    None: its experts are not in MXFP4, or some parameters have other names, shapes or formats in the files. Raises
    GgufError.
    """
    if not has_mxfp4(config):
        return None
    # transformers would look for kernels.
    plain = copy(config)
    del plain.quantization_config
    skeleton = file_skeleton(plain)
    matrices = mxfp4_matrices(folder, skeleton, reader)
    if matrices is None:
        return None
    model, report = file_model(matrices, skeleton, plain, dtype, repacked, defers=True)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, report, matrices


def has_mxfp4(config: Any) -> bool:
    """Whether the configuration has experts in MXFP4."""
    stored = getattr(config, "quantization_config", None)
    return isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"


def mxfp4_matrices(folder: Path, skeleton: nn.Module, reader: BlockReader) -> FileMatrices | None:
    """The matrices of a folder, of a model on the meta device; without weight files they have shapes and formats only.

    None: some parameters have other names, shapes or formats in the files. Raises GgufError.
    """
    tensors = dict(_tensors(folder))
    tied, sources = getattr(skeleton, "all_tied_weights_keys", {}), dict[str, ParameterSource]()
    for name, parameter in skeleton.state_dict().items():
        if name not in tied:
            source = _source(skeleton, name, tuple(parameter.shape), tensors)
            if source is None:
                return None
            sources[name] = source
    return FileMatrices(sources, skeleton, _TYPE.name, reader)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all files, which are mapped."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                yield name, content.get_tensor(name)


def _source(
    skeleton: nn.Module, name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> ParameterSource | None:
    experts = experts_of(skeleton.get_submodule(name.rpartition(".")[0]))
    stacks = () if experts is None else (experts.up, experts.down)
    for stack in stacks:
        if name.endswith(f".{stack.parameter}"):
            return _experts(name, shape, tensors, transposed=stack.transposed)
    tensor = tensors.get(name, torch.empty(0) if not tensors else None)
    if tensor is None or tensor.dtype not in _PLAIN or (tensors and tuple(tensor.shape) != shape):
        return None
    plain = GgufTensor(name, _PLAIN[tensor.dtype], shape, tensor.view(torch.uint8).numpy())
    return Matrices((FileMatrix((whole_rows(plain),)),), shape)


def _experts(
    name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor], *, transposed: bool
) -> ParameterSource | None:
    """The matrices of all experts."""
    count, outputs, columns = (shape[0], shape[2], shape[1]) if transposed else shape
    groups = (count, outputs, columns // _COLUMNS)
    codes, exponents = tensors.get(f"{name}_blocks"), tensors.get(f"{name}_scales")
    if (codes is None) != (exponents is None):
        raise GgufError(f"it lacks the tensor {name}_{'blocks' if codes is None else 'scales'}")
    if codes is None or exponents is None:
        if tensors:
            return None
        # Of a plan.
        exponents = torch.zeros(1, dtype=torch.uint8).expand(groups)
        codes = exponents[..., None].expand(*groups, _COLUMNS // 2)
    fits = columns % _COLUMNS == 0 and exponents.shape == groups and codes.shape == (*groups, _COLUMNS // 2)
    if not fits or {codes.dtype, exponents.dtype} != {torch.uint8}:
        return None
    pairs = zip(codes.numpy(), exponents.numpy(), strict=True)
    owns = [_ExpertTensor(f"{name}.{expert}", _TYPE, (outputs, columns), *pair) for expert, pair in enumerate(pairs)]
    return Matrices(tuple(FileMatrix((whole_rows(expert),)) for expert in owns), shape, transposed)
