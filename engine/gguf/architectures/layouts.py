"""Layouts of parameters in files: names, order of rows and columns, and values, in both directions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from numpy.typing import NDArray
from torch import Tensor

from engine.gguf.architectures.settings import Inexpressible, head_size
from engine.gguf.container import GgufError, GgufModel, GgufTensor
from engine.gguf.sources import FileMatrix, LatentExpansion, Matrices, ParameterSource, RowRange, whole_rows

_LAYER = re.compile(r"\.layers\.(\d+)\.")
# Norms and projection in front of a layer for drafts, and its last norm.
_DRAFT = re.compile(r"\.layers\.(\d+)\.(enorm|hnorm|eh_proj|shared_head\.norm)\.weight$")
_PROJECTION = re.compile(r"(.*\.)(q|k|v)_proj(\.weight|\.bias)")

# (configuration, rows): the row in the file of each row of a parameter.
Order = Callable[[Any, int], NDArray[np.intp]]


class TensorNames:
    """The names of an architecture's tensors."""

    def __init__(self, architecture: str, config: Any) -> None:
        """`architecture` is GGUF's name of it."""
        self.config = config
        kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
        # With a layer for drafts after the model's own.
        self._map = get_tensor_name_map(kind, config.num_hidden_layers + 1)

    def mapped(self, parameter: str) -> str | None:
        """The tensor of a parameter in the table of the gguf package."""
        draft = _DRAFT.search(parameter)
        if draft is not None:
            return f"blk.{draft[1]}.nextn.{draft[2].replace('.', '_')}.weight"
        name: str | None = self._map.get_name(parameter, try_suffixes=(".weight", ".bias"))
        return name

    def in_layer(self, parameter: str, tensor: str) -> str:
        """A tensor in the layer of a parameter."""
        match = _LAYER.search(parameter)
        return tensor if match is None else f"blk.{match[1]}.{tensor}"


class FileTensors(TensorNames):
    """The tensors of a model's files."""

    def __init__(self, model: GgufModel, architecture: str, config: Any) -> None:
        super().__init__(architecture, config)
        self._tensors = model.tensors

    def find(self, tensor: str | None) -> GgufTensor | None:
        """A tensor by its name."""
        return None if tensor is None else self._tensors.get(tensor)


