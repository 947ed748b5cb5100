"""A forward is a transaction: kept and rolled back tokens, and the segments of its layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcache.cache import Cache
from kvcache.errors import BadSpan, CacheError
from kvcache.spec import AttentionRange, Span
from tests.kvcache.token_rows import INTERLEAVED, NEGATIVE_WINDOW, NO_POSITION, SHIFTABLE, feed, read, write


@pytest.fixture
def cache() -> Cache:
    """Three groups, four slots of sixteen tokens."""
    return Cache(SHIFTABLE, slots=4, capacity=16, cells=64, dtype=torch.float64)


def test_rejected_tokens_leave_no_trace(cache: Cache) -> None:
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4])

    with cache.forward([Span(0, 4, 3)]) as forward:
        write(forward, SHIFTABLE, [5, 6, 7], [0, 0, 0])
        forward.keep(0, 4)

    assert [1, 2, 3, 4] == read(cache, SHIFTABLE, 0)
    assert 60 == cache.free_cells


def test_slots_without_keep_keep_all_tokens(cache: Cache) -> None:
    with cache.forward([Span(0, 0, 3), Span(2, 0, 2)]) as forward:
        write(forward, SHIFTABLE, [1, 2, 3, 4, 5], [0] * 5)
        forward.keep(0, 1)

    assert [1] == read(cache, SHIFTABLE, 0)
    assert [4, 5] == read(cache, SHIFTABLE, 2)


def test_the_last_keep_of_a_slot_counts(cache: Cache) -> None:
    with cache.forward([Span(0, 0, 3)]) as forward:
        write(forward, SHIFTABLE, [1, 2, 3], [0] * 3)
        forward.keep(0, 0)
        forward.keep(0, 2)

    assert [1, 2] == read(cache, SHIFTABLE, 0)


@pytest.mark.parametrize(("slot", "length"), [(0, 3), (0, 8), (0, -1), (1, 0), (7, 4)])
def test_keep_is_limited_to_the_span(cache: Cache, slot: int, length: int) -> None:
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4])

    with cache.forward([Span(0, 4, 3)]) as forward:
        write(forward, SHIFTABLE, [5, 6, 7], [0] * 3)
        with pytest.raises(ValueError, match=f"slot {slot} cannot keep {length}"):
            forward.keep(slot, length)

    assert [1, 2, 3, 4, 5, 6, 7] == read(cache, SHIFTABLE, 0)


def test_an_exception_rolls_back_in_spite_of_keep(cache: Cache) -> None:
    feed(cache, SHIFTABLE, 0, [1, 2])

    def fail() -> None:
        with cache.forward([Span(0, 2, 2), Span(1, 0, 1)]) as forward:
            write(forward, SHIFTABLE, [3, 4, 5], [0] * 3)
            forward.keep(0, 4)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    feed(cache, SHIFTABLE, 0, [9])

    assert [1, 2, 9] == read(cache, SHIFTABLE, 0)
    assert [] == read(cache, SHIFTABLE, 1)
    assert 61 == cache.free_cells


def test_a_refused_forward_is_not_open(cache: Cache) -> None:
    with pytest.raises(BadSpan), cache.forward([Span(0, 1, 1)]):
        pass
    feed(cache, SHIFTABLE, 0, [1])

    assert [1] == read(cache, SHIFTABLE, 0)


def test_a_second_forward_is_refused_while_one_is_open(cache: Cache) -> None:
    with cache.forward([Span(0, 0, 1)]) as outer:
        write(outer, SHIFTABLE, [1], [0])
        with pytest.raises(CacheError, match="a forward is open"), cache.forward([Span(1, 0, 1)]):
            pass

    assert [1] == read(cache, SHIFTABLE, 0)


def test_segments_split_the_batch_by_slot(cache: Cache) -> None:
    feed(cache, SHIFTABLE, 1, [1, 2, 3])

    with cache.forward([Span(3, 0, 2), Span(1, 3, 1)]) as forward:
        segments = forward.segments(1)
        write(forward, SHIFTABLE, [4, 5, 6], [0] * 3)

    assert [(slice(0, 2), 0), (slice(2, 3), 3)] == [(segment.batch_slice, segment.start) for segment in segments]
    assert 3 == forward.batch_tokens


def test_segments_begin_at_the_oldest_visible_cell(cache: Cache) -> None:
    feed(cache, SHIFTABLE, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9])

    with cache.forward([Span(1, 9, 2)]) as forward:
        window, full = (forward.segments(layer)[0] for layer in (1, 0))
        write(forward, SHIFTABLE, [10, 0], [0] * 2)
        held = forward.layer_kv(1)[1].read(window.cells, torch.float64)[0, :, 0].tolist()

    assert (6, 9, 0, 9) == (window.oldest_visible, window.start, full.oldest_visible, full.start)
    assert [7, 8, 9, 10, 0] == held


def test_cells_in_one_run_are_a_slice(cache: Cache) -> None:
    feed(cache, SHIFTABLE, 0, [1, 2, 3, 4, 5, 6])
    cache.copy_prefix(0, 1, 3)

    with cache.forward([Span(0, 6, 1), Span(1, 3, 1)]) as forward:
        whole, scattered = forward.segments(0)
        write(forward, SHIFTABLE, [7, 8], [0] * 2)

    assert isinstance(whole.cells, slice)
    assert isinstance(scattered.cells, torch.Tensor)
    assert [1, 2, 3, 8] == read(cache, SHIFTABLE, 1)


def test_a_slot_truncated_to_one_run_is_a_slice_again() -> None:
    layers = [layer for layer in SHIFTABLE if layer.attention_range.kind == "full"]
    cache = Cache(layers, slots=2, capacity=16, cells=64, dtype=torch.float64)
    feed(cache, layers, 0, [1, 2, 3])
    cache.copy_prefix(0, 1, 3)
    feed(cache, layers, 1, [9])
    feed(cache, layers, 0, [4])
    with cache.forward([Span(0, 4, 1)]) as forward:
        write(forward, layers, [5], [0])
        broken = forward.segments(0)[0].cells
    cache.clear(1)
    cache.rewind(0, 3)
    with cache.forward([Span(0, 3, 1)]) as forward:
        write(forward, layers, [6], [0])
        whole = forward.segments(0)[0].cells

    assert isinstance(broken, torch.Tensor)
    assert isinstance(whole, slice)
    assert [1, 2, 3, 6] == read(cache, layers, 0)


def test_stored_keys_and_values_are_read_by_cells(cache: Cache) -> None:
    with cache.forward([Span(0, 0, 3)]) as forward:
        write(forward, SHIFTABLE, [4, 5, 6], [0] * 3)
        keys, values = forward.layer_kv(2)
        (segment,) = forward.segments(2)

        assert [4, 5, 6] == values.read(segment.cells, torch.float64)[0, :, 0].tolist()
        assert (INTERLEAVED.heads, 3, INTERLEAVED.key_width) == keys.read(segment.cells, torch.float64).shape


def test_each_layer_has_its_attention_range(cache: Cache) -> None:
    with cache.forward([Span(0, 0, 1)]) as forward:
        write(forward, SHIFTABLE, [1], [0])

        assert [AttentionRange(), AttentionRange("window", 4), AttentionRange(), AttentionRange()] == [
            forward.attention_range(layer) for layer in range(4)
        ]


def test_keys_and_values_are_stored_in_the_cache_dtype() -> None:
    layers = (NEGATIVE_WINDOW, NO_POSITION)
    cache = Cache(layers, slots=2, capacity=8, cells=8, dtype=torch.bfloat16)
    feed(cache, layers, 0, [1, 2, 3])
    feed(cache, layers, 1, [4])
    cache.rewind(0, 1)
    with cache.forward([Span(0, 1, 1), Span(1, 1, 2)]) as forward:
        write(forward, layers, [5, 6, 7], [0] * 3)
    group, _ = cache.layer_group(0)

    assert [[1, 5], [4, 6, 7]] == [group.pool.values.rows[0, 0, group.table(slot), 0].tolist() for slot in (0, 1)]


def test_ranges_are_bidirectional_in_the_groups_that_have_them() -> None:
    """Layers that differ in nothing else are two groups."""
    causal = replace(SHIFTABLE[0], bidirectional=False)
    cache = Cache([SHIFTABLE[0], causal], slots=1, capacity=16, cells=16, dtype=torch.float64)

    with cache.forward([Span(0, 0, 5, bidirectional=((1, 4),))]) as forward:
        segments = [forward.segments(layer)[0].bidirectional for layer in (0, 1)]

    assert segments == [((1, 4),), ()]
