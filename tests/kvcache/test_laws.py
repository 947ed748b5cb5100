"""Any order of operations against plain lists: after each, every slot equals its list, and no cell leaks.

For caches of several groups, some of which release the cells out of their window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvcache.attention_group import HOLE
from kvcache.cache import Cache
from kvcache.errors import BadSpan, CacheError, OutOfCells
from kvcache.spec import LayerSpec, Span
from tests.kvcache.cache_view import Known, as_index, fingerprint, known_entries, place, remembered, tree_cells
from tests.kvcache.reference import Entry, Ledger, oldest
from tests.kvcache.token_rows import SHIFTABLE, TOKENS, UNSHIFTABLE, WINDOWED, key_rows, value_rows, write

SLOTS = 4
slots = st.integers(0, SLOTS - 1)
lengths = st.integers(0, 18)
spans = st.lists(
    st.tuples(slots, st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=3, unique_by=lambda span: span[0]
)


class Boom(Exception):
    """Raised inside a forward."""


class Laws(RuleBasedStateMachine):
    """Operations on a cache and on its reference."""

    def __init__(self, tally: Counter[str]) -> None:
        super().__init__()
        self.tally = tally

    @initialize(
        layers=st.sampled_from((SHIFTABLE, SHIFTABLE, SHIFTABLE, WINDOWED, *UNSHIFTABLE)),
        capacity=st.sampled_from((6, 16)),
        scarcity=st.sampled_from((0, 4, 16, 40)),
        rows=st.sampled_from((None, 1, 4)),
    )
    def open(self, layers: tuple[LayerSpec, ...], capacity: int, scarcity: int, rows: int | None) -> None:
        cells = max(capacity, SLOTS * capacity - scarcity)
        self.layers = layers
        self.cache = Cache(
            layers, slots=SLOTS, capacity=capacity, cells=cells, max_batch_tokens=rows, dtype=torch.float64
        )
        pools = {group.spec.attention_range: group.pool.cells for group in self.cache.groups}
        self.ledger = Ledger(SLOTS, capacity, pools, shiftable=layers not in UNSHIFTABLE)
        self.expected_keys = [
            np.stack([key_rows(layer, range(TOKENS), [position] * TOKENS) for position in range(capacity)], axis=1)
            for layer in layers
        ]

    @rule(plan=spans, fails=st.sampled_from((False, False, False, True)), variant=st.integers(0, 1))
    def feed(self, plan: list[tuple[int, int, int]], fails: bool, variant: int = 0) -> None:
        """Tokens for several slots; the last tokens of a span may be rejected, and a failure rejects all."""
        rows = [
            (slot, min(count, self.ledger.capacity - self.cache.cached_length(slot)), dropped)
            for slot, count, dropped in plan
            if self.cache.cached_length(slot) < self.ledger.capacity
        ]
        asked = [Span(slot, self.cache.cached_length(slot), count) for slot, count, _ in rows]
        if not asked:
            return
        if self.ledger.load_shortfall({span.slot: span.length for span in asked}):
            self.refused(OutOfCells, lambda: self.cache.forward(asked).__enter__())
            return
        fresh = [self.ledger.fresh(span.length, span.start, variant) for span in asked]
        try:
            self.compute(asked, fresh, {slot: dropped for slot, _, dropped in rows if dropped}, fails)
            self.count("feed")
            kept = {slot: count - min(dropped, count) for slot, count, dropped in rows}
        except Boom:
            self.count("feed that failed")
            kept = {slot: 0 for slot, _, _ in rows}
        for span, entries in zip(asked, fresh, strict=True):
            self.ledger.append(span.slot, entries[: kept[span.slot]])

    @rule(slot=slots, count=st.integers(1, 16), variant=st.integers(0, 1))
    def prompt(self, slot: int, count: int, variant: int) -> None:
        """Tokens for one slot, all kept."""
        self.feed([(slot, count, 0)], fails=False, variant=variant)

    @rule(slot=slots, other=slots, length=lengths, count=st.integers(1, 6))
    def fork(self, slot: int, other: int, length: int, count: int) -> None:
        """Insert a slot's text, and that of another slot that diverges in the middle of it."""
        self.remember(slot, 0)
        self.copy_prefix(slot, other, length)
        self.prompt(other, count, count % 2)
        self.remember(other, 0)

    @rule(first=slots, left=st.sampled_from((0, 0, 1, 2)))
    def exhaust(self, first: int, left: int) -> None:
        """Tokens for one slot after the other until almost no cell is free."""
        for at in range(SLOTS):
            slot = (first + at) % SLOTS
            count = self.ledger.capacity - self.cache.cached_length(slot)
            count = next(
                (rows for rows in range(count, 0, -1) if not self.ledger.load_shortfall({slot: rows + left})), 0
            )
            if count:
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
        assert sum(span.length for span in asked) == forward.batch_tokens
        for layer in range(len(self.layers)):
            group, _ = self.cache.layer_group(layer)
            row = 0
            for span, segment in zip(asked, forward.segments(layer), strict=True):
                cells = np.arange(group.pool.reference_counts.size)[as_index(segment.cells)]
                assert (slice(row, row + span.length), span.start) == (segment.batch_slice, segment.start)
                assert oldest(self.layers[layer].attention_range, span.start) == segment.oldest_visible
                assert group.table(span.slot)[segment.oldest_visible :].tolist() == cells.tolist()
                assert HOLE not in cells, "a row sees what was released"
                assert (group.pool.reference_counts[cells[-span.length :]] == 1).all(), (
                    "a new row goes to a shared cell"
                )
                row += span.length

    @rule(source=slots, other=slots, length=lengths)
    def copy_prefix(self, source: int, other: int, length: int) -> None:
        self.count("copy onto itself" if source == other else "copy")
        expected = self.ledger.copy_prefix(source, other, length)
        assert expected == self.cache.copy_prefix(source, other, length)

    @rule(slot=slots, less=st.sampled_from((-2, 0, 1, 1, 2, 3, 5, 18)))
    def rewind(self, slot: int, less: int) -> None:
        length = max(0, self.cache.cached_length(slot) - less)
        expected = self.ledger.rewind(slot, length)
        if length == 0:
            self.count("clear")
            self.cache.clear(slot)
        else:
            self.count("rewind")
            assert expected == self.cache.rewind(slot, length)

    @rule(slot=slots, keep=st.integers(0, 15), drop=st.integers(0, 15), beyond=st.sampled_from((0,) * 9 + (1,)))
    def shift(self, slot: int, keep: int, drop: int, beyond: int) -> None:
        length = len(self.ledger.texts[slot])
        if length < 2 and not beyond:
            self.prompt(slot, 1 + drop, keep % 2)
            return
        keep %= max(1, length)
        drop = 1 + drop % max(1, length - keep) + beyond
        if keep + drop > length:
            self.refused(ValueError, lambda: self.cache.shift(slot, keep, drop))
        elif self.ledger.shift_invariant(slot, keep, drop) and self.ledger.shift_lacks(slot, keep, drop):
            self.shift_that_lacks(slot, keep, drop)
        else:
            moves = self.ledger.shift_invariant(slot, keep, drop)
            self.count("shift" if moves else f"shift refused by the {'window' if self.ledger.shiftable else 'model'}")
            expected = self.ledger.shift(slot, keep, drop)
            assert expected == self.cache.shift(slot, keep, drop)

    def shift_that_lacks(self, slot: int, keep: int, drop: int) -> None:
        """Cached prefixes are evicted for private copies; if that is not enough, no slot has changed."""
        known, standing = known_entries(self.cache, self.ledger), -1
        with suppress(OutOfCells):
            standing = self.cache.shift(slot, keep, drop)
        self.ledger.release_out_of_reach()
        self.forgotten(known)
        assert (standing < 0) == self.ledger.shift_lacks(slot, keep, drop)
        self.count("shift without cells" if standing < 0 else "shift that made room")
        if standing >= 0:
            assert standing == self.ledger.shift(slot, keep, drop)

    @rule(slot=slots, other=slots, kind=st.integers(0, 25))
    def misuse(self, slot: int, other: int, kind: int) -> None:
        """Invalid calls: bad spans, slots and lengths, and a second user of an open forward."""
        if kind < 7:
            self.refused(BadSpan, lambda: self.cache.forward(self.bad_spans(slot, other, kind)).__enter__())
        elif kind < 13:
            error, act = (
                (IndexError, lambda: self.cache.copy_prefix(slot, SLOTS, 1)),
                (IndexError, lambda: self.cache.copy_prefix(-1, slot, 1)),
                (ValueError, lambda: self.cache.rewind(slot, -1)),
                (ValueError, lambda: self.cache.shift(slot, -1, 1)),
                (ValueError, lambda: self.cache.shift(slot, 0, 0)),
                (ValueError, lambda: self.cache.insert_prefix(slot, [0] * (self.cache.cached_length(slot) + 1))),
            )[kind - 7]
            self.refused(error, act)
        elif self.cache.cached_length(slot) < self.ledger.capacity and not self.ledger.load_shortfall({slot: 1}):
            self.meddle(slot, other, kind % 7)

    def bad_spans(self, slot: int, other: int, kind: int) -> list[Span]:
        standing = self.cache.cached_length(slot)
        good = Span(other, self.cache.cached_length(other), 1)
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
        """Every operation is refused while a forward is open, and the forward goes on."""
        (entry,) = self.ledger.fresh(1, self.cache.cached_length(slot))
        with self.cache.forward([Span(slot, self.cache.cached_length(slot), 1)]) as forward:
            act: Callable[[], object] = (
                lambda: self.cache.forward([Span(other, self.cache.cached_length(other), 1)]).__enter__(),
                lambda: self.cache.copy_prefix(slot, other, 3),
                lambda: self.cache.rewind(other, 0),
                lambda: self.cache.shift(other, 0, 1),
                lambda: self.cache.reuse_prefix(other, [1]),
                lambda: self.cache.insert_prefix(other, []),
                lambda: self.cache.evict(1),
            )[kind]
            self.refused(CacheError, act)
            write(forward, self.layers, [entry.token], [entry.serial])
        self.ledger.append(slot, [entry])

    @rule(slot=slots, less=st.sampled_from((0, 0, 0, 1, 4)), seal=st.booleans())
    def remember(self, slot: int, less: int, seal: bool = False) -> None:
        """The tree has its old content or the slot's, and can resume at a checkpoint where the slot can."""
        self.count("remember")
        text = self.ledger.texts[slot]
        tokens = text[: max(0, len(text) - less)]
        known = known_entries(self.cache, self.ledger)
        self.cache.insert_prefix(slot, tokens, checkpoint=seal)
        left = tree_cells(self.cache)
        for reach, store in self.ledger.stores.items():
            own = {tuple(text[: at + 1]): entry for at, entry in enumerate(store.slots[slot][: len(tokens)])}
            tree = {path: known[reach].get(cells[place(self.cache, reach)]) for path, cells in left.items()}
            assert set(tree) == set(store.tree) | set(own)
            assert all(entry in (store.tree.get(path), own.get(path)) for path, entry in tree.items())
            assert all(tree[path] == own[path] for path in set(own) - set(store.tree))
            store.tree = tree
        if seal and self.ledger.standing(slot, len(tokens)) == len(tokens):
            for reach, store in self.ledger.stores.items():
                entries = [store.tree[tuple(text[: at + 1])] for at in range(len(tokens))]
                assert store.goes_on(entries, len(tokens)), f"{reach} lost what the slot could have given"

    @rule(slot=slots, choice=st.integers(0, 99), less=st.sampled_from((0, 0, 1, 3)), wrong=st.booleans())
    def recall(self, slot: int, choice: int, less: int, wrong: bool) -> None:
        """Reuse a cached text that continues the slot, or its prefix and a wrong token."""
        held = tuple(self.ledger.texts[slot])
        known = [path for path in remembered(self.cache) if path[: len(held)] == held]
        wanted = sorted(known)[choice % len(known)] if known else held
        wanted = max(held, wanted[: len(wanted) - less] + (TOKENS,) * wrong, key=len)[: self.ledger.capacity]
        self.count("recall" if len(wanted) > len(held) else "recall of what is there")
        expected = self.ledger.recall(slot, wanted)
        assert expected == self.cache.reuse_prefix(slot, wanted)

    @rule(wanted=st.integers(0, 20))
    def evict(self, wanted: int) -> None:
        """The returned number of cells comes free, and enough if there are enough."""
        self.count("evict")
        free, idle = self.cache.free_cells, self.cache.evictable_cells()
        known = known_entries(self.cache, self.ledger)
        freed = self.cache.evict(wanted)
        self.forgotten(known)
        assert freed == self.cache.free_cells - free
        assert freed >= min(wanted, idle)

    @rule(plan=spans)
    def make_room(self, plan: list[tuple[int, int, int]]) -> None:
        """Spans fit if the answer is 0; else they would not fit with an empty prefix tree either."""
        rows = {slot: min(count, self.ledger.capacity - self.cache.cached_length(slot)) for slot, count, _ in plan}
        rows = {slot: count for slot, count in rows.items() if count}
        if not rows:
            return
        lacked, known = self.ledger.load_shortfall(rows), known_entries(self.cache, self.ledger)
        left = self.cache.evict_for([Span(slot, self.cache.cached_length(slot), count) for slot, count in rows.items()])
        if lacked:
            self.ledger.release_out_of_reach()
        self.forgotten(known)
        self.count("room made" if lacked and not left else "no room" if left else "room enough")
        assert left == self.ledger.load_shortfall(rows)
        if left:
            for store in self.ledger.stores.values():
                store.tree = {}
            assert left == self.ledger.load_shortfall(rows)
            self.cache.reset_prefix_cache()

    def forgotten(self, known: Known) -> None:
        """Apply an eviction of the tree to the reference: leaves, or cells not visible from node ends."""
        left = tree_cells(self.cache)
        assert all(path[:-1] in left for path in left if path[:-1])
        for reach, store in self.ledger.stores.items():
            tree = {path: known[reach].get(cells[place(self.cache, reach)]) for path, cells in left.items()}
            assert all(entry in (None, store.tree[path]) for path, entry in tree.items())
            store.tree = tree

    def refused(self, error: type[Exception], act: Callable[[], object]) -> None:
        self.count(f"refused with {error.__name__}")
        before = fingerprint(self.cache)
        with pytest.raises(error):
            act()
        assert before == fingerprint(self.cache)

    @invariant()
    def reads_as_its_ledger(self) -> None:
        texts, stores = self.ledger.texts, self.ledger.stores
        assert [len(text) for text in texts] == [self.cache.cached_length(slot) for slot in range(SLOTS)]
        positions = np.array([position for text in texts for position in range(len(text))], dtype=np.int64)
        for index, layer in enumerate(self.layers):
            group, own = self.cache.layer_group(index)
            held = [entry for slot in stores[layer.attention_range].slots for entry in slot]
            there = np.array([entry is not None for entry in held], dtype=np.bool_)
            cells = np.concatenate([group.table(slot) for slot in range(SLOTS)])
            assert (there == (cells != HOLE)).all()
            tokens = np.array([entry.token for entry in held if entry], dtype=np.int64)
            serials = np.array([entry.serial for entry in held if entry], dtype=np.int64)
            assert tokens.tolist() == np.concatenate([np.array(text, dtype=np.int64) for text in texts])[there].tolist()
            keys, values = (plane.rows[own].numpy()[:, cells[there]] for plane in (group.pool.keys, group.pool.values))
            assert np.abs(self.expected_keys[index][:, positions[there], tokens] - keys).max(initial=0) < 1e-9
            assert (value_rows(layer, tokens, serials) == values).all()

    @invariant()
    def counts_what_it_owns(self) -> None:
        whole = [store for reach, store in self.ledger.stores.items() if reach.kind == "full"]
        assert [store.free for store in whole] == [self.cache.free_cells] * len(whole)
        assert [store.idle for store in whole] == [self.cache.evictable_cells()] * len(whole)
        paths = tree_cells(self.cache)
        for index, group in enumerate(self.cache.groups):
            store = self.ledger.stores[group.spec.attention_range]
            atoms = [entry.atom for entry in store.owned()]
            tables = [group.table(slot) for slot in range(SLOTS)]
            held = np.array([paths[path][index] for path in store.tree], dtype=np.int64)
            cells = np.concatenate((*tables, held))
            cells = cells[cells != HOLE]
            owners = np.bincount(cells, minlength=group.pool.reference_counts.size)
            assert (owners == group.pool.reference_counts).all()
            assert int((owners == 0).sum()) == group.pool.free_cells == store.free
            assert len(set(atoms)) == len(set(cells.tolist())) == len(set(zip(atoms, cells.tolist(), strict=True)))
            assert all(len(set(table[table != HOLE])) == np.count_nonzero(table != HOLE) for table in tables)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for slot in range(SLOTS):
            self.cache.clear(slot)
        self.cache.reset_prefix_cache()
        for group in self.cache.groups:
            assert not group.pool.reference_counts.any()
            assert group.pool.cells == group.pool.free_cells

    def count(self, operation: str) -> None:
        self.tally[operation] += 1


def run(examples: int, steps: int, *, derandomize: bool) -> Counter[str]:
    """Run histories and count the operations."""
    tally: Counter[str] = Counter()
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        deadline=None,
        phases=[phase for phase in (Phase.generate, Phase.shrink) if phase in settings.default.phases],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: Laws(tally), settings=profile)
    return tally


def test_any_order_of_operations_equals_plain_lists() -> None:
    """The counts are random: hundreds of the important operations, so at least tens."""
    tally = run(200, 60, derandomize=True)

    assert 5_000 <= tally.total()
    assert 30 <= min(tally[kind] for kind in ("feed", "copy", "rewind", "clear", "remember", "recall", "evict"))
    assert 30 <= tally["refused with OutOfCells"]
    assert 1 <= min(tally[kind] for kind in ("shift", "shift refused by the window", "room made"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_operations_equal_plain_lists() -> None:
    """10^5 operations with a new seed."""
    tally = run(2200, 60, derandomize=False)

    assert 100_000 <= tally.total()
