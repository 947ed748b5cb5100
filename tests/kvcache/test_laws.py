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
from tests.kvcache.cache_view import (
    EntriesByCell,
    as_index,
    cached_paths,
    entries_by_cell,
    fingerprint,
    group_index,
    tree_cells,
)
from tests.kvcache.reference import Entry, ReferenceCache, oldest
from tests.kvcache.token_rows import SHIFTABLE, TOKENS, UNSHIFTABLE, WINDOWED, key_rows, value_rows, write

SLOTS = 4
slots = st.integers(0, SLOTS - 1)
lengths = st.integers(0, 18)
spans = st.lists(
    st.tuples(slots, st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=3, unique_by=lambda span: span[0]
)


class ForwardFailure(Exception):
    """Raised inside a forward."""


class Laws(RuleBasedStateMachine):
    """Operations on a cache and on its reference."""

    def __init__(self, counts: Counter[str], device: str) -> None:
        super().__init__()
        self.counts, self.device = counts, device

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
            layers,
            slots=SLOTS,
            capacity=capacity,
            cells=cells,
            max_batch_tokens=rows,
            dtype=torch.float64,
            device=self.device,
        )
        pools = {group.spec.attention_range: group.pool.cells for group in self.cache.groups}
        self.reference = ReferenceCache(SLOTS, capacity, pools, shiftable=layers not in UNSHIFTABLE)
        self.expected_keys = [
            np.stack([key_rows(layer, range(TOKENS), [position] * TOKENS) for position in range(capacity)], axis=1)
            for layer in layers
        ]

    @rule(plan=spans, fails=st.sampled_from((False, False, False, True)), variant=st.integers(0, 1))
    def feed(self, plan: list[tuple[int, int, int]], fails: bool, variant: int = 0) -> None:
        """Tokens for several slots; the last tokens of a span may be rejected, and a failure rejects all."""
        rows = [
            (slot, min(count, self.reference.capacity - self.cache.cached_length(slot)), dropped)
            for slot, count, dropped in plan
            if self.cache.cached_length(slot) < self.reference.capacity
        ]
        asked = [Span(slot, self.cache.cached_length(slot), count) for slot, count, _ in rows]
        if not asked:
            return
        if self.reference.missing_cells({span.slot: span.length for span in asked}):
            self.refused(OutOfCells, lambda: self.cache.forward(asked).__enter__())
            return
        new_entries = [self.reference.new_entries(span.length, span.start, variant) for span in asked]
        try:
            self.compute(asked, new_entries, {slot: dropped for slot, _, dropped in rows if dropped}, fails)
            self.count("feed")
            kept = {slot: count - min(dropped, count) for slot, count, dropped in rows}
        except ForwardFailure:
            self.count("failed feed")
            kept = {slot: 0 for slot, _, _ in rows}
        for span, entries in zip(asked, new_entries, strict=True):
            self.reference.append(span.slot, entries[: kept[span.slot]])

    @rule(slot=slots, count=st.integers(1, 16), variant=st.integers(0, 1))
    def prompt(self, slot: int, count: int, variant: int) -> None:
        """Tokens for one slot, all kept."""
        self.feed([(slot, count, 0)], fails=False, variant=variant)

    @rule(slot=slots, other=slots, length=lengths, count=st.integers(1, 6))
    def fork(self, slot: int, other: int, length: int, count: int) -> None:
        """Insert a slot's text, and that of another slot that diverges in the middle of it."""
        self.insert(slot, 0)
        self.copy_prefix(slot, other, length)
        self.prompt(other, count, count % 2)
        self.insert(other, 0)

    @rule(first=slots, left=st.sampled_from((0, 0, 1, 2)))
    def exhaust(self, first: int, left: int) -> None:
        """Tokens for one slot after the other until almost no cell is free."""
        for at in range(SLOTS):
            slot = (first + at) % SLOTS
            count = self.reference.capacity - self.cache.cached_length(slot)
            count = next(
                (rows for rows in range(count, 0, -1) if not self.reference.missing_cells({slot: rows + left})), 0
            )
            if count:
                self.feed([(slot, count, 0)], fails=False)

    def compute(self, asked: list[Span], new_entries: list[list[Entry]], dropped: dict[int, int], fails: bool) -> None:
        tokens = [entry.token for entries in new_entries for entry in entries]
        serials = [entry.serial for entries in new_entries for entry in entries]
        with self.cache.forward(asked) as forward:
            self.check_segments(forward, asked)
            write(forward, self.layers, tokens, serials)
            for span in asked:
                if span.slot in dropped:
                    forward.keep(span.slot, max(span.start, span.stop - dropped[span.slot]))
            if fails:
                raise ForwardFailure

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
                assert HOLE not in cells, "a token attends to a hole"
                assert (group.pool.reference_counts[cells[-span.length :]] == 1).all(), "a new token has a shared cell"
                row += span.length

    @rule(source=slots, other=slots, length=lengths)
    def copy_prefix(self, source: int, other: int, length: int) -> None:
        self.count("copy onto itself" if source == other else "copy")
        expected = self.reference.copy_prefix(source, other, length)
        assert expected == self.cache.copy_prefix(source, other, length)

    @rule(slot=slots, less=st.sampled_from((-2, 0, 1, 1, 2, 3, 5, 18)))
    def rewind(self, slot: int, less: int) -> None:
        length = max(0, self.cache.cached_length(slot) - less)
        expected = self.reference.rewind(slot, length)
        if length == 0:
            self.count("clear")
            self.cache.clear(slot)
        else:
            self.count("rewind")
            assert expected == self.cache.rewind(slot, length)

    @rule(slot=slots, keep=st.integers(0, 15), drop=st.integers(0, 15), beyond=st.sampled_from((0,) * 9 + (1,)))
    def shift(self, slot: int, keep: int, drop: int, beyond: int) -> None:
        length = len(self.reference.texts[slot])
        if length < 2 and not beyond:
            self.prompt(slot, 1 + drop, keep % 2)
            return
        keep %= max(1, length)
        drop = 1 + drop % max(1, length - keep) + beyond
        if keep + drop > length:
            self.refused(ValueError, lambda: self.cache.shift(slot, keep, drop))
        elif self.reference.can_shift(slot, keep, drop) and self.reference.shift_runs_out(slot, keep, drop):
            self.shift_with_eviction(slot, keep, drop)
        else:
            can_move = self.reference.can_shift(slot, keep, drop)
            self.count(
                "shift" if can_move else f"shift refused by the {'window' if self.reference.shiftable else 'model'}"
            )
            expected = self.reference.shift(slot, keep, drop)
            assert expected == self.cache.shift(slot, keep, drop)

    def shift_with_eviction(self, slot: int, keep: int, drop: int) -> None:
        """Cached prefixes are evicted for private copies; if that is not enough, no slot has changed."""
        cell_entries, cached_length = entries_by_cell(self.cache, self.reference), -1
        with suppress(OutOfCells):
            cached_length = self.cache.shift(slot, keep, drop)
        self.reference.release_out_of_reach()
        self.apply_eviction(cell_entries)
        assert (cached_length < 0) == self.reference.shift_runs_out(slot, keep, drop)
        self.count("shift out of cells" if cached_length < 0 else "shift with eviction")
        if cached_length >= 0:
            assert cached_length == self.reference.shift(slot, keep, drop)

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
        elif self.cache.cached_length(slot) < self.reference.capacity and not self.reference.missing_cells({slot: 1}):
            self.use_while_open(slot, other, kind % 7)

    def bad_spans(self, slot: int, other: int, kind: int) -> list[Span]:
        cached_length = self.cache.cached_length(slot)
        good = Span(other, self.cache.cached_length(other), 1)
        bad = (
            [Span(slot, cached_length + 1, 1)],
            [Span(slot, cached_length - 1, 2)],
            [Span(slot, cached_length, 0)],
            [Span(slot, cached_length, -1)],
            [Span(slot, cached_length, self.reference.capacity - cached_length + 1)],
            [Span(slot, cached_length, 1), Span(slot, cached_length, 1)],
            [],
        )[kind]
        return [good, *bad] if other != slot and bad else bad

    def use_while_open(self, slot: int, other: int, kind: int) -> None:
        """Every operation is refused while a forward is open, and the forward goes on."""
        (entry,) = self.reference.new_entries(1, self.cache.cached_length(slot))
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
        self.reference.append(slot, [entry])

    @rule(slot=slots, less=st.sampled_from((0, 0, 0, 1, 4)), checkpoint=st.booleans())
    def insert(self, slot: int, less: int, checkpoint: bool = False) -> None:
        """The tree has its old content or the slot's, and can resume at a checkpoint where the slot can."""
        self.count("insert")
        text = self.reference.texts[slot]
        tokens = text[: max(0, len(text) - less)]
        cell_entries = entries_by_cell(self.cache, self.reference)
        self.cache.insert_prefix(slot, tokens, checkpoint=checkpoint)
        left = tree_cells(self.cache)
        for reach, store in self.reference.stores.items():
            own = {tuple(text[: at + 1]): entry for at, entry in enumerate(store.slots[slot][: len(tokens)])}
            tree = {
                path: cell_entries[reach].get(cells[group_index(self.cache, reach)]) for path, cells in left.items()
            }
            assert set(tree) == set(store.tree) | set(own)
            assert all(entry in (store.tree.get(path), own.get(path)) for path, entry in tree.items())
            assert all(tree[path] == own[path] for path in set(own) - set(store.tree))
            store.tree = tree
        if checkpoint and self.reference.resume_length(slot, len(tokens)) == len(tokens):
            for reach, store in self.reference.stores.items():
                entries = [store.tree[tuple(text[: at + 1])] for at in range(len(tokens))]
                assert store.can_resume(entries, len(tokens)), f"{reach} lost content that the slot has"

    @rule(slot=slots, choice=st.integers(0, 99), less=st.sampled_from((0, 0, 1, 3)), wrong=st.booleans())
    def reuse(self, slot: int, choice: int, less: int, wrong: bool) -> None:
        """Reuse a cached text that continues the slot, or its prefix and a wrong token."""
        held = tuple(self.reference.texts[slot])
        paths = [path for path in cached_paths(self.cache) if path[: len(held)] == held]
        goal = sorted(paths)[choice % len(paths)] if paths else held
        goal = max(held, goal[: len(goal) - less] + (TOKENS,) * wrong, key=len)[: self.reference.capacity]
        self.count("reuse" if len(goal) > len(held) else "reuse of the slot's own text")
        expected = self.reference.reuse(slot, goal)
        assert expected == self.cache.reuse_prefix(slot, goal)

    @rule(goal=st.integers(0, 20))
    def evict(self, goal: int) -> None:
        """The returned number of cells comes free, and enough if there are enough."""
        self.count("evict")
        free, evictable = self.cache.free_cells, self.cache.evictable_cells()
        cell_entries = entries_by_cell(self.cache, self.reference)
        freed = self.cache.evict(goal)
        self.apply_eviction(cell_entries)
        assert freed == self.cache.free_cells - free
        assert freed >= min(goal, evictable)

    @rule(plan=spans)
    def evict_for(self, plan: list[tuple[int, int, int]]) -> None:
        """Spans fit if the answer is 0; else they would not fit with an empty prefix tree either."""
        rows = {slot: min(count, self.reference.capacity - self.cache.cached_length(slot)) for slot, count, _ in plan}
        rows = {slot: count for slot, count in rows.items() if count}
        if not rows:
            return
        missing_before, cell_entries = self.reference.missing_cells(rows), entries_by_cell(self.cache, self.reference)
        left = self.cache.evict_for([Span(slot, self.cache.cached_length(slot), count) for slot, count in rows.items()])
        if missing_before:
            self.reference.release_out_of_reach()
        self.apply_eviction(cell_entries)
        self.count("evicted enough" if missing_before and not left else "still missing" if left else "enough free")
        assert left == self.reference.missing_cells(rows)
        if left:
            for store in self.reference.stores.values():
                store.tree = {}
            assert left == self.reference.missing_cells(rows)
            self.cache.reset_prefix_cache()

    def apply_eviction(self, cell_entries: EntriesByCell) -> None:
        """Apply an eviction of the tree to the reference: leaves, or cells not visible from node ends."""
        left = tree_cells(self.cache)
        assert all(path[:-1] in left for path in left if path[:-1])
        for reach, store in self.reference.stores.items():
            tree = {
                path: cell_entries[reach].get(cells[group_index(self.cache, reach)]) for path, cells in left.items()
            }
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
        texts, stores = self.reference.texts, self.reference.stores
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
            expected = np.concatenate([np.array(text, dtype=np.int64) for text in texts])[there]
            assert tokens.tolist() == expected.tolist()
            keys, values = (
                buffer.rows[own].cpu().numpy()[:, cells[there]] for buffer in (group.pool.keys, group.pool.values)
            )
            assert np.abs(self.expected_keys[index][:, positions[there], tokens] - keys).max(initial=0) < 1e-9
            assert (value_rows(layer, tokens, serials) == values).all()

    @invariant()
    def counts_what_it_owns(self) -> None:
        whole = [store for reach, store in self.reference.stores.items() if reach.kind == "full"]
        assert [store.free for store in whole] == [self.cache.free_cells] * len(whole)
        assert [store.evictable for store in whole] == [self.cache.evictable_cells()] * len(whole)
        paths = tree_cells(self.cache)
        for index, group in enumerate(self.cache.groups):
            store = self.reference.stores[group.spec.attention_range]
            atoms = [entry.atom for entry in store.entries()]
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
        self.counts[operation] += 1


def run(examples: int, steps: int, *, derandomize: bool, device: str = "cpu") -> Counter[str]:
    """Run histories and count the operations."""
    counts: Counter[str] = Counter()
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        deadline=None,
        phases=[phase for phase in (Phase.generate, Phase.shrink) if phase in settings.default.phases],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: Laws(counts, device), settings=profile)
    return counts


def test_any_order_of_operations_equals_plain_lists(device: str) -> None:
    """The counts are random: hundreds of the important operations, so at least tens."""
    counts = run(90, 45, derandomize=True, device=device)

    assert 3_000 <= counts.total()
    assert 30 <= min(counts[kind] for kind in ("feed", "copy", "rewind", "clear", "insert", "reuse", "evict"))
    assert 30 <= counts["refused with OutOfCells"]
    assert 1 <= min(counts[kind] for kind in ("shift", "shift refused by the window", "evicted enough"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_operations_equal_plain_lists() -> None:
    """10^5 operations with a new seed."""
    counts = run(2200, 60, derandomize=False)

    assert 100_000 <= counts.total()
