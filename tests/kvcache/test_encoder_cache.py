"""The encoder cache: found by digest, pinned while in use, evicted least recently used first."""

from __future__ import annotations

import random

import pytest
import torch

from kvcache.encoder_cache import EncoderCache, EncoderEntry

# Two layers of 1 head, 2 columns, float32.
CELL = 2 * 2 * 2 * 4


def entry(name: str, length: int) -> EncoderEntry:
    """An entry with content that depends on its name."""
    number = float(sum(name.encode()))
    layers = {layer: (torch.full((1, length, 2), number), torch.full((1, length, 2), -number)) for layer in (1, 3)}
    return EncoderEntry(name.encode(), layers)


def fill(store: EncoderCache, *names: str, length: int = 1) -> None:
    """Add unpinned entries."""
    for name in names:
        assert store.evict_for(length * CELL) == 0
        store.put(entry(name, length))
        store.unpin(name.encode())


def held(store: EncoderCache, names: str) -> str:
    """The entries still in the cache. Changes their order, so call it last."""
    return "".join(name for name in names if store.pin(name.encode()) is not None)


def test_an_entry_is_found_by_its_digest() -> None:
    store = EncoderCache(10 * CELL)
    fill(store, "a", "b")
    found = store.pin(b"b")

    assert found is not None
    assert [1, 3] == sorted(found.layers)
    assert torch.equal(torch.full((1, 1, 2), -98.0), found.layers[3][1])
    assert store.pin(b"c") is None
    assert (2, 2 * CELL) == (len(store), store.used_bytes)


def test_least_recently_used_entries_are_evicted_first() -> None:
    store = EncoderCache(3 * CELL)
    fill(store, "a", "b", "c")
    store.pin(b"a")
    store.unpin(b"a")
    fill(store, "d")

    assert "acd" == held(store, "abcd")


def test_no_more_is_evicted_than_needed() -> None:
    store = EncoderCache(5 * CELL)
    fill(store, "a", "b", "c", "d")
    fill(store, "e", length=2)

    assert "bcde" == held(store, "abcde")


def test_pinned_entries_are_not_evicted() -> None:
    store = EncoderCache(2 * CELL)
    fill(store, "a", "b")
    store.pin(b"a")
    store.pin(b"a")
    store.unpin(b"a")

    assert 0 == store.evict_for(CELL)
    assert CELL == store.evict_for(2 * CELL)
    assert "a" == held(store, "ab")


def test_nothing_is_evicted_if_bytes_are_missing() -> None:
    store = EncoderCache(3 * CELL)
    fill(store, "a", "b")
    store.pin(b"b")

    assert 2 * CELL == store.evict_for(4 * CELL)
    assert "ab" == held(store, "ab")


def test_more_unpins_than_pins_are_an_error() -> None:
    store = EncoderCache(CELL)
    fill(store, "a")

    with pytest.raises(AssertionError):
        store.unpin(b"a")


def test_any_order_of_operations_keeps_the_budget() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        store, users = EncoderCache(8 * CELL), []
        for _ in range(120):
            name = chance.choice("abcdefgh")
            size = 1 + ord(name) % 3
            if users and chance.random() < 0.5:
                store.unpin(users.pop(chance.randrange(len(users))).encode())
            elif (found := store.pin(name.encode())) is not None:
                assert float(ord(name)) == float(found.layers[1][0][0, 0, 0])
                users.append(name)
            elif store.evict_for(size * CELL) == 0:
                store.put(entry(name, size))
                users.append(name)
            pinned = sum(1 + ord(user) % 3 for user in set(users)) * CELL
            assert pinned == store.pinned_bytes <= store.used_bytes <= store.budget_bytes
        assert set(users) == set(held(store, "".join(sorted(set(users)))))
