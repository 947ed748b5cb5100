"""An adapter in memory: the two low-rank factors of each layer that it adapts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.types.status import AdapterInfo


@dataclass(frozen=True, slots=True)
class LowRank:
    """The factors of one layer: it computes `up (down x)` next to its product.

    down  [rank, columns]
    up    [outputs, rank], with the scaling multiplied in
    """

    down: Tensor
    up: Tensor

    @property
    def bytes(self) -> int:
        """Memory of both factors."""
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True)
class Adapter:
    """A validated adapter of one model.

    name    in requests
    digest  of its files: adapters with equal files compute equal texts, whatever their names are
    layers  factors by the name of the module
    """

    name: str
    digest: str
    layers: Mapping[str, LowRank]

    @property
    def bytes(self) -> int:
        """Memory of all factors."""
        return sum(factors.bytes for factors in self.layers.values())

    @property
    def info(self) -> AdapterInfo:
        """The adapter for display."""
        targets = sorted({layer.rpartition(".")[2] for layer in self.layers})
        rank = max(factors.down.shape[0] for factors in self.layers.values())
        return AdapterInfo(self.name, self.digest, rank, tuple(targets), self.bytes)
