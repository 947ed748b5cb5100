"""The store of encoder entries: found by digest, pinned while in use, given up least recently used first."""

from __future__ import annotations

import random

import pytest
import torch

from kvcache.encoder_cache import EncoderCache, EncoderEntry

# Two layers of 1 head, 2 columns, float32.
CELL = 2 * 2 * 2 * 4


def entry(name: str, length: int) -> EncoderEntry:
    """An entry whose numbers tell where it came from."""
    number = float(sum(name.encode()))
    layers = {layer: (torch.full((1, length, 2), number), torch.full((1, length, 2), -number)) for layer in (1, 3)}
    return EncoderEntry(name.encode(), layers)


def fill(store: EncoderCache, *names: str, length: int = 1) -> None:
    """Put entries that nobody uses."""
    for name in names:
        assert store.evict_for(length * CELL) == 0
        store.put(entry(name, length))
        store.unpin(name.encode())


def held(store: EncoderCache, names: str) -> str:
    """Which of some entries are there; looking changes their order, so it is the last thing that a test does."""
    return "".join(name for name in names if store.pin(name.encode()) is not None)


def test_an_entry_is_found_by_its_digest() -> None:
    """What was put is what is found, number by number; nothing else is there."""
    store = EncoderCache(10 * CELL)
    fill(store, "a", "b")
    found = store.pin(b"b")

    assert found is not None
    assert [1, 3] == sorted(found.layers)
    assert torch.equal(torch.full((1, 1, 2), -98.0), found.layers[3][1])
    assert store.pin(b"c") is None
    assert (2, 2 * CELL) == (len(store), store.used_bytes)


def test_what_was_wanted_longest_ago_goes_first() -> None:
    """Not the oldest entry goes, but the one that nobody has asked for longest."""
    store = EncoderCache(3 * CELL)
    fill(store, "a", "b", "c")
    store.pin(b"a")
    store.unpin(b"a")
    fill(store, "d")

    assert "acd" == held(store, "abcd")


def test_only_as_much_goes_as_is_needed() -> None:
    """Room that is there is used first."""
    store = EncoderCache(5 * CELL)
    fill(store, "a", "b", "c", "d")
    fill(store, "e", length=2)

    assert "bcde" == held(store, "abcde")


def test_what_is_pinned_stays() -> None:
    """An entry in use is not given up, however long ago it was wanted; pins are counted."""
    store = EncoderCache(2 * CELL)
    fill(store, "a", "b")
    store.pin(b"a")
    store.pin(b"a")
    store.unpin(b"a")

    assert 0 == store.evict_for(CELL)
    assert CELL == store.evict_for(2 * CELL)
    assert "a" == held(store, "ab")


def test_where_something_lacks_nothing_is_given_up() -> None:
    """A refused request for room changes nothing."""
    store = EncoderCache(3 * CELL)
    fill(store, "a", "b")
    store.pin(b"b")

    assert 2 * CELL == store.evict_for(4 * CELL)
    assert "ab" == held(store, "ab")


def test_an_entry_is_unpinned_no_more_often_than_pinned() -> None:
    """A release too many is a bug, and told as one."""
    store = EncoderCache(CELL)
    fill(store, "a")

    with pytest.raises(AssertionError):
        store.unpin(b"a")


def test_the_budget_holds_whatever_happens() -> None:
    """Random traffic against a plain list: never above the budget, never a pinned one lost, never a wrong content."""
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
