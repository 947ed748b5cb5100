"""Layers that see a window or a chunk keep no more than they see, and nobody notices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from kvcache.attention_group import AttentionGroup
from kvcache.cache import Cache
from kvcache.cell_pool import CellArray
from kvcache.errors import OutOfCells
from kvcache.holes import HOLE
from kvcache.spec import AttentionRange, Span
from tests.kvcache import seer
from tests.kvcache.payload import CHUNKED, HALF, NEGATIVE_WINDOW, NO_POSITION, WINDOWED, feed, read

FULL, WINDOW, CHUNK = AttentionRange(), AttentionRange("window", 4), AttentionRange("chunk", 4)
MIXED = (WINDOW, FULL, CHUNK, AttentionRange("window", 1), AttentionRange("window", 7))
TEXT = [at * 7 % 11 for at in range(24)]
CAPACITY = 40
WIDE = (HALF, NEGATIVE_WINDOW)


def make(*reaches: AttentionRange, slots: int = 3, cells: int = 120, rows: int | None = None) -> Cache:
    """A cache for the model of seer.py."""
    layers = [seer.layer(reach) for reach in reaches]
    return Cache(layers, slots=slots, capacity=CAPACITY, cells=cells, max_batch_tokens=rows, dtype=torch.float64)


def alone(reaches: Sequence[AttentionRange], text: Sequence[int]) -> list[float]:
    """What the rows of a text give when it is computed at once, in a cache of its own."""
    return seer.run(make(*reaches), reaches, 0, text).tolist()


def slow(cache: Cache, reaches: Sequence[AttentionRange], text: Sequence[int] = TEXT, slot: int = 0) -> None:
    """Compute a text row by row, so that every row releases what it does not see."""
    for token in text:
        seer.run(cache, reaches, slot, [token])


def there(group: AttentionGroup, slot: int) -> list[int]:
    """The positions whose cells a slot has."""
    return np.flatnonzero(group.table(slot) != HOLE).tolist()


def positions(cells: CellArray) -> list[int]:
    """Where a stretch has no holes."""
    return np.flatnonzero(cells != HOLE).tolist()


@pytest.mark.parametrize("reach", [WINDOW, CHUNK, AttentionRange("window", 1), AttentionRange("chunk", 1)])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9])
def test_a_sequence_of_many_windows_uses_one(reach: AttentionRange, rows: int) -> None:
    """After each forward a slot has what the forward's first row saw and its rows, and no cell more."""
    cache = make(reach)
    for start in range(0, CAPACITY - rows, rows):
        seer.run(cache, [reach], 0, [1] * rows)
        first = max(start - reach.size + 1, 0) if reach.kind == "window" else start - start % reach.size

        assert list(range(first, start + rows)) == there(cache.groups[0], 0)
        assert start + rows - first == cache.groups[0].pool.cells - cache.groups[0].pool.free_cells


def test_a_resume_copies_nothing() -> None:
    """What is recalled, windows included, is the very cells that were remembered."""
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
def test_a_slot_that_had_another_text_keeps_no_more_of_a_recalled_one(reach: AttentionRange) -> None:
    """What the next row does not see of a recalled text is released, however long the slot's last text was."""
    cache = make(reach)
    seer.run(cache, [reach], 0, TEXT)
    cache.insert_prefix(0, TEXT)
    slow(cache, [reach], TEXT[:20], slot=1)
    cache.clear(1)
    assert 24 == cache.reuse_prefix(1, TEXT)
    seer.run(cache, [reach], 1, [1])

    assert list(range(reach.oldest_visible(24), 25)) == there(cache.groups[0], 1)


@pytest.mark.parametrize("parts", [(24,), (5, 7, 1, 1, 10), (1,) * 24])
def test_a_resume_anywhere_equals_computing_all(parts: tuple[int, ...]) -> None:
    """What was remembered after every forward can be resumed at every position, for a model of all kinds of layers."""
    expected, cache = alone(MIXED, TEXT), make(*MIXED)
    for stop, rows in zip(itertools.accumulate(parts), parts, strict=True):
        seer.run(cache, MIXED, 0, TEXT[stop - rows : stop])
        cache.insert_prefix(0, TEXT[:stop])
    cache.clear(0)
    for length in range(24):
        assert length == cache.reuse_prefix(1, TEXT[:length])
        assert seer.run(cache, MIXED, 1, TEXT[length:]).tolist() == pytest.approx(expected[length:], abs=1e-12)
        cache.clear(1)


