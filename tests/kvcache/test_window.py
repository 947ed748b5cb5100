"""Layers with a window or chunk hold no more than the visible cells, without effect on any output."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from kvcache.attention_group import HOLE, AttentionGroup
from kvcache.cache import Cache
from kvcache.cell_pool import CellArray
from kvcache.errors import OutOfCells
from kvcache.spec import AttentionRange, Span
from tests.kvcache import attention_model as model
from tests.kvcache.token_rows import CHUNKED, HALF, NEGATIVE_WINDOW, NO_POSITION, WINDOWED, feed, read

FULL, WINDOW, CHUNK = AttentionRange(), AttentionRange("window", 4), AttentionRange("chunk", 4)
MIXED = (WINDOW, FULL, CHUNK, AttentionRange("window", 1), AttentionRange("window", 7))
TEXT = [at * 7 % 11 for at in range(24)]
CAPACITY = 40
WIDE = (HALF, NEGATIVE_WINDOW)


def make(*reaches: AttentionRange, slots: int = 3, cells: int = 120, rows: int | None = None) -> Cache:
    """A cache for the model of tests/kvcache/attention_model.py."""
    layers = [model.layer(reach) for reach in reaches]
    return Cache(layers, slots=slots, capacity=CAPACITY, cells=cells, max_batch_tokens=rows, dtype=torch.float64)


def alone(reaches: Sequence[AttentionRange], text: Sequence[int]) -> list[float]:
    """The outputs of a text computed at once in a cache of its own."""
    return model.run(make(*reaches), reaches, 0, text).tolist()


def slow(cache: Cache, reaches: Sequence[AttentionRange], text: Sequence[int] = TEXT, slot: int = 0) -> None:
    """Compute a text token by token, so that every token releases cells."""
    for token in text:
        model.run(cache, reaches, slot, [token])


def there(group: AttentionGroup, slot: int) -> list[int]:
    """The positions of a slot that have cells."""
    return np.flatnonzero(group.table(slot) != HOLE).tolist()


def positions(cells: CellArray) -> list[int]:
    """The indices without holes."""
    return np.flatnonzero(cells != HOLE).tolist()


@pytest.mark.parametrize("reach", [WINDOW, CHUNK, AttentionRange("window", 1), AttentionRange("chunk", 1)])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9])
def test_a_long_sequence_uses_the_cells_of_one_window(reach: AttentionRange, rows: int) -> None:
    cache = make(reach)
    for start in range(0, CAPACITY - rows, rows):
        model.run(cache, [reach], 0, [1] * rows)
        first = max(start - reach.size + 1, 0) if reach.kind == "window" else start - start % reach.size

        assert list(range(first, start + rows)) == there(cache.groups[0], 0)
        assert start + rows - first == cache.groups[0].pool.cells - cache.groups[0].pool.free_cells


def test_a_resume_copies_nothing() -> None:
    cache = make(*MIXED)
    slow(cache, MIXED)
    cache.insert_prefix(0, TEXT)
    cache.clear(0)
    before = [(group.pool.free_cells, group.pool.values.tensors["rows"].clone()) for group in cache.groups]

    assert 24 == cache.reuse_prefix(1, [*TEXT, 99])
    for group, (free, rows) in zip(cache.groups, before, strict=True):
        assert free == group.pool.free_cells
        assert torch.equal(rows, group.pool.values.tensors["rows"])


@pytest.mark.parametrize("reach", [WINDOW, CHUNK, AttentionRange("window", 1)])
def test_a_reused_prefix_replaces_the_slots_old_text(reach: AttentionRange) -> None:
    cache = make(reach)
    model.run(cache, [reach], 0, TEXT)
    cache.insert_prefix(0, TEXT)
    slow(cache, [reach], TEXT[:20], slot=1)
    cache.clear(1)
    assert 24 == cache.reuse_prefix(1, TEXT)
    model.run(cache, [reach], 1, [1])

    assert list(range(reach.oldest_visible(24), 25)) == there(cache.groups[0], 1)


@pytest.mark.parametrize("parts", [(24,), (5, 7, 1, 1, 10), (1,) * 24])
def test_a_resume_anywhere_equals_computing_all(parts: tuple[int, ...]) -> None:
    expected, cache = alone(MIXED, TEXT), make(*MIXED)
    for stop, rows in zip(itertools.accumulate(parts), parts, strict=True):
        model.run(cache, MIXED, 0, TEXT[stop - rows : stop])
        cache.insert_prefix(0, TEXT[:stop])
    cache.clear(0)
    for length in range(24):
        assert length == cache.reuse_prefix(1, TEXT[:length])
        assert model.run(cache, MIXED, 1, TEXT[length:]).tolist() == pytest.approx(expected[length:], abs=1e-12)
        cache.clear(1)


@pytest.mark.parametrize(
    ("reach", "cached_length"),
    [
        (WINDOW, [0] * 23 + [23, 24]),
        (AttentionRange("window", 2), [0] * 23 + [23, 24]),
        (AttentionRange("window", 1), list(range(25))),
        (CHUNK, [at - at % 4 for at in range(20)] + [20, 21, 22, 23, 24]),
    ],
)
def test_a_released_tail_lowers_the_reused_length(reach: AttentionRange, cached_length: list[int]) -> None:
    cache = make(FULL, reach)
    slow(cache, [FULL, reach])
    cache.insert_prefix(0, TEXT)

    assert cached_length == [cache.reuse_prefix(1, TEXT[:length]) + 0 * cache.rewind(1, 0) for length in range(25)]
    assert cached_length == [cache.copy_prefix(0, 1, length) for length in range(25)]
    assert cached_length == [cache.copy_prefix(0, 1, 24) * 0 + cache.rewind(1, length) for length in range(25)]


def test_a_rewound_slot_continues_with_the_same_output() -> None:
    expected, cache = alone(MIXED, TEXT), make(*MIXED)
    for start in range(0, 24, 6):
        model.run(cache, MIXED, 0, TEXT[start : start + 6])
    for length in range(24):
        copied = cache.copy_prefix(0, 1, length)
        copy = model.run(cache, MIXED, 1, TEXT[copied:]).tolist()
        cache.copy_prefix(0, 2, 24)
        rewound = cache.rewind(2, length)
        rest = model.run(cache, MIXED, 2, TEXT[rewound:]).tolist()

        assert copy == pytest.approx(expected[copied:], abs=1e-12)
        assert rest == pytest.approx(expected[rewound:], abs=1e-12)


@pytest.mark.parametrize("kept", range(8))
def test_rejected_tokens_release_no_other_cells(kept: int) -> None:
    expected, cache = alone(MIXED, TEXT), make(*MIXED)
    model.run(cache, MIXED, 0, TEXT[:9])
    model.run(cache, MIXED, 0, TEXT[9:16], keep=9 + kept)

    assert 9 + kept == cache.cached_length(0)
    assert model.run(cache, MIXED, 0, TEXT[9 + kept :]).tolist() == pytest.approx(expected[9 + kept :], abs=1e-12)


def test_a_failed_forward_leaves_the_window() -> None:
    expected, cache = alone(MIXED, TEXT), make(*MIXED)
    model.run(cache, MIXED, 0, TEXT[:15])
    with pytest.raises(RuntimeError, match="boom"), cache.forward([Span(0, 15, 9)]):
        raise RuntimeError("boom")

    assert 15 == cache.cached_length(0)
    assert model.run(cache, MIXED, 0, TEXT[15:]).tolist() == pytest.approx(expected[15:], abs=1e-12)


def test_a_copy_releases_its_own_window() -> None:
    reaches = (FULL, CHUNK)
    cache = make(*reaches)
    model.run(cache, reaches, 1, TEXT[:20])
    cache.insert_prefix(1, TEXT[:20])
    slow(cache, reaches, TEXT[:20])
    assert 8 == cache.copy_prefix(0, 2, 8)
    assert 20 == cache.reuse_prefix(2, TEXT[:20])
    model.run(cache, reaches, 2, [1])

    assert [20] == there(cache.groups[1], 2)


def test_check_append_counts_released_cells() -> None:
    cache = make(FULL, WINDOW, slots=1, rows=2)
    model.run(cache, [FULL, WINDOW], 0, TEXT[:10])
    assert [110, 0] == [group.pool.free_cells for group in cache.groups]
    with pytest.raises(OutOfCells) as refusal:
        model.run(cache, [FULL, WINDOW], 0, [1] * 8)

    assert (8, 7) == (refusal.value.needed, refusal.value.free)
    assert list(range(10)) == there(cache.groups[1], 0)
    model.run(cache, [FULL, WINDOW], 0, [1] * 7)
    assert list(range(7, 17)) == there(cache.groups[1], 0)


def test_a_shared_window_is_free_after_the_last_release() -> None:
    cache = make(WINDOW, slots=2, rows=2)
    model.run(cache, [WINDOW], 0, TEXT[:12])
    cache.copy_prefix(0, 1, 12)
    assert 4 == cache.groups[0].pool.free_cells
    with pytest.raises(OutOfCells), cache.forward([Span(0, 12, 5)]):
        pass
    with pytest.raises(OutOfCells), cache.forward([Span(0, 12, 7), Span(1, 12, 7)]):
        pass
    with cache.forward([Span(0, 12, 6), Span(1, 12, 7)]):
        pass

    assert 0 == cache.groups[0].pool.free_cells


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("reach", [WINDOW, CHUNK, AttentionRange("window", 1)])
def test_one_sequence_always_fits(reach: AttentionRange, rows: int) -> None:
    cache = make(reach, FULL, slots=2, cells=2 * CAPACITY, rows=rows)
    for first in range(4):
        text = [first, *TEXT, *TEXT][: CAPACITY - 1]
        for start in range(0, len(text), rows):
            part = text[start : start + rows]
            assert 0 == cache.evict_for([Span(0, start, len(part))])
            model.run(cache, [reach, FULL], 0, part)
            cache.insert_prefix(0, text[: start + len(part)], checkpoint=bool(start % 2))
        cache.clear(0)


def test_a_full_window_pool_is_evicted() -> None:
    cache = make(FULL, WINDOW, slots=1, rows=6)
    assert 18 == cache.groups[1].pool.cells
    for first in (1, 2):
        text = [first, *TEXT[:7]]
        model.run(cache, [FULL, WINDOW], 0, text)
        cache.insert_prefix(0, text)
        cache.clear(0)

    assert 2 == cache.groups[1].pool.free_cells
    assert 0 == cache.evict_for([Span(0, 0, 6)])
    assert [8, 8] == [cache.reuse_prefix(0, [first, *TEXT[:7], 99]) + 0 * cache.rewind(0, 0) for first in (1, 2)]


def test_a_window_shifts_if_its_new_end_sees_moved_tokens_only() -> None:
    """Of 20 tokens with a window of 4, all but the last 3 and the kept ones can be dropped."""
    cache = Cache(WIDE, slots=2, capacity=CAPACITY, cells=80, dtype=torch.float64)
    for token in TEXT[:20]:
        feed(cache, WIDE, 0, [token])
    cache.copy_prefix(0, 1, 20)

    assert 5 == cache.shift(0, 2, 15)
    assert [*TEXT[:2], *TEXT[17:20]] == read(cache, WIDE, 0)
    assert 0 == cache.shift(1, 2, 16)


def shifted_lengths(*parts: int) -> Iterator[int]:
    """The length after every possible shift of a slot of 12 tokens computed in chunks of `parts`."""
    for keep in range(12):
        for drop in range(1, 13 - keep):
            cache = Cache(WIDE, slots=1, capacity=CAPACITY, cells=80, dtype=torch.float64)
            for stop, rows in zip(itertools.accumulate(parts), parts, strict=True):
                feed(cache, WIDE, 0, TEXT[stop - rows : stop])
            cached_length = cache.shift(0, keep, drop)
            left = [*TEXT[:keep], *TEXT[keep + drop : 12]]
            assert left[:cached_length] == read(cache, WIDE, 0)
            yield cached_length if cached_length > keep else -1


def test_a_shift_does_not_depend_on_the_chunks() -> None:
    assert list(shifted_lengths(12)) == list(shifted_lengths(*[1] * 12)) == list(shifted_lengths(5, 6, 1))


def test_a_text_shorter_than_the_window_shifts() -> None:
    for length, cached_length in ((3, 2), (4, 1)):
        cache = Cache(WIDE, slots=1, capacity=CAPACITY, cells=80, dtype=torch.float64)
        feed(cache, WIDE, 0, TEXT[:length])

        assert cached_length == cache.shift(0, 1, length - 2)


def test_a_shift_copies_visible_cells_only() -> None:
    cache = Cache(WIDE, slots=2, capacity=CAPACITY, cells=80, dtype=torch.float64)
    feed(cache, WIDE, 0, TEXT[:20])
    cache.copy_prefix(0, 1, 20)
    before = [group.pool.free_cells for group in cache.groups]
    cache.shift(0, 1, 4)

    assert [15, 3] == [free - group.pool.free_cells for free, group in zip(before, cache.groups, strict=True)]
    assert [*TEXT[:1], *TEXT[5:20]] == read(cache, WIDE, 0)
    assert TEXT[:20] == read(cache, WIDE, 1)


def test_a_shift_evicts_from_the_window_pool() -> None:
    cache = Cache(WIDE, slots=4, capacity=CAPACITY, cells=160, max_batch_tokens=1, dtype=torch.float64)
    assert 26 == cache.groups[1].pool.cells
    for slot in (0, 1):
        feed(cache, WIDE, slot, TEXT[:12])
        cache.copy_prefix(slot, slot + 2, 12)
    assert 2 == cache.groups[1].pool.free_cells
    with pytest.raises(OutOfCells) as refusal:
        cache.groups[1].check_shift(0, 1, 4)

    assert (3, 2) == (refusal.value.needed, refusal.value.free)
    assert 8 == cache.shift(0, 1, 4)
    assert [*TEXT[:1], *TEXT[5:12]] == read(cache, WIDE, 0)
    assert TEXT[:12] == read(cache, WIDE, 2)


def test_chunked_layers_do_not_shift() -> None:
    layers = (HALF, CHUNKED)
    cache = Cache(layers, slots=1, capacity=CAPACITY, cells=80, dtype=torch.float64)
    feed(cache, layers, 0, TEXT[:20])

    assert 6 == cache.shift(0, 6, 2)
    assert TEXT[:6] == read(cache, layers, 0)


def test_a_window_beyond_the_capacity_is_full() -> None:
    wide, chunk = (model.layer(AttentionRange(kind, CAPACITY)) for kind in ("window", "chunk"))
    cache = Cache([model.layer(FULL), wide, chunk], slots=1, capacity=CAPACITY, cells=80)
    narrow = Cache(
        [model.layer(FULL), model.layer(AttentionRange("window", CAPACITY - 1))],
        slots=1,
        capacity=CAPACITY,
        cells=80,
    )

    assert [1, 2] == [len(cache.groups), len(narrow.groups)]


@pytest.mark.parametrize(("start", "kept"), [(0, [9, 10, 11]), (5, [4, 5, 6]), (10, [0, 1])])
def test_trimming_keeps_the_cells_visible_from_the_end(start: int, kept: list[int]) -> None:
    """Of a range up to position 12, a window of 4 needs the last three cells, as far as it contains them."""
    cache = make(FULL, WINDOW)
    model.run(cache, [FULL, WINDOW], 0, TEXT[:12])
    whole, window = cache.groups
    held = window.acquire(0, start, 12)
    used = window.pool.reference_counts.sum()

    assert (start < 9, False) == (window.can_trim(held, start), whole.can_trim(whole.acquire(0, 0, 12), 0))
    trimmed_cache = window.trim(held, start)
    assert kept == positions(trimmed_cache)
    assert used - (12 - start - len(kept)) == window.pool.reference_counts.sum()
    assert not window.can_trim(trimmed_cache, start)


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (3, 11), (9, 10), (0, 9)])
def test_saved_ranges_are_loaded_with_their_holes(start: int, stop: int) -> None:
    cache = make(FULL, WINDOW)
    for part in (TEXT[:6], TEXT[6:10], TEXT[10:12]):
        model.run(cache, [FULL, WINDOW], 0, part)
    for group in cache.groups:
        held = group.acquire(0, 0, 12)
        rows = group.pool.values.tensors["rows"]
        expected = rows[0, 0, held[start:stop][held[start:stop] != HOLE], 0].tolist()
        content, free = group.save(held), group.pool.free_cells
        rows.zero_()
        group.check_load(content, start, stop)
        loaded = group.load(content, start, stop)

        assert positions(held[start:stop]) == positions(loaded)
        assert expected == rows[0, 0, loaded[loaded != HOLE], 0].tolist()
        assert free - len(expected) == group.pool.free_cells


def test_a_range_that_does_not_fit_is_not_loaded() -> None:
    cache = make(WINDOW, slots=1, rows=1)
    group = cache.groups[0]
    slow(cache, [WINDOW], TEXT[:6])
    content = group.save(group.acquire(0, 0, 6))
    model.run(cache, [WINDOW], 0, TEXT[6:9])
    assert 1 == group.pool.free_cells
    for act in (group.check_load, group.load):
        with pytest.raises(OutOfCells) as refusal:
            act(content, 0, 6)
        assert (4, 1) == (refusal.value.needed, refusal.value.free)

    assert 1 == group.pool.free_cells
    group.check_load(content, 0, 3)


def test_without_full_attention_old_cells_are_released() -> None:
    cache = Cache(WINDOWED, slots=1, capacity=200, cells=200, max_batch_tokens=1, dtype=torch.float64)
    for at in range(200):
        feed(cache, WINDOWED, 0, [at % 11])

    assert [8, 4, 2] == [group.pool.cells for group in cache.groups]
    assert [-1] * 196 + [at % 11 for at in range(196, 200)] == read(cache, WINDOWED, 0)


def test_all_kinds_of_layers_grow_after_shifts() -> None:
    layers = (NEGATIVE_WINDOW, HALF, NO_POSITION, WINDOWED[1])
    cache = Cache(layers, slots=2, capacity=16, cells=40, dtype=torch.float64)
    held: list[int] = []
    for at in range(50):
        feed(cache, layers, 0, [at % 11])
        held.append(at % 11)
        if at % 9 == 8:
            cache.copy_prefix(0, 1, len(held))
        if len(held) == 16:
            assert 9 == cache.shift(0, 3, 7)
            del held[3:10]

    assert held == read(cache, layers, 0)
