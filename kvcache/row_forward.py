"""Batches of few tokens, as numbers on a device: a recorded step reads them anew at each replay.

Each token is a row with its own range, so decoded tokens and draft tokens are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.kv_buffer import LayerKV, StoreFunction
from kvcache.spec import Span

if TYPE_CHECKING:
    from kvcache.cache import Cache

# Rows of numbers: begins and positions; then for each group the first visible position and the cell of the token; then,
# of a cache with recurrent states, the rows of its pool that the token reads and writes.
_COMMON, _OF_GROUP, _OF_STATES = 2, 2, 2


@dataclass(frozen=True, slots=True)
class RowCells:
    """The cells of one group, int64 on its device.

    table         of all slots, one after the other
    begins        [rows]: index in `table` of position 0 of the row's slot
    oldest        [rows]: the first position that the row attends to
    latest        [rows]: the position of its token, the last one
    new           [rows]: the cell of its token
    max_attended  maximum positions that a row attends to
    """

    table: Tensor
    begins: Tensor
    oldest: Tensor
    latest: Tensor
    new: Tensor
    max_attended: int


@dataclass(frozen=True, slots=True)
class StateRows:
    """Tokens of different slots, and the rows of the pool with their recurrent states, int64 on its device.

    tokens  rows of the batch
    before  that each token reads
    after   that each token writes
    """

    tokens: Tensor
    before: Tensor
    after: Tensor


def batch_positions(spans: Sequence[Span]) -> NDArray[np.int64]:
    """The positions of the tokens of spans, in the order of the batch."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(span.start, span.stop) for span in spans)])


def row_numbers(cache: Cache, spans: Sequence[Span], rows: int) -> NDArray[np.int64]:
    """The numbers of a RowForward for the tokens of spans, padded to `rows` rows that write into a spare cell.

    With recurrent states each span has one token, which is not the first of its slot.
    """
    states = cache.recurrent_states
    numbers = np.zeros((_COMMON + _OF_GROUP * len(cache.groups) + _OF_STATES * (states is not None), rows), np.int64)
    positions = batch_positions(spans)
    count = len(positions)
    slots, lengths = [span.slot for span in spans], [span.length for span in spans]
    numbers[0, :count] = np.repeat(np.asarray(slots, np.int64) * cache.capacity, lengths)
    numbers[1, :count] = positions
    for index, group in enumerate(cache.groups):
        oldest, new = numbers[_COMMON + _OF_GROUP * index :][:_OF_GROUP]
        oldest[:count] = group.spec.attention_range.oldest_visible(positions)
        new[:] = group.pool.spare_cell
        new[:count] = group.new_cells(spans) if spans else ()
    if states is not None:
        numbers[-_OF_STATES:] = [[states.pool.zero_row], [states.pool.spare_row]]
        numbers[-_OF_STATES:, :count] = states.token_rows(spans)
    return numbers


def pooled_states(cache: Cache, name: Hashable) -> Tensor:
    """One tensor of all pooled states [rows, ...], of a cache with recurrent states."""
    assert cache.recurrent_states is not None, "a cache without recurrent states"
    return cache.recurrent_states.pool.tensors[name]


class RowForward:
    """Stores and attends to the cells of `numbers`; the transaction is that of an open Forward.

    numbers       of `row_numbers`, on the device of the cells
    max_attended  maximum positions that a row attends to

    state_rows  of all rows; None: a cache without recurrent states
    """

    def __init__(self, cache: Cache, numbers: Tensor, max_attended: int) -> None:
        self._cache, self._numbers, self._max_attended = cache, numbers, max_attended
        self.positions = numbers[1]
        rows = torch.arange(numbers.shape[1], device=numbers.device)
        self.state_rows = None if cache.recurrent_states is None else StateRows(rows, *numbers[-_OF_STATES:])
        self._cells = {}
        for index, group in enumerate(cache.groups):
            assert group.device_table is not None, "cells in CPU memory"
            oldest, new = numbers[_COMMON + _OF_GROUP * index :][:_OF_GROUP]
            table = group.device_table.cells.view(-1)
            range_limit = min(max_attended, group.spec.attention_range.size or max_attended)
            self._cells[group] = RowCells(table, numbers[0], oldest, self.positions, new, range_limit)

    def copy(self) -> RowForward:
        """The same numbers with new RowCells, for one recording: kernels keep the tables of a RowCells."""
        return RowForward(self._cache, self._numbers, self._max_attended)

    def store_kv(self, layer: int, keys: Tensor, values: Tensor, store: StoreFunction) -> None:
        store(*self.layer_kv(layer), self.row_cells(layer).new, keys, values)

    def layer_kv(self, layer: int) -> tuple[LayerKV, LayerKV]:
        group, group_layer = self._cache.layer_group(layer)
        return LayerKV(group.pool.keys, group_layer), LayerKV(group.pool.values, group_layer)

    def pooled_states(self, name: Hashable) -> Tensor:
        return pooled_states(self._cache, name)

    def row_cells(self, layer: int) -> RowCells:
        """The cells of a layer: the same object for all layers of a group."""
        return self._cells[self._cache.layer_group(layer)[0]]
