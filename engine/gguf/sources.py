"""Where the values of a model's parameters are in its files: rows of tensors, in another order where files have one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from engine.gguf.container import Bytes, GgufError, GgufTensor, release_pages
from engine.kernels.blocks import BlockReader
from engine.kernels.latent import PackedProjection
from engine.kernels.packing import PackedMatrix

# Weights that one call of the gguf package dequantises: its temporaries take about 20 bytes each.
_CHUNK_WEIGHTS = 2**22
# Types that torch reads directly, with torch's dtype.
PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


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
    """A matrix of a model: rows of tensors one after another.

    order         the row of the tensors for each row; None: the same
    column_order  the column of the tensors for each column; None: the same
    """

    ranges: tuple[RowRange, ...]
    order: NDArray[np.intp] | None = None
    column_order: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, columns)"""
        return sum(rows.stop - rows.start for rows in self.ranges), self.ranges[0].columns

    @property
    def type(self) -> GGMLQuantizationType | None:
        """The type of all rows; None: they have different types, or columns of one block are not together."""
        types = {rows.tensor.type for rows in self.ranges}
        kind = types.pop() if len(types) == 1 else None
        return kind if kind is None or self._keeps_blocks(kind) else None

    @property
    def blocks(self) -> Bytes:
        """uint8 [outputs, bytes of a row], if all rows have one type; a view of the file if the order is the file's."""
        parts = [part.blocks for part in self.ranges]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        rows = rows if self.order is None else rows[self.order]
        if self.column_order is None:
            return rows
        columns, size = GGML_QUANT_SIZES[self.ranges[0].tensor.type]
        blocks = rows.reshape(len(rows), -1, size)[:, self.column_order[::columns] // columns]
        return blocks.reshape(len(rows), -1)

    def release(self) -> None:
        """Remove the pages of the file with these rows from the memory of this process."""
        for rows in self.ranges:
            release_pages(rows.blocks)

    def read(self, dtype: torch.dtype, reader: BlockReader) -> Tensor:
        """The weights [outputs, columns]; a view of the file if it has this dtype. Raises GgufError."""
        if len(self.ranges) == 1:
            weights = _read_rows(self.ranges[0], dtype, reader)
        else:
            weights = torch.cat([_read_rows(rows, dtype, reader) for rows in self.ranges])
        weights = weights if self.order is None else weights[torch.from_numpy(self.order)]
        return weights if self.column_order is None else weights[:, torch.from_numpy(self.column_order)]

    def _keeps_blocks(self, kind: GGMLQuantizationType) -> bool:
        """Whether the order of the columns moves whole blocks."""
        columns, _ = GGML_QUANT_SIZES[kind]
        if self.column_order is None or columns == 1:
            return True
        blocks = self.column_order.reshape(-1, columns)
        return bool((blocks[:, 0] % columns == 0).all() and (np.diff(blocks) == 1).all())


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
    decode      the values of the parameter for those of the file; None: the same
    """

    matrices: tuple[FileMatrix, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    decode: Callable[[Tensor], Tensor] | None = None

    @property
    def parts(self) -> int:
        """Ranges of one type that each matrix consists of; 1 for a mix of rows."""
        first = self.matrices[0]
        return len(first.ranges) if first.type is None and first.order is first.column_order is None else 1

    def part(self, number: int) -> FileMatrix:
        """A part of a matrix; `number` counts the parts of all matrices."""
        index, part = divmod(number, self.parts)
        matrix = self.matrices[index]
        return matrix if self.parts == 1 else FileMatrix((matrix.ranges[part],))

    @property
    def tensors(self) -> tuple[GgufTensor, ...]:
        """See ParameterSource."""
        return tuple({rows.tensor.name: rows.tensor for matrix in self.matrices for rows in matrix.ranges}.values())

    def read(self, dtype: torch.dtype, reader: BlockReader) -> Tensor:
        """See ParameterSource."""
        if len(self.matrices) == 1:
            values = self.matrices[0].read(dtype, reader)
        else:
            values = torch.empty(len(self.matrices), *self.matrices[0].shape, dtype=dtype)
            for target, matrix in zip(values, self.matrices, strict=True):
                target.copy_(matrix.read(dtype, reader))
        values = values.mT if self.transposed else values
        values = values.reshape(self.shape)
        return values if self.decode is None else self.decode(values)


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
            _read_rows(whole_rows(tensor), dtype, reader).view(tensor.shape) for tensor in (self.keys, self.values)
        )
        return torch.cat([keys.mT, values], dim=1).reshape(self.shape)

    def packed(self, reader: BlockReader) -> PackedProjection | None:
        """The projections in exact formats; None for types without one. Raises InfiniteScale."""
        keys, values = (_packed_heads(tensor, reader) for tensor in (self.keys, self.values))
        return None if keys is None or values is None else PackedProjection(keys, values)


def _packed_heads(tensor: GgufTensor, reader: BlockReader) -> tuple[PackedMatrix, ...] | None:
    """The matrices of a tensor [heads, outputs, columns]; None for a type without an exact format."""
    if tensor.type in PLAIN_TYPES:
        return None
    heads = torch.split(torch.from_numpy(whole_rows(tensor).blocks), tensor.shape[1])
    matrices = [matrix for blocks in heads if (matrix := reader.pack_blocks(blocks, tensor.type)) is not None]
    return tuple(matrices) or None


def whole_rows(tensor: GgufTensor) -> RowRange:
    """All rows. Raises GgufError for a vector of blocks: its values are no rows."""
    probe = RowRange(tensor, 0, 0)
    if probe.columns == 1 and tensor.type not in PLAIN_TYPES:
        raise GgufError(f"the tensor {tensor.name} is a vector of the type {tensor.type.name}, which is not supported")
    return RowRange(tensor, 0, math.prod(tensor.shape) // probe.columns)


def read_tensor(tensor: GgufTensor, dtype: torch.dtype, reader: BlockReader) -> Tensor:
    """The values of a tensor in its shape. Raises GgufError for a type that is not supported."""
    return _read_rows(whole_rows(tensor), dtype, reader).reshape(tensor.shape)


def _read_rows(rows: RowRange, dtype: torch.dtype, reader: BlockReader) -> Tensor:
    """[rows, columns]"""
    kind, blocks = rows.tensor.type, torch.from_numpy(rows.blocks)
    plain = PLAIN_TYPES.get(kind)
    if plain is not None:
        return blocks.view(plain).to(dtype)
    weights = torch.empty(len(blocks), rows.columns, dtype=dtype)
    size = max(_CHUNK_WEIGHTS // rows.columns, 1)
    for target, part in zip(torch.split(weights, size), torch.split(blocks, size), strict=True):
        values = reader.dequantize(part, kind)
        if values is None:
            raise GgufError(f"the tensor {rows.tensor.name} has the type {kind.name}, which is not supported")
        target.copy_(values)
    return weights
