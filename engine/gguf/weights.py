"""The weights of a model from the tensors of its GGUF files, by the names of transformers' parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.gguf.container import Bytes, GgufError, GgufModel, GgufTensor, release_pages
from engine.kernels.blocks import BlockReader

# Weights that one call of the gguf package dequantises: its temporaries take about 20 bytes each.
_CHUNK_WEIGHTS = 2**22
# Types that torch reads as they are, with torch's dtype.
PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}
# Tensors of which the configuration is made, and tables that are computed.
_NO_PARAMETERS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\b.*")
_LAYER = re.compile(r"blk\.(\d+)\.")
# Architectures with query and key rows in the order of rotation of neighbouring columns; transformers rotates halves.
INTERLEAVED_ROTATION = frozenset({"llama", "granite", "smollm3"})
# Architectures with norms that store 1 more than transformers.
SHIFTED_NORMS = frozenset({"gemma2", "gemma3"})


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of a tensor, of all its outer dimensions; rows of a vector are single values."""

    tensor: GgufTensor
    start: int
    stop: int

    @property
    def columns(self) -> int:
        """Weights of a row."""
        return 1 if self._is_vector else self.tensor.shape[-1]

    @property
    def blocks(self) -> Bytes:
        """uint8 [rows, bytes of a row]"""
        rows = self.tensor.data.reshape(math.prod(self.tensor.shape), -1) if self._is_vector else self.tensor.rows
        return rows[self.start : self.stop]

    @property
    def _is_vector(self) -> bool:
        return len(self.tensor.shape) == 1 or self.tensor.name.endswith(".bias")


@dataclass(frozen=True, slots=True)
class FileMatrix:
    """A matrix of a model: rows of tensors one after another, then in another order; None: in this order."""

    ranges: tuple[RowRange, ...]
    order: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, columns)"""
        return sum(each.stop - each.start for each in self.ranges), self.ranges[0].columns

    @property
    def type(self) -> GGMLQuantizationType | None:
        """The type of all rows; None: they have different types."""
        types = {each.tensor.type for each in self.ranges}
        return types.pop() if len(types) == 1 else None

    @property
    def blocks(self) -> Bytes:
        """uint8 [outputs, bytes of a row], if all rows have one type; a view of the file if the order is the file's."""
        own = [each.blocks for each in self.ranges]
        rows = own[0] if len(own) == 1 else np.concatenate(own)
        return rows if self.order is None else rows[self.order]

    def release(self) -> None:
        """Remove the pages of the file with these rows from the memory of this process."""
        for own in self.ranges:
            release_pages(own.blocks)

    def read(self, dtype: torch.dtype, reader: BlockReader) -> Tensor:
        """The weights [outputs, columns]; a view of the file if it has this dtype. Raises GgufError."""
        if len(self.ranges) == 1:
            weights = _read_rows(self.ranges[0], dtype, reader)
        else:
            weights = torch.cat([_read_rows(each, dtype, reader) for each in self.ranges])
        return weights if self.order is None else weights[torch.from_numpy(self.order)]


class ParameterSource(Protocol):
    """Where the values of a parameter of transformers come from."""

    @property
    def tensors(self) -> tuple[GgufTensor, ...]:
        """The tensors of the files."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that `read` returns."""
        ...

    def read(self, dtype: torch.dtype, reader: BlockReader) -> Tensor:
        """The values. Raises GgufError."""
        ...


