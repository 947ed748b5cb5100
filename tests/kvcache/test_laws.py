"""Any order of operations against plain lists: after every one, each slot reads as its list, and no cell leaks.

The law of slots in shared cells (design notes, reliability 3.1 and 3.2), judged for a cache of three groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvcache.cache import Cache
from kvcache.errors import BadSpan, CacheError, OutOfCells
from kvcache.spec import LayerSpec, Span
from tests.kvcache.ledger import Entry, Ledger
from tests.kvcache.payload import SHIFTABLE, TOKENS, UNSHIFTABLE, key_rows, value_rows, write

SLOTS = 4
slots = st.integers(0, SLOTS - 1)
lengths = st.integers(0, 18)
spans = st.lists(
    st.tuples(slots, st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=3, unique_by=lambda span: span[0]
)


class Boom(Exception):
    """What the model raises inside a forward."""


class Laws(RuleBasedStateMachine):
    """Operations on a cache and on its ledger."""

    def __init__(self, tally: Counter[str]) -> None:
        super().__init__()
        self.tally = tally

    @initialize(
        layers=st.sampled_from((SHIFTABLE, SHIFTABLE, SHIFTABLE, *UNSHIFTABLE)),
        capacity=st.sampled_from((6, 16)),
        scarcity=st.sampled_from((0, 4, 16, 40)),
    )
    def open(self, layers: tuple[LayerSpec, ...], capacity: int, scarcity: int) -> None:
        cells = max(capacity, SLOTS * capacity - scarcity)
        self.layers = layers
        self.cache = Cache(layers, slots=SLOTS, capacity=capacity, cells=cells, dtype=torch.float64)
        self.ledger = Ledger(SLOTS, capacity, cells, shiftable=layers is SHIFTABLE)
        self.expected_keys = [
            np.stack([key_rows(layer, range(TOKENS), [position] * TOKENS) for position in range(capacity)], axis=1)
            for layer in layers
        ]

    @rule(plan=spans, fails=st.sampled_from((False, False, False, True)), variant=st.integers(0, 1))
    def feed(self, plan: list[tuple[int, int, int]], fails: bool, variant: int = 0) -> None:
        """Rows for several slots; of each span the last few may be given up, and a failure gives up all."""
        rows = [
            (slot, min(count, self.ledger.capacity - self.cache.length(slot)), dropped)
            for slot, count, dropped in plan
            if self.cache.length(slot) < self.ledger.capacity
        ]
        asked = [Span(slot, self.cache.length(slot), count) for slot, count, _ in rows]
        if not asked:
            return
        if sum(span.length for span in asked) > self.ledger.free:
            self.refused(OutOfCells, lambda: self.cache.forward(asked).__enter__())
            return
        fresh = [self.ledger.fresh(span.length, span.start, variant) for span in asked]
        try:
            self.compute(asked, fresh, {slot: dropped for slot, _, dropped in rows if dropped}, fails)
        except Boom:
            self.count("feed that failed")
            return
        self.count("feed")
        for (slot, count, dropped), entries in zip(rows, fresh, strict=True):
            self.ledger.slots[slot] += entries[: count - min(dropped, count)]

    @rule(slot=slots, count=st.integers(1, 16), variant=st.integers(0, 1))
    def prompt(self, slot: int, count: int, variant: int) -> None:
        """Rows for one slot, all kept."""
        self.feed([(slot, count, 0)], fails=False, variant=variant)

    @rule(slot=slots, other=slots, length=lengths, count=st.integers(1, 6))
    def fork(self, slot: int, other: int, length: int, count: int) -> None:
        """A slot is remembered whole, and another goes its own way from the middle of it, and is remembered too."""
        self.remember(slot, 0)
        self.copy_prefix(slot, other, length)
        self.prompt(other, count, count % 2)
        self.remember(other, 0)

    @rule(first=slots, left=st.sampled_from((0, 0, 1, 2)))
    def exhaust(self, first: int, left: int) -> None:
        """Rows for one slot after the other until next to no cell is free."""
        for at in range(SLOTS):
            slot = (first + at) % SLOTS
            count = min(self.ledger.free - left, self.ledger.capacity - self.cache.length(slot))
            if count > 0:
                self.feed([(slot, count, 0)], fails=False)

    def compute(self, asked: list[Span], fresh: list[list[Entry]], dropped: dict[int, int], fails: bool) -> None:
        tokens = [entry.token for entries in fresh for entry in entries]
        serials = [entry.serial for entries in fresh for entry in entries]
        with self.cache.forward(asked) as forward:
            self.check_segments(forward, asked)
            write(forward, self.layers, tokens, serials)
            for span in asked:
                if span.slot in dropped:
                    forward.keep(span.slot, max(span.start, span.stop - dropped[span.slot]))
            if fails:
                raise Boom

    def check_segments(self, forward, asked: list[Span]) -> None:
        assert sum(span.length for span in asked) == forward.rows
        for layer in range(len(self.layers)):
            group, _ = self.cache.home(layer)
            row = 0
            for span, segment in zip(asked, forward.segments(layer), strict=True):
                cells = np.arange(group.pool.references.size)[as_index(segment.cells)]
                assert (slice(row, row + span.length), span.start) == (segment.rows, segment.start)
                assert group.table(span.slot).tolist() == cells.tolist()
                assert (group.pool.references[cells[span.start :]] == 1).all(), "a new row goes to a shared cell"
                row += span.length

    @rule(source=slots, other=slots, length=lengths)
    def copy_prefix(self, source: int, other: int, length: int) -> None:
        self.count("copy onto itself" if source == other else "copy")
        expected = self.ledger.copy_prefix(source, other, length)
        assert expected == self.cache.copy_prefix(source, other, length)

    @rule(slot=slots, less=st.sampled_from((-2, 0, 1, 1, 2, 3, 5, 18)))
    def rewind(self, slot: int, less: int) -> None:
        length = max(0, self.cache.length(slot) - less)
        expected = self.ledger.rewind(slot, length)
        if length == 0:
            self.count("clear")
            self.cache.clear(slot)
        else:
            self.count("rewind")
            assert expected == self.cache.rewind(slot, length)

    @rule(slot=slots, keep=st.integers(0, 15), drop=st.integers(0, 15), beyond=st.sampled_from((0,) * 9 + (1,)))
    def shift(self, slot: int, keep: int, drop: int, beyond: int) -> None:
        length = len(self.ledger.slots[slot])
        if length < 2 and not beyond:
            self.prompt(slot, 1 + drop, keep % 2)
            return
        keep %= max(1, length)
        drop = 1 + drop % max(1, length - keep) + beyond
        if keep + drop > len(self.ledger.slots[slot]):
            self.refused(ValueError, lambda: self.cache.shift(slot, keep, drop))
        elif self.ledger.shiftable and not self.ledger.can_shift(slot, keep, drop):
            self.count("shift without cells")
            self.refused(OutOfCells, lambda: self.cache.shift(slot, keep, drop))
        else:
            self.count("shift" if self.ledger.shiftable else "shift refused by the model")
            expected = self.ledger.shift(slot, keep, drop)
            assert expected == self.cache.shift(slot, keep, drop)

    @rule(slot=slots, other=slots, kind=st.integers(0, 25))
    def misuse(self, slot: int, other: int, kind: int) -> None:
        """What no order of operations allows: bad spans, bad slots and lengths, a second user of an open forward."""
        if kind < 7:
            self.refused(BadSpan, lambda: self.cache.forward(self.bad_spans(slot, other, kind)).__enter__())
        elif kind < 13:
            error, act = (
                (IndexError, lambda: self.cache.copy_prefix(slot, SLOTS, 1)),
                (IndexError, lambda: self.cache.copy_prefix(-1, slot, 1)),
                (ValueError, lambda: self.cache.rewind(slot, -1)),
                (ValueError, lambda: self.cache.shift(slot, -1, 1)),
                (ValueError, lambda: self.cache.shift(slot, 0, 0)),
                (ValueError, lambda: self.cache.remember(slot, [0] * (self.cache.length(slot) + 1))),
            )[kind - 7]
            self.refused(error, act)
        elif self.cache.length(slot) < self.ledger.capacity and self.ledger.free:
            self.meddle(slot, other, kind % 7)

    def bad_spans(self, slot: int, other: int, kind: int) -> list[Span]:
        standing = self.cache.length(slot)
        good = Span(other, self.cache.length(other), 1)
        bad = (
            [Span(slot, standing + 1, 1)],
            [Span(slot, standing - 1, 2)],
            [Span(slot, standing, 0)],
            [Span(slot, standing, -1)],
            [Span(slot, standing, self.ledger.capacity - standing + 1)],
            [Span(slot, standing, 1), Span(slot, standing, 1)],
            [],
        )[kind]
        return [good, *bad] if other != slot and bad else bad

    def meddle(self, slot: int, other: int, kind: int) -> None:
        """Everything is refused while a forward is open, and the forward goes on."""
        (entry,) = self.ledger.fresh(1, self.cache.length(slot))
        with self.cache.forward([Span(slot, self.cache.length(slot), 1)]) as forward:
            act: Callable[[], object] = (
                lambda: self.cache.forward([Span(other, self.cache.length(other), 1)]).__enter__(),
                lambda: self.cache.copy_prefix(slot, other, 3),
                lambda: self.cache.rewind(other, 0),
                lambda: self.cache.shift(other, 0, 1),
                lambda: self.cache.recall(other, [1]),
                lambda: self.cache.remember(other, []),
                lambda: self.cache.evict(1),
            )[kind]
            self.refused(CacheError, act)
            write(forward, self.layers, [entry.token], [entry.serial])
        self.ledger.slots[slot].append(entry)

    @rule(slot=slots, less=st.sampled_from((0, 0, 0, 1, 4)))
    def remember(self, slot: int, less: int) -> None:
        self.count("remember")
        length = max(0, len(self.ledger.slots[slot]) - less)
        self.cache.remember(slot, self.ledger.tokens(slot)[:length])
        self.ledger.remember(slot, length)

    @rule(slot=slots, choice=st.integers(0, 99), less=st.sampled_from((0, 0, 1, 3)), wrong=st.booleans())
    def recall(self, slot: int, choice: int, less: int, wrong: bool) -> None:
        """Ask for something remembered that the slot could become, or its first tokens and a wrong one."""
        held = tuple(self.ledger.tokens(slot))
        known = [path for path in self.ledger.tree if path[: len(held)] == held]
        wanted = known[choice % len(known)] if known else held
        wanted = max(held, wanted[: len(wanted) - less] + (TOKENS,) * wrong, key=len)[: self.ledger.capacity]
        self.count("recall" if len(wanted) > len(held) else "recall of what is there")
        expected = self.ledger.recall(slot, wanted)
        assert expected == self.cache.recall(slot, wanted)

    @rule(wanted=st.integers(0, 20))
    def evict(self, wanted: int) -> None:
        """What is forgotten are ends; what comes free is what is said, and enough if there is enough."""
        self.count("evict")
        free, idle = self.ledger.free, self.ledger.idle
        freed = self.cache.evict(wanted)
        left = remembered(self.cache)
        assert all(path[:-1] in left for path in left if path[:-1])
        self.ledger.tree = {path: entry for path, entry in self.ledger.tree.items() if path in left}
        assert left == set(self.ledger.tree)
        assert freed == self.ledger.free - free
        assert freed >= min(wanted, idle)

    def refused(self, error: type[Exception], act: Callable[[], object]) -> None:
        self.count(f"refused with {error.__name__}")
        before = fingerprint(self.cache)
        with pytest.raises(error):
            act()
        assert before == fingerprint(self.cache)

    @invariant()
    def reads_as_its_ledger(self) -> None:
        held = self.ledger.slots
        assert [len(entries) for entries in held] == [self.cache.length(slot) for slot in range(SLOTS)]
        tokens = np.array([entry.token for entries in held for entry in entries], dtype=np.int64)
        serials = np.array([entry.serial for entries in held for entry in entries], dtype=np.int64)
        positions = np.array([position for entries in held for position in range(len(entries))], dtype=np.int64)
        for index, layer in enumerate(self.layers):
            group, own = self.cache.home(index)
            cells = np.concatenate([group.table(slot) for slot in range(SLOTS)])
            keys, values = (pool[own].numpy()[:, cells] for pool in (group.pool.keys, group.pool.values))
            assert np.abs(self.expected_keys[index][:, positions, tokens] - keys).max(initial=0) < 1e-9
            assert (value_rows(layer, tokens, serials) == values).all()

    @invariant()
    def counts_what_it_owns(self) -> None:
        atoms = [entry.atom for entry in self.ledger.owned()]
        assert self.ledger.free == self.cache.free_cells
        assert self.ledger.idle == self.cache.idle_cells()
        paths = tree_cells(self.cache)
        for index, group in enumerate(self.cache.groups):
            tables = [group.table(slot) for slot in range(SLOTS)]
            held = np.array([paths[path][index] for path in self.ledger.tree], dtype=np.int64)
            cells = np.concatenate((*tables, held))
            owners = np.bincount(cells, minlength=group.pool.references.size)
            assert (owners == group.pool.references).all()
            assert int((owners == 0).sum()) == group.pool.free
            assert len(set(atoms)) == len(set(cells.tolist())) == len(set(zip(atoms, cells.tolist(), strict=True)))
            assert [len(table) for table in tables] == [len(set(table.tolist())) for table in tables]

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for slot in range(SLOTS):
            self.cache.clear(slot)
        self.cache.evict(self.ledger.cells)
        for group in self.cache.groups:
            assert not group.pool.references.any()
            assert self.ledger.cells == group.pool.free

    def count(self, operation: str) -> None:
        self.tally[operation] += 1


def as_index(cells: slice | torch.Tensor) -> slice | np.ndarray:
    """Cells of a segment as numpy takes them."""
    return cells if isinstance(cells, slice) else cells.numpy()


def tree_cells(cache: Cache) -> dict[tuple[int, ...], list[int]]:
    """What the prefix tree holds: under all tokens up to a position, the cell of each group."""
    found: dict[tuple[int, ...], list[int]] = {}
    open_nodes = [((), root) for root in cache._tree._roots.values()]
    while open_nodes:
        before, node = open_nodes.pop()
        for at in range(len(node.tokens)):
            found[(*before, *node.tokens[: at + 1].tolist())] = [int(held[at]) for held in node.held]
        open_nodes += [((*before, *node.tokens.tolist()), child) for child in node.children.values()]
    return found


def remembered(cache: Cache) -> set[tuple[int, ...]]:
    """Everything that the prefix tree could recall."""
    return set(tree_cells(cache))


def fingerprint(cache: Cache) -> list[object]:
    """Everything that a refused operation must not change."""
    return [
        (
            [(group.length(slot), group.table(slot).tobytes()) for slot in range(cache.slots)],
            group.pool.references.tobytes(),
            group.pool.free,
            group.pool.keys.numpy().tobytes(),
            group.pool.values.numpy().tobytes(),
        )
        for group in cache.groups
    ] + [tree_cells(cache)]


def run(examples: int, steps: int, *, derandomize: bool, shrink: bool = True) -> Counter[str]:
    """Play that many histories and count the operations; a failing one is made small unless time matters more."""
    tally: Counter[str] = Counter()
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: Laws(tally), settings=profile)
    return tally


def test_any_order_of_operations_reads_like_plain_lists() -> None:
    """Ten thousand random operations leave every slot as its list and every cell with its owners."""
    tally = run(240, 60, derandomize=True)

    assert 10_000 <= tally.total()
    kinds = ("feed", "copy", "rewind", "clear", "shift", "remember", "recall", "evict", "refused with OutOfCells")
    assert 200 <= min(tally[kind] for kind in kinds)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_order_of_operations_reads_like_plain_lists_at_length() -> None:
    """The same law, over 10^5 operations in an order never played before."""
    tally = run(2200, 60, derandomize=False)

    assert 100_000 <= tally.total()
