"""The tensors of a vision tower and its projector, by the names of transformers' parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.gguf.container import GgufError, GgufTensor
from engine.gguf.sources import read_tensor
from engine.kernels.blocks import BlockReader

# (values of the tensors, attention heads of the tower): the values of the parameter.
Join = Callable[[Sequence[Tensor], int], Tensor]


@dataclass(frozen=True, slots=True)
class TowerSource:
    """A parameter of a tower: see ParameterSource.

    heads  of the attention of the tower
    """

    tensors: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    join: Join
    heads: int

    def read(self, dtype: torch.dtype, reader: BlockReader) -> Tensor:
        """See ParameterSource."""
        values = self.join([read_tensor(tensor, dtype, reader) for tensor in self.tensors], self.heads)
        if values.numel() != torch.Size(self.shape).numel():
            names = " and ".join(tensor.name for tensor in self.tensors)
            raise GgufError(f"{names} have {values.numel()} values, which do not fit {list(self.shape)}")
        return values.reshape(self.shape)


def _first(values: Sequence[Tensor], heads: int) -> Tensor:
    return values[0]


@dataclass(frozen=True, slots=True)
class TowerTensors:
    """Parameters of one pattern.

    pattern  regular expression for the whole name after the prefix of the model
    tensors  their names in the file, with the groups of the pattern
    join     by default the only tensor
    """

    pattern: str
    tensors: tuple[str, ...]
    join: Join = _first

    def source(
        self, name: str, shape: tuple[int, ...], tensors: dict[str, GgufTensor], heads: int
    ) -> TowerSource | None:
        """The source of a parameter; None: its name has another pattern. Raises GgufError for a missing tensor."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        names = [match.expand(tensor) for tensor in self.tensors]
        missing = next((tensor for tensor in names if tensor not in tensors), None)
        if missing is not None:
            raise GgufError(f"it lacks the tensor {missing}")
        return TowerSource(tuple(tensors[tensor] for tensor in names), shape, self.join, heads)