@pytest.mark.parametrize(
    ("reach", "standing"),
    [
        (WINDOW, [0] * 23 + [23, 24]),
        (AttentionRange("window", 2), [0] * 23 + [23, 24]),
        (AttentionRange("window", 1), list(range(25))),
        (CHUNK, [at - at % 4 for at in range(20)] + [20, 21, 22, 23, 24]),
    ],
)
def test_where_the_tail_is_gone_the_answer_is_lower(reach: AttentionRange, standing: list[int]) -> None:
    """Of a text that was computed row by row, each resume stands where it sees all: by tree, by copy, by rewind."""
    cache = make(FULL, reach)
    slow(cache, [FULL, reach])
    cache.insert_prefix(0, TEXT)

    assert standing == [cache.reuse_prefix(1, TEXT[:length]) + 0 * cache.rewind(1, 0) for length in range(25)]
    assert standing == [cache.copy_prefix(0, 1, length) for length in range(25)]
    assert standing == [cache.copy_prefix(0, 1, 24) * 0 + cache.rewind(1, length) for length in range(25)]


def test_what_stands_lower_goes_on_as_if_nothing_had_been() -> None:
    """A slot that was copied or rewound to any length says the same from there on."""
    expected, cache = alone(MIXED, TEXT), make(*MIXED)
    for start in range(0, 24, 6):
        seer.run(cache, MIXED, 0, TEXT[start : start + 6])
    for length in range(24):
        copied = cache.copy_prefix(0, 1, length)
        copy = seer.run(cache, MIXED, 1, TEXT[copied:]).tolist()
        cache.copy_prefix(0, 2, 24)
        rewound = cache.rewind(2, length)
        rest = seer.run(cache, MIXED, 2, TEXT[rewound:]).tolist()

        assert copy == pytest.approx(expected[copied:], abs=1e-12)
        assert rest == pytest.approx(expected[rewound:], abs=1e-12)


@pytest.mark.parametrize("kept", range(8))
def test_rows_that_are_given_up_take_nothing_with_them(kept: int) -> None:
    """A forward that keeps part of its rows, or none, across the end of a window stands there and goes on."""
    expected, cache = alone(MIXED, TEXT), make(*MIXED)
    seer.run(cache, MIXED, 0, TEXT[:9])
    seer.run(cache, MIXED, 0, TEXT[9:16], keep=9 + kept)

    assert 9 + kept == cache.cached_length(0)
    assert seer.run(cache, MIXED, 0, TEXT[9 + kept :]).tolist() == pytest.approx(expected[9 + kept :], abs=1e-12)


def test_a_failed_forward_leaves_the_window() -> None:
    """What was released for a forward that failed, no row from its start on sees."""
    expected, cache = alone(MIXED, TEXT), make(*MIXED)
    seer.run(cache, MIXED, 0, TEXT[:15])
    with pytest.raises(RuntimeError, match="boom"), cache.forward([Span(0, 15, 9)]):
        raise RuntimeError("boom")

    assert 15 == cache.cached_length(0)
    assert seer.run(cache, MIXED, 0, TEXT[15:]).tolist() == pytest.approx(expected[15:], abs=1e-12)


def test_a_copy_that_grows_past_its_source_releases_all_the_same() -> None:
    """A copy ends where its source had nothing left; what the tree gives it behind that is released like its own."""
    reaches = (FULL, CHUNK)
    cache = make(*reaches)
    seer.run(cache, reaches, 1, TEXT[:20])
    cache.insert_prefix(1, TEXT[:20])
    slow(cache, reaches, TEXT[:20])
    assert 8 == cache.copy_prefix(0, 2, 8)
    assert 20 == cache.reuse_prefix(2, TEXT[:20])
    seer.run(cache, reaches, 2, [1])

    assert [20] == there(cache.groups[1], 2)


def test_rows_count_on_what_they_release() -> None:
    """A full pool takes as many rows as the slot stops seeing, and not one more."""
    cache = make(FULL, WINDOW, slots=1, rows=2)
    seer.run(cache, [FULL, WINDOW], 0, TEXT[:10])
    assert [110, 0] == [group.pool.free_cells for group in cache.groups]
    with pytest.raises(OutOfCells) as refusal:
        seer.run(cache, [FULL, WINDOW], 0, [1] * 8)

    assert (8, 7) == (refusal.value.needed, refusal.value.free)
    assert list(range(10)) == there(cache.groups[1], 0)
    seer.run(cache, [FULL, WINDOW], 0, [1] * 7)
    assert list(range(7, 17)) == there(cache.groups[1], 0)


