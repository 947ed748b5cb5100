"""Counts of cells and the shape of the prefix tree, without content."""

from __future__ import annotations

import pytest

from kvcache.attention_group import AttentionGroup
from kvcache.snapshot import CellCounts, PrefixNode
from tests.kvcache.digests import FULL, WINDOW, compute_and_insert, feed, make

TOKENS = tuple(range(1, 11))


def counts(group: AttentionGroup) -> tuple[int, int, int]:
    """Used, shared and cached cells."""
    found = group.count_cells()
    return found.used, found.shared, found.cached


def test_cells_are_counted_by_their_use() -> None:
    """Cells of one slot, of two slots, of the prefix tree alone; the rest is free."""
    cache = make(cells=40)
    group = cache.groups[0]
    feed(cache, 0, TOKENS)
    assert CellCounts(total=40, used=10, shared=0, cached=0) == group.count_cells()

    cache.copy_prefix(0, 1, 6)
    assert (10, 6, 0) == counts(group)

    cache.insert_prefix(0, TOKENS)
    cache.clear(0)
    assert (6, 0, 4) == counts(group)
    assert 40 - 10 == group.pool.free_cells


def test_holes_of_windows_are_no_cells() -> None:
    """A slot of a window group holds the cells of its window only."""
    cache = make(WINDOW)
    feed(cache, 0, TOKENS)
    feed(cache, 0, (*TOKENS, 11))

    assert 4 == counts(cache.groups[0])[0]


def test_nodes_have_their_place_and_their_slots() -> None:
    """Two prompts with four common tokens: one node for them, and one for each continuation."""
    cache = make(FULL, WINDOW)
    compute_and_insert(cache, TOKENS)
    compute_and_insert(cache, (*TOKENS[:4], 50, 51))
    assert 4 == cache.reuse_prefix(0, TOKENS[:4])

    top, *branches = sorted(cache.prefix_nodes(b"", limit=10), key=lambda node: (node.start, node.length))

    assert PrefixNode(top.id, None, 0, 4, (0,)) == top
    assert [(top.id, 4, 2, ()), (top.id, 4, 6, ())] == [
        (node.parent, node.start, node.length, node.slots) for node in branches
    ]


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_the_most_recent_nodes_come_first(limit: int) -> None:
    """A node stands before its children, so every prefix of the list is a tree."""
    cache = make()
    compute_and_insert(cache, TOKENS)
    compute_and_insert(cache, (*TOKENS[:4], 50, 51))

    found = cache.prefix_nodes(b"", limit)

    assert [4, 2, 6][:limit] == [node.length for node in found]
    assert all(node.parent in (None, found[0].id) for node in found)


def test_nodes_of_other_salts_are_not_listed() -> None:
    cache = make()
    compute_and_insert(cache, TOKENS, salt=b"one")

    assert [10] == [node.length for node in cache.prefix_nodes(b"one", 10)]
    assert [] == cache.prefix_nodes(b"", 10)
