"""Shifting by example: cells needed, effect on other owners, and shifts that return `keep`."""

from __future__ import annotations

import pytest
import torch

from kvcache.cache import Cache
from kvcache.errors import OutOfCells
from kvcache.spec import LayerSpec
from tests.kvcache.token_rows import SHIFTABLE, UNSHIFTABLE, feed, read


def cache_of(layers: tuple[LayerSpec, ...] = SHIFTABLE, cells: int = 64) -> Cache:
    """Four slots of sixteen tokens."""
    return Cache(layers, slots=4, capacity=16, cells=cells, dtype=torch.float64)


def test_tokens_behind_the_drop_move() -> None:
    cache = cache_of()
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4, 5, 6])

    assert 4 == cache.shift(0, 1, 2)
    assert [1, 4, 5, 6] == read(cache, SHIFTABLE, 0)
    assert 60 == cache.free_cells


def test_shared_cells_are_copied() -> None:
    cache = cache_of()
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4, 5, 6])
    cache.copy_prefix(0, 1, 5)
    cache.shift(0, 1, 2)

    assert [1, 4, 5, 6] == read(cache, SHIFTABLE, 0)
    assert [1, 2, 3, 4, 5] == read(cache, SHIFTABLE, 1)
    assert 64 - 8 == cache.free_cells


def test_cached_prefixes_are_unchanged_by_a_shift() -> None:
    cache = cache_of()
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4, 5, 6])
    cache.insert_prefix(0, [1, 2, 3, 4, 5, 6])
    cache.shift(0, 1, 2)
    cache.reuse_prefix(1, [1, 2, 3, 4, 5, 6])

    assert [1, 4, 5, 6] == read(cache, SHIFTABLE, 0)
    assert [1, 2, 3, 4, 5, 6] == read(cache, SHIFTABLE, 1)


def test_dropped_cells_are_used_for_copies() -> None:
    cache = cache_of(cells=9)
    feed(cache, SHIFTABLE, 1, [1, 2, 3])
    cache.insert_prefix(1, [1, 2, 3])
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4, 5, 6])
    cache.insert_prefix(0, [1, 2, 3, 4, 5, 6])
    assert 0 == cache.free_cells

    assert 3 == cache.shift(0, 0, 3)
    assert [4, 5, 6] == read(cache, SHIFTABLE, 0)
    assert 0 == cache.free_cells


def test_a_shift_that_does_not_fit_changes_nothing() -> None:
    cache = cache_of(cells=6)
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4, 5, 6])
    cache.copy_prefix(0, 1, 6)

    with pytest.raises(OutOfCells) as refusal:
        cache.shift(0, 1, 2)

    assert (3, 0) == (refusal.value.needed, refusal.value.free)
    assert [1, 2, 3, 4, 5, 6] == read(cache, SHIFTABLE, 0) == read(cache, SHIFTABLE, 1)


def test_one_unshiftable_layer_prevents_the_shift() -> None:
    for layers in UNSHIFTABLE:
        cache = cache_of(layers)
        feed(cache, layers, 0, [1, 2, 3, 4, 5, 6])

        assert 2 == cache.shift(0, 2, 1)
        assert [1, 2] == read(cache, layers, 0)


def test_all_tokens_can_be_dropped() -> None:
    cache = cache_of()
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4])

    assert 1 == cache.shift(0, 1, 3)
    assert [1] == read(cache, SHIFTABLE, 0)


def test_shifted_slots_can_grow() -> None:
    cache = cache_of()
    held: list[int] = []
    for at in range(40):
        feed(cache, SHIFTABLE, 0, [at % 11])
        held.append(at % 11)
        if len(held) == 16:
            cache.shift(0, 3, 7)
            del held[3:10]

    assert held == read(cache, SHIFTABLE, 0)
