"""The prefix tree against a plain list: what is recalled is what was remembered, and nobody's cells are lost."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.cache import Cache
from kvcache.prefix import Node
from kvcache.spec import LayerSpec, Reach, Span

SLOTS, CAPACITY, CELLS = 4, 40, 100
# Two groups of different geometry, so that the tree holds two tables of cells a node.
LAYERS = (LayerSpec(1, 2, 2), LayerSpec(2, 2, 2, Reach("window", 3)))

slots = st.integers(0, SLOTS - 1)
salts = st.sampled_from([b"", b"tenant"])
# Two letters only, so that prompts meet often.
words = st.lists(st.integers(0, 1), max_size=12)


def feed(cache: Cache, slot: int, tokens: list[int]) -> None:
    """Append tokens whose values say what they are."""
    rows = torch.tensor(tokens, dtype=torch.float32)
    with cache.forward([Span(slot, cache.length(slot), len(tokens))]) as forward:
        for index, layer in enumerate(LAYERS):
            shape = (layer.heads, len(tokens), 2)
            forward.write(index, torch.zeros(shape), rows[None, :, None].expand(shape))


def nodes(cache: Cache) -> list[Node]:
    """Every node of the tree but the roots."""
    found = [child for root in cache._tree._roots.values() for child in root.children.values()]
    for node in found:
        found.extend(node.children.values())
    return found


class TreeLaws(RuleBasedStateMachine):
    """Any order of feed, remember, recall, clear and evict; slots belong to one tenant from empty to empty."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(LAYERS, slots=SLOTS, capacity=CAPACITY, cells=CELLS)
        self.content: list[list[int]] = [[] for _ in range(SLOTS)]
        self.salt = [b""] * SLOTS
        self.remembered: dict[bytes, set[tuple[int, ...]]] = {b"": set(), b"tenant": set()}

    @rule(slot=slots, tokens=words)
    def feed(self, slot: int, tokens: list[int]) -> None:
        """Compute some tokens, evicting what is needed."""
        if not tokens or len(self.content[slot]) + len(tokens) > CAPACITY:
            return
        self.cache.evict(len(tokens) - self.cache.free_cells)
        if self.cache.free_cells >= len(tokens):
            feed(self.cache, slot, tokens)
            self.content[slot] += tokens

    @rule(slot=slots, share=st.floats(0, 1))
    def remember(self, slot: int, share: float) -> None:
        """Let others have some of what a slot computed."""
        tokens = self.content[slot][: int(share * len(self.content[slot]))]
        self.cache.remember(slot, tokens, salt=self.salt[slot])
        self.remembered[self.salt[slot]] |= {tuple(tokens[:length]) for length in range(len(tokens) + 1)}

    @rule(slot=slots, salt=salts, tokens=words)
    def recall(self, slot: int, salt: bytes, tokens: list[int]) -> None:
        """Extend a slot by what is remembered: never by tokens that nobody of the tenant computed."""
        if not self.content[slot]:
            self.salt[slot] = salt
        wanted = (self.content[slot] + tokens)[:CAPACITY]
        standing = len(self.content[slot])
        length = self.cache.recall(slot, wanted, salt=self.salt[slot])

        assert standing <= length <= len(wanted)
        assert length == standing or tuple(wanted[:length]) in self.remembered[self.salt[slot]]
        self.content[slot] = wanted[:length]

    @rule(slot=slots)
    def clear(self, slot: int) -> None:
        """Empty a slot; what is remembered stays."""
        self.cache.clear(slot)
        self.content[slot] = []

    @rule(wanted=st.integers(1, 40))
    def evict(self, wanted: int) -> None:
        """Free cells: exactly as many as is said, and enough if there are enough."""
        free, idle = self.cache.free_cells, self.cache.idle_cells()
        freed = self.cache.evict(wanted)

        assert free + freed == self.cache.free_cells
        assert freed >= min(wanted, idle)

    @invariant()
    def slots_hold_their_tokens(self) -> None:
        """A slot reads back what was put in, in every group."""
        for slot, tokens in enumerate(self.content):
            for group in self.cache.groups:
                cells = torch.from_numpy(group.table(slot))

                assert tokens == group.pool.values[0][0, cells, 0].int().tolist()

    @invariant()
    def nodes_cover_their_edges(self) -> None:
        """A node's cells hold exactly its tokens, and siblings differ in their first."""
        found = nodes(self.cache)
        for node in found:
            assert node.parent is not None
            assert node.parent.children[int(node.tokens[0])] is node
            for group, held in zip(self.cache.groups, node.held, strict=True):
                assert node.tokens.tolist() == group.pool.values[0][0, torch.from_numpy(held), 0].int().tolist()

        assert len(found) == self.cache._tree.nodes

    @invariant()
    def references_are_owners(self) -> None:
        """Every reference belongs to a slot or a node, and free cells have none."""
        for index, group in enumerate(self.cache.groups):
            owners = np.zeros(CELLS, dtype=np.int32)
            for cells in [group.table(slot) for slot in range(SLOTS)] + [
                node.held[index] for node in nodes(self.cache)
            ]:
                np.add.at(owners, cells, 1)

            assert owners.tolist() == group.pool.references.tolist()
            assert group.pool.free == int((owners == 0).sum())

    def teardown(self) -> None:
        """Without slots and memories every cell is free again."""
        for slot in range(SLOTS):
            self.cache.clear(slot)
        self.cache.evict(CELLS)

        assert self.cache.free_cells == CELLS
        assert self.cache._tree.nodes == 0


