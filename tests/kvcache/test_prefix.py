"""The prefix tree against plain lists: reused content was inserted before, and no cell leaks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.attention_group import HOLE, AttentionGroup
from kvcache.cache import Cache
from kvcache.cell_pool import CellArray
from kvcache.node import Node
from kvcache.spec import AttentionRange, LayerSpec, Span
from tests.kvcache.digests import FULL, WINDOW, check_references, compute_and_insert, make, reused_length
from tests.kvcache.digests import feed as feed_echo

SLOTS, CAPACITY, CELLS = 4, 40, 100
# Two groups of different geometry: a node has cells of both.
LAYERS = (LayerSpec(1, 2, 2), LayerSpec(2, 2, 2, AttentionRange("window", 3)))

slots = st.integers(0, SLOTS - 1)
salts = st.sampled_from([b"", b"tenant"])
# Two tokens only, so that prompts share prefixes often.
words = st.lists(st.integers(0, 1), max_size=12)


def feed(cache: Cache, slot: int, tokens: list[int]) -> None:
    """Append tokens with values that name them."""
    rows = torch.tensor(tokens, dtype=torch.float32)
    with cache.forward([Span(slot, cache.cached_length(slot), len(tokens))]) as forward:
        for index, layer in enumerate(LAYERS):
            shape = (layer.heads, len(tokens), 2)
            forward.store_kv(index, torch.zeros(shape), rows[None, :, None].expand(shape))


def read(group: AttentionGroup, cells: CellArray) -> list[int]:
    """The tokens in the cells, without holes."""
    present = torch.from_numpy(cells[cells != HOLE])
    return group.pool.values.rows[0][0, present, 0].int().tolist()


def as_far_as_held(cells: CellArray, tokens: list[int]) -> list[int]:
    """The tokens with a cell."""
    return [token for token, cell in zip(tokens, cells, strict=True) if cell != HOLE]


def nodes(cache: Cache) -> list[Node]:
    """Every node of the tree but the roots."""
    found = [child for root in cache._tree._radix.roots.values() for child in root.children.values()]
    for node in found:
        found.extend(node.children.values())
    return found


class TreeLaws(RuleBasedStateMachine):
    """Any order of feed, insert, reuse, clear and evict; a slot has one salt from empty to empty."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(LAYERS, slots=SLOTS, capacity=CAPACITY, cells=CELLS)
        self.content: list[list[int]] = [[] for _ in range(SLOTS)]
        self.salt = [b""] * SLOTS
        self.inserted: dict[bytes, set[tuple[int, ...]]] = {b"": set(), b"tenant": set()}

    @rule(slot=slots, tokens=words)
    def feed(self, slot: int, tokens: list[int]) -> None:
        """Compute tokens, evicting for them."""
        if not tokens or len(self.content[slot]) + len(tokens) > CAPACITY:
            return
        if not self.cache.evict_for([Span(slot, len(self.content[slot]), len(tokens))]):
            feed(self.cache, slot, tokens)
            self.content[slot] += tokens

    @rule(slot=slots, share=st.floats(0, 1))
    def insert(self, slot: int, share: float) -> None:
        """Insert part of a slot's text."""
        tokens = self.content[slot][: int(share * len(self.content[slot]))]
        self.cache.insert_prefix(slot, tokens, salt=self.salt[slot])
        self.inserted[self.salt[slot]] |= {tuple(tokens[:length]) for length in range(len(tokens) + 1)}

    @rule(slot=slots, salt=salts, tokens=words)
    def reuse(self, slot: int, salt: bytes, tokens: list[int]) -> None:
        """Extend a slot by cached tokens of its own salt only."""
        if not self.content[slot]:
            self.salt[slot] = salt
        goal = (self.content[slot] + tokens)[:CAPACITY]
        cached_length = len(self.content[slot])
        length = self.cache.reuse_prefix(slot, goal, salt=self.salt[slot])

        assert cached_length <= length <= len(goal)
        assert length == cached_length or tuple(goal[:length]) in self.inserted[self.salt[slot]]
        self.content[slot] = goal[:length]

    @rule(slot=slots)
    def clear(self, slot: int) -> None:
        """Clear a slot; the tree is unchanged."""
        self.cache.clear(slot)
        self.content[slot] = []

    @rule(goal=st.integers(1, 40))
    def evict(self, goal: int) -> None:
        """Free as many cells as returned, and enough if there are enough."""
        free, evictable = self.cache.free_cells, self.cache.evictable_cells()
        freed = self.cache.evict(goal)

        assert free + freed == self.cache.free_cells
        assert freed >= min(goal, evictable)

    @invariant()
    def slots_hold_their_tokens(self) -> None:
        """Every group of a slot has the slot's tokens."""
        for slot, tokens in enumerate(self.content):
            for group in self.cache.groups:
                assert len(tokens) == len(group.table(slot))
                assert as_far_as_held(group.table(slot), tokens) == read(group, group.table(slot))

    @invariant()
    def nodes_cover_their_edges(self) -> None:
        """A node's cells hold its tokens, and siblings differ in their first token."""
        found = nodes(self.cache)
        for node in found:
            assert node.parent is not None
            assert node.parent.children[int(node.tokens[0])] is node
            for group, held in zip(self.cache.groups, node.references, strict=True):
                assert len(node.tokens) == len(held)
                assert as_far_as_held(held, node.tokens.tolist()) == read(group, held)

        assert len(found) == self.cache._tree.node_count

    @invariant()
    def references_are_owners(self) -> None:
        """Every reference belongs to a slot or a node; free cells have none."""
        for index, group in enumerate(self.cache.groups):
            owners = np.zeros(group.pool.cells, dtype=np.int32)
            for cells in [group.table(slot) for slot in range(SLOTS)] + [
                node.references[index] for node in nodes(self.cache)
            ]:
                np.add.at(owners, cells[cells != HOLE], 1)

            assert owners.tolist() == group.pool.reference_counts.tolist()
            assert group.pool.free_cells == int((owners == 0).sum())

    def teardown(self) -> None:
        """After clear and evict every cell is free."""
        for slot in range(SLOTS):
            self.cache.clear(slot)
        self.cache.evict(CELLS)

        assert self.cache.free_cells == CELLS
        assert self.cache._tree.node_count == 0


