"""Slots of adapters: names, versions, and running sequences that outlive their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.adapters.adapter import Adapter, LowRank
from engine.adapters.modules import AdaptableLayers, AdapterLinear, use_adapters
from engine.adapters.store import AdapterStore
from engine.types.request import Request

ROWS = torch.eye(4)[:3]


def adapter(name: str, value: float, digest: str = "d") -> Adapter:
    """An adapter of one layer that adds `value` to each output of a one-hot row."""
    return Adapter(name, f"{digest}{value}", {"proj": LowRank(torch.ones(1, 4), torch.full((2, 1), value))})


class Model(nn.Module):
    """One linear layer, whose own product is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 2, bias=False)
        nn.init.zeros_(self.proj.weight)

    def added(self, *slots: int) -> list[float]:
        """The first output of a row for each slot."""
        with torch.inference_mode(), use_adapters([1] * len(slots), slots):
            return list(self.proj(ROWS[: len(slots)])[:, 0].tolist())


def test_a_slot_is_used_until_its_last_sequence_ends() -> None:
    """A new version of a name has another slot; the old one is free when nobody runs with it."""
    model = Model()
    store = AdapterStore(AdaptableLayers(model))
    first, other = store.load(adapter("a", 1.0)), store.load(adapter("b", 2.0))
    running = [store.acquire("a"), store.acquire("a")]

    second = store.load(adapter("a", 3.0))
    assert running == [first, first]
    assert len({first, other, second}) == 3
    assert model.added(first, other, second) == [1.0, 2.0, 3.0]
    assert store.acquire("a") == second
    assert store.bytes == 3 * adapter("a", 1.0).bytes

    store.release(first)
    assert model.added(first) == [1.0]
    store.release(first)
    assert model.added(first) == [0.0]
    assert store.load(adapter("c", 4.0)) == first
    assert [info.name for info in store.infos] == ["b", "a", "c"]


def test_an_unloaded_name_is_unknown_at_once() -> None:
    """Sequences that run with it go on."""
    model = Model()
    store = AdapterStore(AdaptableLayers(model))
    slot = store.load(adapter("a", 1.0))
    store.acquire("a")
    store.unload("a")

    assert model.added(slot) == [1.0]
    store.release(slot)
    assert (model.added(slot), store.bytes, store.infos) == ([0.0], 0, ())
    with pytest.raises(KeyError):
        store.unload("a")


def test_no_adapter_is_slot_0() -> None:
    """Without adapters too."""
    store = AdapterStore()
    store.release(store.acquire(""))

    assert store.acquire("") == 0
    with pytest.raises(KeyError):
        store.acquire("a")


def test_salts_differ_by_digest() -> None:
    """Of the files, not of the name; a request without an adapter keeps its salt."""
    store = AdapterStore(AdaptableLayers(Model()))
    for each in (adapter("a", 1.0), adapter("b", 1.0), adapter("c", 2.0)):
        store.load(each)
    salts = {
        (name, salt): store.with_salt(Request("x", (1,), salt=salt, adapter=name)).salt
        for name in ("", "a", "b", "c")
        for salt in (b"", b"owner")
    }

    assert (salts["", b""], salts["", b"owner"]) == (b"", b"owner")
    assert salts["a", b""] == salts["b", b""]
    assert len(set(salts.values())) == 6


def test_a_wrapped_layer_has_the_attributes_of_the_layer() -> None:
    """Models read them."""
    model = Model()
    AdaptableLayers(model).set(1, adapter("a", 1.0).layers)

    assert isinstance(model.proj, AdapterLinear)
    assert (model.proj.in_features, model.proj.weight.dtype) == (4, torch.float32)
    with pytest.raises(AttributeError):
        _ = model.proj.other


def test_rows_of_another_batch_are_an_error() -> None:
    """A layer that computes a part of the rows would add to wrong ones."""
    model = Model()
    AdaptableLayers(model).set(1, adapter("a", 1.0).layers)

    with use_adapters([1, 1], [1, 0]), pytest.raises(ValueError, match="proj computes 3 rows of a batch of 2"):
        model.proj(ROWS)