def test_a_shared_window_is_free_when_all_have_left_it() -> None:
    """What two slots release in one forward pays for its rows; what one of them still sees does not."""
    cache = make(WINDOW, slots=2, rows=2)
    seer.run(cache, [WINDOW], 0, TEXT[:12])
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
    """Whatever is remembered, of others and of its own, there is room for one sequence's next rows."""
    cache = make(reach, FULL, slots=2, cells=2 * CAPACITY, rows=rows)
    for first in range(4):
        text = [first, *TEXT, *TEXT][: CAPACITY - 1]
        for start in range(0, len(text), rows):
            part = text[start : start + rows]
            assert 0 == cache.evict_for([Span(0, start, len(part))])
            seer.run(cache, [reach, FULL], 0, part)
            cache.insert_prefix(0, text[: start + len(part)], checkpoint=bool(start % 2))
        cache.clear(0)


def test_a_window_without_room_makes_its_own() -> None:
    """When only the window's pool is full, places inside remembered texts go, and their ends stay."""
    cache = make(FULL, WINDOW, slots=1, rows=6)
    assert 18 == cache.groups[1].pool.cells
    for first in (1, 2):
        text = [first, *TEXT[:7]]
        seer.run(cache, [FULL, WINDOW], 0, text)
        cache.insert_prefix(0, text)
        cache.clear(0)

    assert 2 == cache.groups[1].pool.free_cells
    assert 0 == cache.evict_for([Span(0, 0, 6)])
    assert [8, 8] == [cache.reuse_prefix(0, [first, *TEXT[:7], 99]) + 0 * cache.rewind(0, 0) for first in (1, 2)]


def test_a_window_moves_if_its_new_end_sees_only_what_moved() -> None:
    """Of 20 tokens with a window of 4, all but the last 3 and those that are kept can be dropped."""
    cache = Cache(WIDE, slots=2, capacity=CAPACITY, cells=80, dtype=torch.float64)
    for token in TEXT[:20]:
        feed(cache, WIDE, 0, [token])
    cache.copy_prefix(0, 1, 20)

    assert 5 == cache.shift(0, 2, 15)
    assert [*TEXT[:2], *TEXT[17:20]] == read(cache, WIDE, 0)
    assert 0 == cache.shift(1, 2, 16)


def shifts(*parts: int) -> Iterator[int]:
    """Where a slot of 12 tokens stands after each shift there is, if its text was computed in these parts."""
    for keep in range(12):
        for drop in range(1, 13 - keep):
            cache = Cache(WIDE, slots=1, capacity=CAPACITY, cells=80, dtype=torch.float64)
            for stop, rows in zip(itertools.accumulate(parts), parts, strict=True):
                feed(cache, WIDE, 0, TEXT[stop - rows : stop])
            standing = cache.shift(0, keep, drop)
            left = [*TEXT[:keep], *TEXT[keep + drop : 12]]
            assert left[:standing] == read(cache, WIDE, 0)
            yield standing if standing > keep else -1


def test_how_rows_came_does_not_show_in_a_shift() -> None:
    """A text moves or not whatever the spans were that computed it, so that what is said next cannot depend on them."""
    assert list(shifts(12)) == list(shifts(*[1] * 12)) == list(shifts(5, 6, 1))


def test_a_short_text_moves_in_a_window() -> None:
    """Where nothing is out of reach yet, a window moves like full attention; from the next token on it does not."""
    for length, standing in ((3, 2), (4, 1)):
        cache = Cache(WIDE, slots=1, capacity=CAPACITY, cells=80, dtype=torch.float64)
        feed(cache, WIDE, 0, TEXT[:length])

        assert standing == cache.shift(0, 1, length - 2)


def test_a_shift_copies_only_what_is_seen() -> None:
    """Of shared cells, those that the slot's end does not see are released, not copied."""
    cache = Cache(WIDE, slots=2, capacity=CAPACITY, cells=80, dtype=torch.float64)
    feed(cache, WIDE, 0, TEXT[:20])
    cache.copy_prefix(0, 1, 20)
    before = [group.pool.free_cells for group in cache.groups]
    cache.shift(0, 1, 4)

    assert [15, 3] == [free - group.pool.free_cells for free, group in zip(before, cache.groups, strict=True)]
    assert [*TEXT[:1], *TEXT[5:20]] == read(cache, WIDE, 0)
    assert TEXT[:20] == read(cache, WIDE, 1)


