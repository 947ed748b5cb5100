"""The pool of cells: who gets which, and who owns them."""

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
    """A pool of that many cells, in two layers; keys and values have different widths."""
    spec = GroupSpec(2, 3, 5, AttentionRange(), (0, 4), (Rotation(), Rotation()))
    return CellPool(spec, cells, dtype, torch.device("cpu"))


def pool_with_free(cells: int, free: list[int]) -> CellPool:
    """A pool whose only free cells are these."""
    some = pool(cells)
    some.allocate(cells)
    some.release(np.array(free, dtype=np.int64))
    return some


def test_storage_has_one_row_a_cell_and_starts_finite() -> None:
    """Keys and values are [layers, heads, cells, width] and hold zeros."""
    some = pool(7)

    assert {"rows": (2, 2, 7, 3)} == {name: tensor.shape for name, tensor in some.keys.tensors.items()}
    assert {"rows": (2, 2, 7, 5)} == {name: tensor.shape for name, tensor in some.values.tensors.items()}
    assert not some.keys.tensors["rows"].any()
    assert not some.values.tensors["rows"].any()


def test_cells_follow_the_last_one_while_they_are_free() -> None:
    """A sequence that grows stays one run."""
    some = pool(10)
    first = some.allocate(2)
    last = int(first[-1])

    assert [last + 1, last + 2, last + 3] == some.allocate(3, after=last).tolist()


def test_cells_that_cannot_follow_come_from_the_largest_run() -> None:
    """Where the next cell is taken, the largest free run is used, so that the rest is one run."""
    some = pool_with_free(12, [2, 3, 6, 7, 8, 9])
    taken = some.allocate(3, after=4).tolist()

    assert set(taken) <= {6, 7, 8, 9}
    assert [1, 1] == np.diff(taken).tolist()


def test_a_follower_that_is_taken_ends_the_run() -> None:
    """Of the wanted followers only those before the first taken cell are used."""
    some = pool_with_free(8, [3, 4, 6])

    assert [3, 4, 6] == some.allocate(3, after=2).tolist()


def test_the_last_cell_has_no_follower() -> None:
    """After the last cell of the pool the search starts anew."""
    some = pool_with_free(4, [0, 1])

    assert {0, 1} == set(some.allocate(2, after=3).tolist())


def test_pieces_are_gathered_when_no_run_is_long_enough() -> None:
    """All free cells can be had, however scattered."""
    some = pool_with_free(9, [0, 2, 4, 5, 8])

    assert {0, 2, 4, 5, 8} == set(some.allocate(5).tolist())
    assert 0 == some.free_cells


def test_pieces_are_the_largest_that_there_are() -> None:
    """As few runs as can be are broken up, and the last of them from its begin."""
    some = pool_with_free(14, [0, 2, 3, 5, 6, 7, 9, 11, 12])

    assert [5, 6, 7] == some.allocate(3).tolist()
    assert [11, 12, 3] == some.allocate(3, after=10).tolist()
    assert {0, 2, 9} == set(some.allocate(3).tolist())


def test_a_new_sequence_leaves_room_to_grow_into() -> None:
    """Two sequences that start in an empty pool can both grow as one run."""
    some = pool(100)
    first = some.allocate(1)
    second = some.allocate(1)
    grown = [some.allocate(10, after=int(start[-1])) for start in (first, second)]

    assert first[0] + 1 == grown[0][0]
    assert second[0] + 1 == grown[1][0]


def test_out_of_cells_takes_none() -> None:
    """A pool that cannot give all gives nothing, and says how many there were."""
    some = pool_with_free(6, [1, 4])
    before = some.reference_counts.copy()

    with pytest.raises(OutOfCells, match="3 cells needed, 2 free") as refusal:
        some.allocate(3, after=0)

    assert (3, 2) == (refusal.value.needed, refusal.value.free)
    assert before.tolist() == some.reference_counts.tolist()
    assert 2 == some.free_cells


def test_no_cells_are_always_to_be_had() -> None:
    """Zero cells can be taken from a full pool."""
    some = pool_with_free(3, [])

    assert [] == some.allocate(0, after=1).tolist()


def test_a_shared_cell_is_free_after_its_last_owner() -> None:
    """Every owner releases once; only the last release frees."""
    some = pool(5)
    cells = some.allocate(2)
    some.share(cells)
    some.release(cells)

    assert 3 == some.free_cells
    assert not some.shared(cells).any()

    some.release(cells)

    assert 5 == some.free_cells


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_saved_cells_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    """A share of what was saved, in any cells of another pool; the others there stay as they are."""
    source, target = pool(9, dtype), pool(6, dtype)
    for plane, width in ((source.keys, 3), (source.values, 5)):
        for layer in (0, 1):
            plane.write(layer, slice(0, 9), torch.randn(2, 9, width))
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
def test_allocation_takes_free_cells_once(used: list[bool], after: int, data: st.DataObject) -> None:
    """Whatever is free and wherever the sequence ends: distinct free cells, as many as asked, run first."""
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
