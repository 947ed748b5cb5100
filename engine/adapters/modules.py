"""Adds the low-rank products of adapters to linear layers of a model, by the rows of a packed batch.

The product of a row is a function of the row and its adapter: inside RowInvariant (engine/model/invariant.py) it has
the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.adapters.adapter import LowRank
from engine.quantize.layers import QuantizedLinear


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a batch by the slot of their adapter; rows without one are in none.

    batch_rows  of the whole batch
    by_slot     slot and rows, int64
    """

    batch_rows: int
    by_slot: tuple[tuple[int, Tensor], ...]

    @classmethod
    def of(cls, lengths: Sequence[int], slots: Sequence[int]) -> AdapterRows:
        """The rows of consecutive spans with these lengths and slots; slot 0: no adapter."""
        rows: dict[int, list[int]] = {}
        start = 0
        for length, slot in zip(lengths, slots, strict=True):
            if slot:
                rows.setdefault(slot, []).extend(range(start, start + length))
            start += length
        return cls(start, tuple((slot, torch.tensor(indices)) for slot, indices in rows.items()))


class AdapterLinear(nn.Module):
    """A linear layer with the adapters of its rows, see `use_adapters`.

    layer    an nn.Linear or QuantizedLinear; other attributes of this module are those of the layer
    factors  by slot
    """

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self._name = layer, name
        self.factors: dict[int, LowRank] = {}

    def __getattr__(self, name: str) -> Any:
        """Models read the dtype or the width of a layer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., columns] to [..., outputs]."""
        # The same tensor: layers with one input share its quantisation by identity.
        output: Tensor = self.layer(inputs)
        batch = _rows.get()
        if batch is None:
            return output
        rows, products = inputs.reshape(-1, inputs.shape[-1]), output.reshape(-1, output.shape[-1])
        names = _names.get()
        if names is not None:
            if rows.shape[0] == batch.batch_rows:
                names.add(self._name)
            return output
        if rows.shape[0] != batch.batch_rows:
            raise ValueError(f"the layer {self._name} computes {rows.shape[0]} rows of a batch of {batch.batch_rows}")
        for slot, indices in batch.by_slot:
            factors = self.factors.get(slot)
            if factors is not None:
                # A row has one adapter, so no row is added twice.
                products = products.index_copy(0, indices, _adapted(products[indices], rows[indices], factors))
        return products.view_as(output)


def _adapted(products: Tensor, rows: Tensor, factors: LowRank) -> Tensor:
    """The products with the low-rank ones added in the dtype of the factors, or in float32 for bfloat16."""
    dtype = torch.promote_types(factors.down.dtype, torch.float32)
    low_rank = functional.linear(functional.linear(rows.to(dtype), factors.down.to(dtype)), factors.up.to(dtype))
    return (products.to(dtype) + low_rank).to(products.dtype)


class AdaptableLayers:
    """The linear layers of a model. A layer is wrapped when the first adapter needs it.

    modules  the layers by name
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.modules = {
            name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | QuantizedLinear)
        }
        self._wrapped: dict[str, AdapterLinear] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """[outputs, columns] of each layer."""
        return {name: (module.out_features, module.in_features) for name, module in self.modules.items()}

    def find_called(self, run: Callable[[], None]) -> frozenset[str]:
        """The layers that `run` calls with all rows of a batch, in which a row has an adapter.

        A model may read the weights of a layer without a call, or call it with the rows of some tokens only.
        """
        for name in self.modules:
            self._wrap(name)
        names: set[str] = set()
        token = _names.set(names)
        try:
            run()
        finally:
            _names.reset(token)
            for name in self.modules:
                self._unwrap(name)
        return frozenset(names)

    def set(self, slot: int, factors: Mapping[str, LowRank]) -> None:
        """Set the factors of a slot, by the names of layers."""
        for name, pair in factors.items():
            self._wrap(name).factors[slot] = pair

    def clear(self, slot: int) -> None:
        """Remove the factors of a slot."""
        for module in self._wrapped.values():
            module.factors.pop(slot, None)

    def _wrap(self, name: str) -> AdapterLinear:
        if name not in self._wrapped:
            self._wrapped[name] = wrapped = AdapterLinear(name, self.modules[name])
            self._replace(name, wrapped)
        return self._wrapped[name]

    def _unwrap(self, name: str) -> None:
        del self._wrapped[name]
        self._replace(name, self.modules[name])

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, attribute = name.rpartition(".")
        setattr(self._model.get_submodule(parent), attribute, module)


# The rows of the current forward; None: no row has an adapter.
_rows: ContextVar[AdapterRows | None] = ContextVar("engine.adapters.modules.rows", default=None)
# The names of called layers, inside `find_called`.
_names: ContextVar[set[str] | None] = ContextVar("engine.adapters.modules.names", default=None)


@contextmanager
def use_adapters(lengths: Sequence[int], slots: Sequence[int]) -> Iterator[None]:
    """Inside the block, a forward is of spans with these lengths and slots of adapters; no slots: none has one."""
    token = _rows.set(AdapterRows.of(lengths, slots) if any(slots) else None)
    try:
        yield
    finally:
        _rows.reset(token)