TreeLaws.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTreeLaws = TreeLaws.TestCase


def test_the_longest_remembered_beginning_is_recalled() -> None:
    """A prompt starts where the deepest common beginning ends, inside an edge too."""
    cache = Cache(LAYERS, slots=2, capacity=CAPACITY, cells=CELLS)
    feed(cache, 0, [1, 2, 3, 4, 5])
    cache.remember(0, [1, 2, 3, 4, 5])
    cache.clear(0)

    assert 3 == cache.recall(1, [1, 2, 3, 9, 9, 9])


def test_what_was_wanted_last_stays_longest() -> None:
    """Eviction takes the end that was wanted longest ago."""
    cache = Cache(LAYERS, slots=2, capacity=CAPACITY, cells=CELLS)
    for first in (1, 2):
        feed(cache, 0, [first, 7, 7, 7])
        cache.remember(0, [first, 7, 7, 7])
        cache.clear(0)
    cache.recall(0, [1, 7, 7, 7])
    cache.clear(0)
    cache.evict(4)

    assert 4 == cache.recall(0, [1, 7, 7, 7])
    assert 0 == cache.recall(1, [2, 7, 7, 7])


def test_a_long_end_loses_only_what_is_needed() -> None:
    """Of a long remembered text the beginning survives when a few cells are wanted."""
    cache = Cache(LAYERS, slots=1, capacity=CAPACITY, cells=CELLS)
    text = list(range(30))
    feed(cache, 0, text)
    cache.remember(0, text)
    cache.clear(0)

    assert 6 == cache.evict(6)
    assert 24 == cache.recall(0, text)


def test_tenants_do_not_meet() -> None:
    """What one salt remembers does not exist for another."""
    cache = Cache(LAYERS, slots=2, capacity=CAPACITY, cells=CELLS)
    feed(cache, 0, [1, 2, 3])
    cache.remember(0, [1, 2, 3], salt=b"one")

    assert 0 == cache.recall(1, [1, 2, 3], salt=b"two")
    assert 3 == cache.recall(1, [1, 2, 3], salt=b"one")


def test_a_prompt_that_comes_again_and_again_costs_no_memory() -> None:
    """What the tree keeps for eviction is bounded by what it holds, however often that is recalled."""
    cache = Cache(LAYERS, slots=2, capacity=CAPACITY, cells=CELLS)
    feed(cache, 0, [1, 2, 3])
    cache.remember(0, [1, 2, 3])
    for _ in range(1000):
        cache.recall(1, [1, 2, 3])
        cache.clear(1)
    cache.clear(0)

    assert len(cache._tree._leaves) < 100
    assert 3 == cache.evict(3)
