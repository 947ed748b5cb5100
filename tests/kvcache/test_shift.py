"""Shifting by example: what it costs in cells, whom it leaves alone, and where it answers `keep`."""

from __future__ import annotations

import pytest
import torch

from kvcache.cache import Cache
from kvcache.errors import OutOfCells
from kvcache.spec import LayerSpec
from tests.kvcache.payload import SHIFTABLE, UNSHIFTABLE, feed, read


def cache_of(layers: tuple[LayerSpec, ...] = SHIFTABLE, cells: int = 64) -> Cache:
    """Four slots of sixteen tokens."""
    return Cache(layers, slots=4, capacity=16, cells=cells, dtype=torch.float64)


def test_what_follows_the_drop_moves_up() -> None:
    """The kept beginning stays, the rest stands behind it, and dropped cells are free."""
    cache = cache_of()
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4, 5, 6])

    assert 4 == cache.shift(0, 1, 2)
    assert [1, 4, 5, 6] == read(cache, SHIFTABLE, 0)
    assert 60 == cache.free_cells


def test_a_sharer_is_left_alone() -> None:
    """Who shares the cells keeps them where they are; the moved ones are copies."""
    cache = cache_of()
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4, 5, 6])
    cache.copy_prefix(0, 1, 5)
    cache.shift(0, 1, 2)

    assert [1, 4, 5, 6] == read(cache, SHIFTABLE, 0)
    assert [1, 2, 3, 4, 5] == read(cache, SHIFTABLE, 1)
    assert 64 - 8 == cache.free_cells


def test_what_is_remembered_is_left_alone() -> None:
    """The prefix tree still has the text as it was."""
    cache = cache_of()
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4, 5, 6])
    cache.insert_prefix(0, [1, 2, 3, 4, 5, 6])
    cache.shift(0, 1, 2)
    cache.reuse_prefix(1, [1, 2, 3, 4, 5, 6])

    assert [1, 4, 5, 6] == read(cache, SHIFTABLE, 0)
    assert [1, 2, 3, 4, 5, 6] == read(cache, SHIFTABLE, 1)


def test_dropped_cells_pay_for_copies() -> None:
    """With no cell free, a shift may use those that it frees itself."""
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
    """Without cells for the copies the shift is refused, with the numbers."""
    cache = cache_of(cells=6)
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4, 5, 6])
    cache.copy_prefix(0, 1, 6)

    with pytest.raises(OutOfCells) as refusal:
        cache.shift(0, 1, 2)

    assert (3, 0) == (refusal.value.needed, refusal.value.free)
    assert [1, 2, 3, 4, 5, 6] == read(cache, SHIFTABLE, 0) == read(cache, SHIFTABLE, 1)


def test_one_layer_that_cannot_move_holds_all() -> None:
    """The slot then stands at `keep`, and the caller computes the rest anew."""
    for layers in UNSHIFTABLE:
        cache = cache_of(layers)
        feed(cache, layers, 0, [1, 2, 3, 4, 5, 6])

        assert 2 == cache.shift(0, 2, 1)
        assert [1, 2] == read(cache, layers, 0)


def test_everything_can_be_dropped() -> None:
    """A drop up to the end is a rewind."""
    cache = cache_of()
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4])

    assert 1 == cache.shift(0, 1, 3)
    assert [1] == read(cache, SHIFTABLE, 0)


def test_shifted_slots_go_on() -> None:
    """After a shift new rows stand behind the moved ones, many times over."""
    cache = cache_of()
    held: list[int] = []
    for at in range(40):
        feed(cache, SHIFTABLE, 0, [at % 11])
        held.append(at % 11)
        if len(held) == 16:
            cache.shift(0, 3, 7)
            del held[3:10]

    assert held == read(cache, SHIFTABLE, 0)