TreeLaws.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestTreeLaws = TreeLaws.TestCase


def test_the_longest_cached_prefix_is_reused() -> None:
    cache = Cache(LAYERS, slots=2, capacity=CAPACITY, cells=CELLS)
    feed(cache, 0, [1, 2, 3, 4, 5])
    cache.insert_prefix(0, [1, 2, 3, 4, 5])
    cache.clear(0)

    assert 3 == cache.reuse_prefix(1, [1, 2, 3, 9, 9, 9])


def test_least_recently_used_prefixes_are_evicted_first() -> None:
    cache = Cache(LAYERS, slots=2, capacity=CAPACITY, cells=CELLS)
    for first in (1, 2):
        feed(cache, 0, [first, 7, 7, 7])
        cache.insert_prefix(0, [first, 7, 7, 7])
        cache.clear(0)
    cache.reuse_prefix(0, [1, 7, 7, 7])
    cache.clear(0)
    cache.evict(4)

    assert 4 == cache.reuse_prefix(0, [1, 7, 7, 7])
    assert 0 == cache.reuse_prefix(1, [2, 7, 7, 7])


def test_a_long_leaf_is_evicted_in_part() -> None:
    cache = Cache(LAYERS, slots=1, capacity=CAPACITY, cells=CELLS)
    text = list(range(30))
    feed(cache, 0, text)
    cache.insert_prefix(0, text)
    cache.clear(0)

    assert 6 == cache.evict(6)
    assert 24 == cache.reuse_prefix(0, text)