@dataclass(frozen=True, slots=True)
class Matrices:
    """A parameter of one matrix, or of stacked ones (experts).

    shape       of the parameter; that of the matrices but for dimensions of size 1
    transposed  whether the parameter holds each matrix as [columns, outputs]
    shift       added to each value
    """

    matrices: tuple[FileMatrix, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    shift: float = 0.0

    @property
    def parts(self) -> int:
        """Ranges of one type that each matrix consists of; 1 for a mix of rows."""
        first = self.matrices[0]
        return len(first.ranges) if first.type is None and first.order is None else 1

    def part(self, number: int) -> FileMatrix:
        """A part of a matrix; `number` counts the parts of all matrices."""
        at, part = divmod(number, self.parts)
        matrix = self.matrices[at]
        return matrix if self.parts == 1 else FileMatrix((matrix.ranges[part],))

    @property
    def tensors(self) -> tuple[GgufTensor, ...]:
        """See ParameterSource."""
        return tuple({each.tensor.name: each.tensor for own in self.matrices for each in own.ranges}.values())

    def read(self, dtype: torch.dtype, reader: BlockReader) -> Tensor:
        """See ParameterSource."""
        if len(self.matrices) == 1:
            values = self.matrices[0].read(dtype, reader)
        else:
            values = torch.empty(len(self.matrices), *self.matrices[0].shape, dtype=dtype)
            for own, matrix in zip(values, self.matrices, strict=True):
                own.copy_(matrix.read(dtype, reader))
        values = values.mT if self.transposed else values
        values = values.reshape(self.shape)
        return values + self.shift if self.shift else values


@dataclass(frozen=True, slots=True)
class LatentExpansion:
    """The expansion of latent keys and values (MLA), which files hold as two tensors, keys transposed.

    keys    [heads, latent width, key width]
    values  [heads, value width, latent width]
    """

    keys: GgufTensor
    values: GgufTensor

    @property
    def tensors(self) -> tuple[GgufTensor, ...]:
        """See ParameterSource."""
        return self.keys, self.values

    @property
    def shape(self) -> tuple[int, ...]:
        """See ParameterSource."""
        heads, latent, width = self.keys.shape
        return heads * (width + self.values.shape[1]), latent

    def read(self, dtype: torch.dtype, reader: BlockReader) -> Tensor:
        """See ParameterSource."""
        keys, values = (
            _read_rows(whole_rows(each), dtype, reader).view(each.shape) for each in (self.keys, self.values)
        )
        return torch.cat([keys.mT, values], dim=1).reshape(self.shape)


def parameter_sources(model: GgufModel, skeleton: nn.Module, config: Any) -> dict[str, ParameterSource]:
    """The source of each parameter of `skeleton`, the model of transformers on any device.

    Raises GgufError if the file lacks a parameter, has one of another shape, or has tensors that no parameter holds.
    """
    names = _Names(model, config)
    tied = set(getattr(skeleton, "all_tied_weights_keys", {}))
    sources = dict[str, ParameterSource]()
    for name, parameter in skeleton.state_dict().items():
        if name not in tied:
            sources[name] = names.source(name, tuple(parameter.shape), _is_transposed(skeleton, name))
            if sources[name].shape != tuple(parameter.shape):
                raise GgufError(f"{name} has the shape {list(sources[name].shape)}, not {list(parameter.shape)}")
    _refuse_unused(model, sources, config.num_hidden_layers)
    return sources


def read_parameters(
    sources: Mapping[str, ParameterSource], dtype: torch.dtype, reader: BlockReader, *, threads: int
) -> dict[str, Tensor]:
    """The values of all parameters: vectors in float32, others in `dtype`. Raises GgufError."""

    def read(source: ParameterSource) -> Tensor:
        return source.read(torch.float32 if len(source.shape) < 2 else dtype, reader)

    with ThreadPoolExecutor(threads) as pool:
        values = pool.map(read, sources.values())
        return dict(zip(sources, values, strict=True))


class _Names:
    """Finds the tensors of parameters."""

    def __init__(self, model: GgufModel, config: Any) -> None:
        self._model, self._config = model, config
        self.architecture = model.metadata.text("general.architecture")
        kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._map = gguf.get_tensor_name_map(kind, config.num_hidden_layers)

    def source(self, name: str, shape: tuple[int, ...], transposed: bool) -> ParameterSource:
        """The source of a parameter. Raises GgufError."""
        if ".experts." in name and "gate_up_proj" in name:
            return self._gated_experts(name, shape, transposed)
        tensor = self._find(name)
        if tensor is None and name.endswith("kv_b_proj.weight"):
            parts = [self._require(name.replace("kv_b_proj", part)) for part in ("k_b_proj", "v_b_proj")]
            if any(len(part.shape) != 3 for part in parts) or parts[0].shape[1] != parts[1].shape[2]:
                raise GgufError(f"the tensors {parts[0].name} and {parts[1].name} have shapes that do not fit")
            return LatentExpansion(*parts)
        if tensor is None:
            return self._fused_projection(name, shape)
        shift = -1.0 if self.architecture in SHIFTED_NORMS and name.endswith("norm.weight") else 0.0
        if ".experts." in name and name.endswith("proj") and len(shape) == 3:
            outputs = shape[2] if transposed else shape[1]
            return self._stack([tensor], None, outputs, shape, transposed)
        whole = whole_rows(tensor)
        _require_values(name, whole.stop * whole.columns, shape)
        if len(shape) == 2 and len(tensor.shape) > 1 and tensor.shape[-1] != shape[-1]:
            raise GgufError(f"the tensor {tensor.name} has the shape {list(tensor.shape)}, not {list(shape)}")
        return Matrices((FileMatrix((whole,), self._row_order(name, shape[0])),), shape, shift=shift)

    def _gated_experts(self, name: str, shape: tuple[int, ...], transposed: bool) -> ParameterSource:
        """Gate and up projections of all experts, which transformers stores in one parameter."""
        width = shape[-1] if transposed or name.endswith("bias") else shape[1]
        fused = self._find(name)
        if fused is not None:
            return self._stack([fused], None, width, shape, transposed)
        parts = [self._require(name.replace("gate_up_proj", part)) for part in ("gate_proj", "up_proj")]
        for part in parts:
            _require_values(part.name, 2 * math.prod(part.shape), shape)
        # gpt-oss alternates the rows of both.
        order = np.arange(width).reshape(2, -1).T.ravel() if transposed or name.endswith("bias") else None
        return self._stack(parts, order, width // 2, shape, transposed)

    def _stack(
        self,
        tensors: list[GgufTensor],
        order: NDArray[np.intp] | None,
        rows: int,
        shape: tuple[int, ...],
        transposed: bool,
    ) -> ParameterSource:
        """One matrix for each expert, of `rows` rows of each tensor."""
        wholes = [whole_rows(tensor) for tensor in tensors]
        for whole in wholes:
            _require_values(whole.tensor.name, whole.stop * whole.columns * len(tensors), shape)
            if whole.stop != shape[0] * rows:
                raise GgufError(f"the tensor {whole.tensor.name} has {whole.stop} rows, not {shape[0] * rows}")
        matrices = [
            FileMatrix(tuple(RowRange(whole.tensor, at * rows, (at + 1) * rows) for whole in wholes), order)
            for at in range(shape[0])
        ]
        return Matrices(tuple(matrices), shape, transposed)

    def _fused_projection(self, name: str, shape: tuple[int, ...]) -> ParameterSource:
        """A query, key or value projection from the tensor of all three."""
        match = re.fullmatch(r"(.*\.)(q|k|v)_proj(\.weight|\.bias)", name)
        fused = None if match is None else self._find(f"{match[1]}qkv_proj{match[3]}")
        if match is None or fused is None:
            raise GgufError(f"it lacks the tensor of {name}")
        head_width = self._config.head_dim
        queries, keys = (head_width * count for count in self._head_counts)
        start = {"q": 0, "k": queries, "v": queries + keys}[match[2]]
        if whole_rows(fused).stop != queries + 2 * keys:
            raise GgufError(f"the tensor {fused.name} has the shape {list(fused.shape)}, which does not fit")
        rows = RowRange(fused, start, start + shape[0])
        return Matrices((FileMatrix((rows,), self._row_order(name, shape[0])),), (shape[0], *shape[1:]))

    @property
    def _head_counts(self) -> tuple[int, int]:
        return self._config.num_attention_heads, self._config.num_key_value_heads

    def _row_order(self, name: str, rows: int) -> NDArray[np.intp] | None:
        """The row of the tensor for each row of the parameter; None: the same."""
        if self.architecture not in INTERLEAVED_ROTATION or not re.search(r"\.[qk]_proj\.", name):
            return None
        return np.arange(rows).reshape(-1, self._config.head_dim // 2, 2).swapaxes(1, 2).ravel()

    def _require(self, name: str) -> GgufTensor:
        tensor = self._find(name)
        if tensor is None:
            raise GgufError(f"it lacks the tensor of {name}")
        return tensor

    def _find(self, name: str) -> GgufTensor | None:
        """The tensor of a parameter, by the names of files."""
        for candidate in (name, f"{name}.weight", re.sub("_bias$", ".bias", name)):
            mapped = self._map.get_name(candidate, try_suffixes=(".weight", ".bias"))
            found = None if mapped is None else self._model.tensors.get(mapped)
            if found is not None:
                return found
        return None


def _require_values(name: str, count: int, shape: tuple[int, ...]) -> None:
    if count != math.prod(shape):
        raise GgufError(f"{name} has {count} values, not the {list(shape)} of its configuration")


def _refuse_unused(model: GgufModel, sources: Mapping[str, ParameterSource], layers: int) -> None:
    """Raise GgufError for tensors that no parameter holds, but those of layers for drafts beyond the model's own."""
    used = {tensor.name for source in sources.values() for tensor in source.tensors}
    unused = [name for name in model.tensors if name not in used and not _NO_PARAMETERS.fullmatch(name)]
    unused = [name for name in unused if (match := _LAYER.match(name)) is None or int(match[1]) < layers]
    if unused:
        raise GgufError(f"it has tensors that its architecture lacks, {len(unused)} in all, such as {unused[0]}")


def _is_transposed(skeleton: nn.Module, name: str) -> bool:
    """Whether a parameter of experts holds transposed matrices."""
    return (
        bool(getattr(skeleton.get_submodule(name.rpartition(".")[0]), "is_transposed", False)) and name[-5:] != "_bias"
    )


def whole_rows(tensor: GgufTensor) -> RowRange:
    """All rows. Raises GgufError for a vector of blocks: its values are no rows."""
    probe = RowRange(tensor, 0, 0)
    if probe.columns == 1 and tensor.type not in PLAIN_TYPES:
        raise GgufError(f"the tensor {tensor.name} is a vector of the type {tensor.type.name}, which is not supported")
    return RowRange(tensor, 0, math.prod(tensor.shape) // probe.columns)


def _read_rows(rows: RowRange, dtype: torch.dtype, reader: BlockReader) -> Tensor:
    """[rows, columns]"""
    kind, blocks = rows.tensor.type, torch.from_numpy(rows.blocks)
    plain = PLAIN_TYPES.get(kind)
    if plain is not None:
        return blocks.view(plain).to(dtype)
    weights = torch.empty(len(blocks), rows.columns, dtype=dtype)
    size = max(_CHUNK_WEIGHTS // rows.columns, 1)
    for own, part in zip(torch.split(weights, size), torch.split(blocks, size), strict=True):
        values = reader.dequantize(part, kind)
        if values is None:
            raise GgufError(f"the tensor {rows.tensor.name} has the type {kind.name}, which is not supported")
        own.copy_(values)
    return weights