class Layout(Protocol):
    """How files hold the parameters with names of a pattern."""

    @property
    def pattern(self) -> str:
        """Regular expression for a part of their names."""
        ...

    def source(self, name: str, shape: tuple[int, ...], tensors: FileTensors) -> ParameterSource:
        """The source of a parameter. Raises GgufError."""
        ...

    def write(self, name: str, values: Tensor, names: TensorNames) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a parameter (may be a meta tensor). Raises Inexpressible."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one or more tensors.

    tensors       their names in the layer; by default the name in the table of the gguf package
    fused         a tensor that some files have in place of several
    stacked       parameter and tensors have one matrix for each expert
    transposed    the parameter holds matrices as [columns, outputs]
    parts         (configuration, rows): the rows of each tensor; by default equal numbers
    order         of the rows; by default the same
    column_order  of the columns; by default the same
    encode        the values in files for those of the parameter; by default the same
    decode        its inverse
    """

    pattern: str
    tensors: tuple[str, ...] = ()
    fused: str | None = None
    stacked: bool = False
    transposed: bool = False
    parts: Callable[[Any, int], list[int]] | None = None
    order: Order | None = None
    column_order: Order | None = None
    encode: Callable[[Tensor, Any], Tensor] | None = None
    decode: Callable[[Tensor], Tensor] | None = None

    @property
    def is_permutation(self) -> bool:
        """Whether files hold the same matrix in one tensor, with its rows and columns in another order at most."""
        others = (self.tensors, self.fused, self.stacked, self.transposed, self.parts, self.encode, self.decode)
        return not any(others)

    def source(self, name: str, shape: tuple[int, ...], tensors: FileTensors) -> ParameterSource:
        """See Layout."""
        fused = self._fused(name, tensors)
        if fused is not None:
            return self._matrices(name, [fused], None, shape, tensors.config)
        matches = [tensors.find(tensor) for tensor in self._names(name, tensors)]
        parts = [tensor for tensor in matches if tensor is not None]
        if not parts or len(parts) < len(matches):
            return self._projection(name, shape, tensors)
        return self._matrices(name, parts, self.order, shape, tensors.config)

    def write(self, name: str, values: Tensor, names: TensorNames) -> Iterator[tuple[str, Tensor]]:
        """See Layout."""
        targets = self._names(name, names)
        if not targets:
            raise Inexpressible(f"GGUF has no tensor for {name}")
        axis = 1 if self.stacked else 0
        values = values.transpose(1, 2) if self.transposed else values
        if self.order is not None:
            values = _ordered(values, axis, self.order(names.config, values.shape[axis]))
        if self.column_order is not None:
            values = _ordered(values, -1, self.column_order(names.config, values.shape[-1]))
        sizes = [values.shape[axis] // len(targets)] * len(targets)
        if self.parts is not None:
            sizes = self.parts(names.config, values.shape[axis])
        for target, part in zip(targets, torch.split(values, sizes, axis), strict=True):
            yield target, part if self.encode is None else self.encode(part, names.config)

    def _names(self, name: str, names: TensorNames) -> list[str]:
        if self.tensors:
            return [names.in_layer(name, tensor) for tensor in self.tensors]
        mapped = names.mapped(name)
        return [] if mapped is None else [mapped]

    def _fused(self, name: str, tensors: FileTensors) -> GgufTensor | None:
        return None if self.fused is None else tensors.find(tensors.in_layer(name, self.fused))

    def _matrices(
        self, name: str, parts: list[GgufTensor], order: Order | None, shape: tuple[int, ...], config: Any
    ) -> ParameterSource:
        """One matrix, or one for each expert, of an equal share of the rows of each tensor."""
        count = shape[0] if self.stacked else 1
        wholes = [whole_rows(part) for part in parts]
        _check_shapes(name, wholes, count, shape)
        rows, columns = sum(whole.stop for whole in wholes) // count, wholes[0].columns
        row_order = None if order is None else order(config, rows)
        column_order = None if self.column_order is None else self.column_order(config, columns)
        matrices = []
        for number in range(count):
            ranges = (
                RowRange(whole.tensor, number * whole.stop // count, (number + 1) * whole.stop // count)
                for whole in wholes
            )
            matrices.append(FileMatrix(tuple(ranges), row_order, column_order))
        return Matrices(tuple(matrices), shape, self.transposed, self.decode)

    def _projection(self, name: str, shape: tuple[int, ...], tensors: FileTensors) -> ParameterSource:
        """A query, key or value projection from the tensor of all three."""
        match, config = _PROJECTION.fullmatch(name), tensors.config
        fused = None if match is None else tensors.find(tensors.mapped(f"{match[1]}qkv_proj{match[3]}"))
        if match is None or fused is None:
            raise GgufError(f"it lacks the tensor of {name}")
        queries, keys = (head_size(config) * n for n in (config.num_attention_heads, config.num_key_value_heads))
        start = {"q": 0, "k": queries, "v": queries + keys}[match[2]]
        if whole_rows(fused).stop != queries + 2 * keys:
            raise GgufError(f"the tensor {fused.name} has the shape {list(fused.shape)}, which does not fit")
        order = None if self.order is None else self.order(config, shape[0])
        return Matrices((FileMatrix((RowRange(fused, start, start + shape[0]),), order),), shape)


@dataclass(frozen=True, slots=True)
class LatentKeysAndValues:
    """The expansion of latent keys and values: two tensors, the keys transposed, to be absorbed into the queries."""

    pattern: str
    keys: str
    values: str

    def source(self, name: str, shape: tuple[int, ...], tensors: FileTensors) -> ParameterSource:
        """See Layout."""
        whole = tensors.find(tensors.mapped(name))
        if whole is not None:
            return Rows(self.pattern).source(name, shape, tensors)
        keys, values = (tensors.find(tensors.in_layer(name, part)) for part in (self.keys, self.values))
        if keys is None or values is None:
            raise GgufError(f"it lacks the tensor of {name}")
        if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[1] != values.shape[2]:
            raise GgufError(f"the tensors {keys.name} and {values.name} have shapes that do not fit")
        return LatentExpansion(keys, values)

    def write(self, name: str, values: Tensor, names: TensorNames) -> Iterator[tuple[str, Tensor]]:
        """See Layout."""
        width = names.config.qk_nope_head_dim
        heads = values.view(-1, width + names.config.v_head_dim, values.shape[1])
        yield names.in_layer(name, self.keys), heads[:, :width].transpose(1, 2)
        yield names.in_layer(name, self.values), heads[:, width:]


def layout_of(name: str, layouts: tuple[Layout, ...]) -> Layout:
    """The first layout for a parameter."""
    return next((layout for layout in layouts if re.search(layout.pattern, name)), Rows(""))


def _check_shapes(name: str, wholes: list[RowRange], count: int, shape: tuple[int, ...]) -> None:
    values = sum(whole.stop * whole.columns for whole in wholes)
    if values != math.prod(shape):
        raise GgufError(f"{name} has {values} values, not the {list(shape)} of its configuration")
    for whole in wholes:
        tensor = whole.tensor
        if whole.stop % count or (len(shape) == 3 and count > 1 and tensor.shape[0] != count):
            raise GgufError(f"the tensor {tensor.name} has {whole.stop} rows, which are not those of {count} experts")
        if len(shape) == 2 and 1 < whole.columns != shape[-1]:
            raise GgufError(f"the tensor {tensor.name} has the shape {list(tensor.shape)}, not {list(shape)}")


def _ordered(values: Tensor, axis: int, order: NDArray[np.intp]) -> Tensor:
    """The values in the order of a file."""
    return values.index_select(axis, torch.from_numpy(np.argsort(order)).to(values.device))


def rotated_pairs(config: Any, rows: int) -> NDArray[np.intp]:
    """Order of query and key rows: files rotate neighbouring columns of a head, transformers rotates its halves."""
    return np.arange(rows).reshape(-1, head_size(config) // 2, 2).swapaxes(1, 2).ravel()


def alternating(config: Any, rows: int) -> NDArray[np.intp]:
    """Order of two tensors with rows that alternate in the parameter."""
    return np.arange(rows).reshape(2, -1).T.ravel()


def _add_one(values: Tensor, config: Any) -> Tensor:
    return values.float() + 1


def _subtract_one(values: Tensor) -> Tensor:
    return values - 1


def squeeze_filter(values: Tensor, config: Any) -> Tensor:
    """A convolution [channels, 1, width] as a matrix."""
    return values.squeeze(1) if values.ndim == 3 else values


def encode_decay(values: Tensor, config: Any) -> Tensor:
    """The decay of a state: files have the rate, transformers the logarithm of its negative."""
    return -values.float().exp()


def decode_decay(values: Tensor) -> Tensor:
    """See encode_decay."""
    return torch.log(-values)


INTERLEAVED_ROTATION = Rows(r"\.[qk]_proj\.", order=rotated_pairs)


def shifted_norms(pattern: str) -> Rows:
    """Norms that files store with 1 added."""
    return Rows(pattern, encode=_add_one, decode=_subtract_one)