def test_a_long_path_in_use_is_followed_once_for_an_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node for each token, least recently used: only its leaf asks for the path."""
    cache, tokens = make(FULL, capacity=64), range(60)
    feed_echo(cache, 0, tokens)
    for length in range(1, 61):
        cache.insert_prefix(0, tokens[:length], checkpoint=True)
    feed_echo(cache, 1, range(100, 120))
    cache.insert_prefix(1, range(100, 120))
    cache.clear(1)
    asked, path = list[Node](), Node.path
    monkeypatch.setattr(Node, "path", lambda node: asked.append(node) or path(node))

    assert 0 < cache.evict(4)
    assert len(asked) < 10


def test_salts_do_not_share_prefixes() -> None:
    cache = Cache(LAYERS, slots=2, capacity=CAPACITY, cells=CELLS)
    feed(cache, 0, [1, 2, 3])
    cache.insert_prefix(0, [1, 2, 3], salt=b"one")

    assert 0 == cache.reuse_prefix(1, [1, 2, 3], salt=b"two")
    assert 3 == cache.reuse_prefix(1, [1, 2, 3], salt=b"one")


def test_cells_shared_by_two_salts_can_be_freed() -> None:
    cache = Cache(LAYERS, slots=SLOTS, capacity=CAPACITY, cells=CELLS)
    feed(cache, 0, [1, 2, 3, 4, 5, 6])
    cache.insert_prefix(0, [1, 2, 3, 4, 5, 6])
    cache.insert_prefix(0, [1, 2, 3, 4], salt=b"tenant")

    assert 0 == cache.evict(CELLS)
    assert 4 == cache.reuse_prefix(1, [1, 2, 3, 4], salt=b"tenant")
    cache.clear(0)
    cache.clear(1)
    assert 6 == cache.evict(CELLS)
    assert CELLS == cache.free_cells
    feed(cache, 0, [1, 2, 3])
    for salt in (b"", b"tenant"):
        cache.insert_prefix(0, [1, 2, 3], salt=salt)
    cache.clear(0)
    assert 1 == cache.evict(1)


def test_a_repeated_prompt_needs_no_more_memory() -> None:
    cache = Cache(LAYERS, slots=2, capacity=CAPACITY, cells=CELLS)
    feed(cache, 0, [1, 2, 3])
    cache.insert_prefix(0, [1, 2, 3])
    for _ in range(1000):
        cache.reuse_prefix(1, [1, 2, 3])
        cache.clear(1)
    cache.clear(0)

    assert len(cache._tree._radix.lru) == 1
    assert 3 == cache.evict(3)


def test_leaves_grow_unless_their_end_is_fixed() -> None:
    cache = Cache(LAYERS, slots=2, capacity=CAPACITY, cells=CELLS)
    nodes_then = []
    for length, checkpoint in ((5, False), (10, True), (15, False), (20, False)):
        feed(cache, 0, list(range(length - 5, length)))
        cache.insert_prefix(0, list(range(length)), checkpoint=checkpoint)
        nodes_then.append(cache._tree.node_count)

    assert [1, 1, 2, 2] == nodes_then


def test_a_checkpoint_inside_an_edge_splits_it() -> None:
    cache = Cache(LAYERS, slots=2, capacity=CAPACITY, cells=CELLS)
    feed(cache, 0, list(range(20)))
    cache.insert_prefix(0, list(range(20)))
    cache.insert_prefix(0, list(range(8)), checkpoint=True)

    assert [(8, True), (12, False)] == [(len(node.tokens), node.fixed_end) for node in nodes(cache)]


def trimmed_cache() -> Cache:
    """A cache with windows of four and two trimmed texts of twenty tokens, the first with a checkpoint."""
    cache = make(FULL, WINDOW)
    for length in (20, 40):
        compute_and_insert(cache, range(length), checkpoint=True)
    used = cache.groups[1].pool.cells - cache.groups[1].pool.free_cells
    assert cache._tree.evict([0, used - 2 * 3])
    return cache


def test_trimming_keeps_the_ends() -> None:
    cache = trimmed_cache()

    assert 2 * 3 == cache.groups[1].pool.cells - cache.groups[1].pool.free_cells
    assert [40, 20, 20, 0] == [reused_length(cache, range(length)) for length in (40, 39, 20, 19)]


def test_the_match_may_exceed_the_reused_length() -> None:
    cache = trimmed_cache()

    assert (30, 20) == (cache.match_prefix([*range(30), 99]).length, reused_length(cache, [*range(30), 99]))
    assert 0 == cache.match_prefix(range(30), salt=b"other").length


def test_a_match_reports_divergence() -> None:
    cache = make(FULL, slots=2, capacity=64, cells=128)
    for text in ([1, 2, 3, 4], [1, 2, 5]):
        compute_and_insert(cache, text)
    texts = ([1, 2, 3, 9], [1, 2, 9], [1, 2, 3, 4, 9], [1, 2, 3, 4], [1, 2, 3], [9])

    assert [True, True, False, False, False, False] == [cache.match_prefix(text).diverged for text in texts]
    assert not cache.match_prefix([1, 2, 9], salt=b"other").diverged


def test_gaps_are_filled_by_recomputed_content() -> None:
    cache = trimmed_cache()
    cache.reuse_prefix(0, [*range(30), 99])
    feed_echo(cache, 0, range(30))
    cache.insert_prefix(0, range(30), checkpoint=True)
    cache.clear(0)

    assert 30 == reused_length(cache, [*range(30), 77])
    check_references(cache)


def test_least_recently_used_nodes_are_trimmed_first() -> None:
    cache = make(FULL, WINDOW)
    for first in (1, 2):
        compute_and_insert(cache, (first, *range(29)))
    reused_length(cache, (1, *range(29)))
    cache._tree.evict([0, 20])

    assert 15 == reused_length(cache, (1, *range(14)))
    assert 0 == reused_length(cache, (2, *range(14)))
    assert 30 == reused_length(cache, (2, *range(29)))


def test_a_shortened_leaf_can_be_resumed() -> None:
    cache = make(FULL, state_bytes=10**6)
    for length in (10, 20, 30):
        feed_echo(cache, 0, range(length))
        cache.insert_prefix(0, range(length))
    cache.clear(0)

    assert 10 == cache.evict(4)
    assert 20 == reused_length(cache, range(30))


def test_a_long_leaf_of_a_large_cache_is_evicted_in_batches() -> None:
    cache = Cache([FULL], slots=2, capacity=700, cells=640)
    compute_and_insert(cache, range(600))
    text = range(1000, 1050)
    feed_echo(cache, 1, text[:40])
    for length in range(41, 51):
        assert cache.evict_for([Span(1, length - 1, 1)]) == 0
        feed_echo(cache, 1, text[:length])

    # Three runs, each from the middle of the free cells to their end.
    assert 6 == np.count_nonzero(np.diff(cache.groups[0].table(1)[40:]) == 1)
    assert 590 == reused_length(cache, range(600))


def test_each_group_gets_its_missing_cells() -> None:
    cache = make(FULL, WINDOW)
    compute_and_insert(cache, range(40))
    full, window = (group.pool.free_cells for group in cache.groups)

    assert cache._tree.evict([0, 5])
    assert full == cache.groups[0].pool.free_cells
    assert window + 5 <= cache.groups[1].pool.free_cells


def test_an_evicted_salt_leaves_no_root() -> None:
    cache = make(FULL)
    for salt in (b"one", b"two"):
        compute_and_insert(cache, range(10), salt=salt)
    cache.evict(10)
    assert [b"two"] == list(cache._tree._radix.roots)
    cache.evict(10)

    assert {} == cache._tree._radix.roots


def test_a_checkpoint_right_behind_a_gap_can_be_resumed() -> None:
    cache, tokens = make(FULL, WINDOW), list(range(20))
    for length in (19, 20):
        feed_echo(cache, 0, tokens, upto=length)
    cache.insert_prefix(0, tokens[:10])
    for length in (11, 12):
        feed_echo(cache, 1, tokens, upto=length)
    cache.insert_prefix(1, tokens[:12], checkpoint=True)

    assert 12 == reused_length(cache, tokens[:12])