def test_a_shift_finds_room_in_the_windows_own_pool() -> None:
    """Private copies of a window are counted in its own pool; they fit once all slots released what they do not see."""
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


def test_chunks_stay_where_they_are() -> None:
    """Chunks are bound to positions: the slot stands at what is kept."""
    layers = (HALF, CHUNKED)
    cache = Cache(layers, slots=1, capacity=CAPACITY, cells=80, dtype=torch.float64)
    feed(cache, layers, 0, TEXT[:20])

    assert 6 == cache.shift(0, 6, 2)
    assert TEXT[:6] == read(cache, layers, 0)


def test_a_reach_beyond_the_capacity_is_full() -> None:
    """Where nothing is ever out of reach, layers share the cells of those that see everything, and can move."""
    wide, chunk = (seer.layer(AttentionRange(kind, CAPACITY)) for kind in ("window", "chunk"))
    cache = Cache([seer.layer(FULL), wide, chunk], slots=1, capacity=CAPACITY, cells=80)
    narrow = Cache(
        [seer.layer(FULL), seer.layer(AttentionRange("window", CAPACITY - 1))], slots=1, capacity=CAPACITY, cells=80
    )

    assert [1, 2] == [len(cache.groups), len(narrow.groups)]


@pytest.mark.parametrize(("start", "kept"), [(0, [9, 10, 11]), (5, [4, 5, 6]), (10, [0, 1])])
def test_thinning_leaves_what_the_end_sees(start: int, kept: list[int]) -> None:
    """Of a stretch up to position 12, a window of 4 needs the last three cells, as far as they are in it."""
    cache = make(FULL, WINDOW)
    seer.run(cache, [FULL, WINDOW], 0, TEXT[:12])
    whole, window = cache.groups
    held = window.acquire(0, start, 12)
    used = window.pool.reference_counts.sum()

    assert (start < 9, False) == (window.can_trim(held, start), whole.can_trim(whole.acquire(0, 0, 12), 0))
    thinned = window.trim(held, start)
    assert kept == positions(thinned)
    assert used - (12 - start - len(kept)) == window.pool.reference_counts.sum()
    assert not window.can_trim(thinned, start)


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (3, 11), (9, 10), (0, 9)])
def test_what_is_saved_comes_back_with_its_holes(start: int, stop: int) -> None:
    """A share of a saved stretch is loaded into cells of its own, and where nothing was saved nothing is."""
    cache = make(FULL, WINDOW)
    for part in (TEXT[:6], TEXT[6:10], TEXT[10:12]):
        seer.run(cache, [FULL, WINDOW], 0, part)
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


def test_what_does_not_fit_is_not_loaded() -> None:
    """A stretch needs a cell a token that it has content of."""
    cache = make(WINDOW, slots=1, rows=1)
    group = cache.groups[0]
    slow(cache, [WINDOW], TEXT[:6])
    content = group.save(group.acquire(0, 0, 6))
    seer.run(cache, [WINDOW], 0, TEXT[6:9])
    assert 1 == group.pool.free_cells
    for act in (group.check_load, group.load):
        with pytest.raises(OutOfCells) as refusal:
            act(content, 0, 6)
        assert (4, 1) == (refusal.value.needed, refusal.value.free)

    assert 1 == group.pool.free_cells
    group.check_load(content, 0, 3)


def test_layers_without_a_full_one_need_no_cell_for_the_past() -> None:
    """A model of windows alone holds texts of any length in the cells of its windows."""
    cache = Cache(WINDOWED, slots=1, capacity=200, cells=200, max_batch_tokens=1, dtype=torch.float64)
    for at in range(200):
        feed(cache, WINDOWED, 0, [at % 11])

    assert [8, 4, 2] == [group.pool.cells for group in cache.groups]
    assert [-1] * 196 + [at % 11 for at in range(196, 200)] == read(cache, WINDOWED, 0)


def test_layers_of_all_kinds_go_on_after_shifts() -> None:
    """A slot shifts again and again while others share its cells, and each key stands where it belongs."""
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
