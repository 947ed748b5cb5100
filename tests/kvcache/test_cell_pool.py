"""The pool of cells: allocation and reference counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.cell_pool import CellPool
from kvcache.errors import OutOfCells
from kvcache.spec import AttentionRange, GroupSpec, Rotation


def pool(cells: int, dtype: torch.dtype = torch.float32) -> CellPool:
    """A pool of two layers with different key and value widths."""
    spec = GroupSpec(2, 3, 5, AttentionRange(), (0, 4), (Rotation(), Rotation()))
    return CellPool(spec, cells, dtype, torch.device("cpu"))


def pool_with_free(cells: int, free: list[int]) -> CellPool:
    """A pool with the free cells `free`."""
    some = pool(cells)
    some.allocate(cells)
    some.release(np.array(free, dtype=np.int64))
    return some


def test_kv_buffers_have_one_row_a_cell_and_start_at_zero() -> None:
    some = pool(7)

    assert {"rows": (2, 2, 7, 3)} == {name: tensor.shape for name, tensor in some.keys.tensors.items()}
    assert {"rows": (2, 2, 7, 5)} == {name: tensor.shape for name, tensor in some.values.tensors.items()}
    assert not some.keys.tensors["rows"].any()
    assert not some.values.tensors["rows"].any()


def test_allocation_continues_behind_the_last_cell() -> None:
    some = pool(10)
    first = some.allocate(2)
    last = int(first[-1])

    assert [last + 1, last + 2, last + 3] == some.allocate(3, after=last).tolist()


def test_other_cells_come_from_the_largest_free_run() -> None:
    some = pool_with_free(12, [2, 3, 6, 7, 8, 9])
    taken = some.allocate(3, after=4).tolist()

    assert set(taken) <= {6, 7, 8, 9}
    assert [1, 1] == np.diff(taken).tolist()


def test_a_used_cell_ends_the_run() -> None:
    some = pool_with_free(8, [3, 4, 6])

    assert [3, 4, 6] == some.allocate(3, after=2).tolist()


def test_the_last_cell_of_the_pool_ends_the_run() -> None:
    some = pool_with_free(4, [0, 1])

    assert {0, 1} == set(some.allocate(2, after=3).tolist())


def test_several_runs_are_joined_if_none_is_long_enough() -> None:
    some = pool_with_free(9, [0, 2, 4, 5, 8])

    assert {0, 2, 4, 5, 8} == set(some.allocate(5).tolist())
    assert 0 == some.free_cells


def test_joined_runs_are_the_largest_ones() -> None:
    some = pool_with_free(14, [0, 2, 3, 5, 6, 7, 9, 11, 12])

    assert [5, 6, 7] == some.allocate(3).tolist()
    assert [11, 12, 3] == some.allocate(3, after=10).tolist()
    assert {0, 2, 9} == set(some.allocate(3).tolist())


def test_a_new_sequence_starts_in_the_middle_of_a_run() -> None:
    some = pool(100)
    first = some.allocate(1)
    second = some.allocate(1)
    grown = [some.allocate(10, after=int(start[-1])) for start in (first, second)]

    assert first[0] + 1 == grown[0][0]
    assert second[0] + 1 == grown[1][0]


def test_out_of_cells_allocates_nothing() -> None:
    some = pool_with_free(6, [1, 4])
    before = some.reference_counts.copy()

    with pytest.raises(OutOfCells, match="3 cells needed, 2 free") as refusal:
        some.allocate(3, after=0)

    assert (3, 2) == (refusal.value.needed, refusal.value.free)
    assert before.tolist() == some.reference_counts.tolist()
    assert 2 == some.free_cells


def test_zero_cells_can_always_be_allocated() -> None:
    some = pool_with_free(3, [])

    assert [] == some.allocate(0, after=1).tolist()


def test_a_shared_cell_is_free_after_its_last_reference() -> None:
    some = pool(5)
    cells = some.allocate(2)
    some.share(cells)
    some.release(cells)

    assert 3 == some.free_cells
    assert not some.shared(cells).any()

    some.release(cells)

    assert 5 == some.free_cells


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_saved_cells_are_loaded_bit_for_bit(dtype: torch.dtype) -> None:
    source, target = pool(9, dtype), pool(6, dtype)
    for buffer, width in ((source.keys, 3), (source.values, 5)):
        for layer in (0, 1):
            buffer.write(layer, slice(0, 9), torch.randn(2, 9, width))
    content = source.save(np.array([7, 2, 5, 0]))
    source.keys.write(0, slice(0, 9), torch.zeros(2, 9, 3))
    target.load(np.array([4, 1]), content, 1, 3)
    loaded = target.save(np.arange(6))

    assert {"keys", "values"} == {name.split(".")[0] for name in content}
    for name, tensor in content.items():
        assert tensor[:, :, 1:3].any()
        assert torch.equal(tensor[:, :, 1:3], loaded[name][:, :, [4, 1]])
        assert not loaded[name][:, :, [0, 2, 3, 5]].any()


@given(
    used=st.lists(st.booleans(), min_size=1, max_size=24),
    after=st.integers(-1, 23),
    data=st.data(),
)
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_allocation_returns_distinct_free_cells(used: list[bool], after: int, data: st.DataObject) -> None:
    some = pool_with_free(len(used), [cell for cell, taken in enumerate(used) if not taken])
    after = min(after, len(used) - 1)
    count = data.draw(st.integers(0, used.count(False)))
    taken = some.allocate(count, after=after).tolist()

    assert count == len(set(taken))
    assert not any(used[cell] for cell in taken)
    assert used.count(False) - count == some.free_cells == int((some.reference_counts == 0).sum())
    follower = after + 1
    if count and 0 <= after and follower < len(used) and not used[follower]:
        assert follower == taken[0]
