"""One forward pass as a transaction over the cache.

    with cache.forward([Span(slot=0, start=4, length=3)]) as forward:
        ...                       # layers store keys and values and attend through `segments`
        forward.keep(0, 5)        # of the tokens 4, 5, 6 only 4 stays; without this call all stay

An exception inside the block keeps no token.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcache.attention_group import AttentionGroup
from kvcache.device_table import DeviceTable
from kvcache.kv_buffer import CellIndex, LayerKV, StoreFunction, store_rows
from kvcache.row_forward import pooled_states
from kvcache.spec import AttentionRange, Span

if TYPE_CHECKING:
    from kvcache.cache import Cache


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one slot in the packed batch, and the cells that they attend to.

    batch_slice     of the packed batch
    start           position of the first token
    cells           of positions [oldest_visible, start + tokens), in order
    oldest_visible  the first position that the tokens attend to
    bidirectional   see Span
    """

    batch_slice: slice
    start: int
    cells: CellIndex
    oldest_visible: int = 0
    bidirectional: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardCells:
    """The cells of an open forward in one group.

    new       of the batch's tokens, in the order of the batch
    attended  by span, of the positions that its tokens attend to
    """

    new: CellIndex
    attended: tuple[CellIndex, ...]


class Forward:
    """An open forward: its tokens have cells; which of them stay is decided at the end of the block.

    batch_tokens  length of the packed batch
    cache         of its slots
    """

    def __init__(self, cache: Cache, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self.batch_tokens = sum([span.length for span in spans])
        self.cache = cache
        self._kept_lengths = {span.slot: span.stop for span in spans}
        self._open = False
        # Whether the device tables have the cells of this forward, or will have them before a kernel reads them.
        self._by_device_table = False
        self._segments: dict[AttentionGroup, tuple[Segment, ...]] = {}
        self._new_cells_by_group: dict[AttentionGroup, CellIndex] = {}

    def __enter__(self) -> Forward:
        """Allocate cells for the batch. Raises BadSpan or OutOfCells, changing nothing."""
        self.cache.begin_forward(self)
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit the kept lengths; after an exception, roll back."""
        kept = self._kept_lengths if kind is None else {span.slot: span.start for span in self.spans}
        self.cache.end_forward(self, kept)

    @property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """The groups of the cache: the same object in all its forwards."""
        return self.cache.groups

    @property
    def capacity(self) -> int:
        """Maximum tokens of a slot."""
        return self.cache.capacity

    def keep(self, slot: int, length: int) -> None:
        """Set the slot's length after this forward; ValueError outside its span's start to stop."""
        span = next((span for span in self.spans if span.slot == slot), None)
        if span is None or not span.start <= length <= span.stop:
            raise ValueError(f"slot {slot} cannot keep {length}: its span is {span}")
        self._kept_lengths[slot] = length

    def store_kv(self, layer: int, keys: Tensor, values: Tensor, store: StoreFunction = store_rows) -> None:
        """Store keys and values of the batch in one layer, of any floating type.

        keys    [heads, batch tokens, key_width], rotated to their positions
        values  [heads, batch tokens, value_width]
        """
        group, _ = self.cache.layer_group(layer)
        store(*self.layer_kv(layer), self._new_cells(group), keys, values)

    def layer_kv(self, layer: int) -> tuple[LayerKV, LayerKV]:
        """One layer's keys and values of the whole pool, to be read through the cells of `segments`."""
        group, group_layer = self.cache.layer_group(layer)
        return LayerKV(group.pool.keys, group_layer), LayerKV(group.pool.values, group_layer)

    def attention_range(self, layer: int) -> AttentionRange:
        """The positions that a query of the layer attends to."""
        return self.cache.layer_group(layer)[0].spec.attention_range

    def segments(self, layer: int) -> tuple[Segment, ...]:
        """The batch by slot, in the order of the spans: the same object for all layers of a group."""
        group, _ = self.cache.layer_group(layer)
        if group not in self._segments:
            self._segments[group] = tuple(self._make_segments(group))
        return self._segments[group]

    def device_arrays(self) -> list[NDArray[np.int64]]:
        """The changes of the tables, and the cells of the batch's tokens, for the device; see `set_device_arrays`."""
        return [*self.table_changes(), *(group.new_cells(self.spans) for group in self.cache.groups)]

    def set_device_arrays(self, arrays: Sequence[Tensor]) -> None:
        """Use the copies of `device_arrays` on the device: `store_kv` and `segments` then need no other copy."""
        groups = self.cache.groups
        self.write_table_changes(arrays[: -len(groups)])
        self._new_cells_by_group |= zip(groups, arrays[-len(groups) :], strict=True)

    def table_changes(self) -> list[NDArray[np.int64]]:
        """The changes of the tables. From now on segments are views of the tables on the device."""
        self._by_device_table = True
        return [array for group in self.cache.groups for array in _device_table(group).changes()]

    def write_table_changes(self, changes: Sequence[Tensor]) -> None:
        """Write the copies of `table_changes` on the device."""
        for group, entries, cells in zip(self.cache.groups, changes[::2], changes[1::2], strict=True):
            _device_table(group).write(entries, cells)

    def group_cells(self, group: AttentionGroup) -> ForwardCells:
        """The cells of the batch in a group, from which a RepeatedForward can be made."""
        attended = tuple(self._attended_cells(group, index) for index in range(len(self.spans)))
        return ForwardCells(self._new_cells(group), attended)

    def recurrent_state(self, slot: int, position: int, name: Hashable) -> Tensor | None:
        """One tensor of the recurrent state at the start of a state range of a span; None: zeros. Read only."""
        assert self.cache.recurrent_states is not None, "a cache without recurrent states"
        return self.cache.recurrent_states.get_tensor(slot, position, name)

    def store_recurrent_state(self, slot: int, position: int, name: Hashable, tensor: Tensor) -> None:
        """Store one tensor, without a copy, of the recurrent state at the end of a state range of a span."""
        assert self.cache.recurrent_states is not None, "a cache without recurrent states"
        self.cache.recurrent_states.put_tensor(slot, position, name, tensor)

    def token_state_rows(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """The rows of the pool [2, spans] that the tokens of some spans read and write; see RecurrentStates."""
        states = self.cache.recurrent_states
        return np.empty((2, 0), np.int64) if states is None else states.token_rows(spans)

    def pooled_states(self, name: Hashable) -> Tensor:
        """One tensor of all pooled states [rows, ...]."""
        return pooled_states(self.cache, name)

    def _make_segments(self, group: AttentionGroup) -> list[Segment]:
        assert self._open, "tokens have no cells before the forward is open"
        segments, begin = [], 0
        for index, span in enumerate(self.spans):
            oldest = group.spec.attention_range.oldest_visible(span.start)
            batch_slice = slice(begin, begin + span.length)
            cells = self._attended_cells(group, index)
            ranges = span.bidirectional if group.spec.bidirectional else ()
            segments.append(Segment(batch_slice, span.start, cells, oldest, ranges))
            begin += span.length
        return segments

    def _attended_cells(self, group: AttentionGroup, span_index: int) -> CellIndex:
        """The cells that the tokens of the span with index `span_index` attend to."""
        span = self.spans[span_index]
        oldest = group.spec.attention_range.oldest_visible(span.start)
        return group.cells_from(span.slot, oldest, by_device_table=self._by_device_table)

    def _new_cells(self, group: AttentionGroup) -> CellIndex:
        """The cells of the batch's tokens, in the order of the batch."""
        if group not in self._new_cells_by_group:
            self._new_cells_by_group[group] = group.pool.cell_index(group.new_cells(self.spans))
        return self._new_cells_by_group[group]


class RepeatedForward(Forward):
    """A forward of another process's cache over the buffers of this one, which has the same groups; no transaction.

    cells  by group, in the order of the cache
    """

    def __init__(self, cache: Cache, spans: Sequence[Span], cells: Sequence[ForwardCells]) -> None:
        super().__init__(cache, spans)
        self._cells: Mapping[AttentionGroup, ForwardCells] = dict(zip(cache.groups, cells, strict=True))
        self._open = True

    def device_arrays(self) -> list[NDArray[np.int64]]:
        """Nothing: this process has no tables."""
        return []

    def set_device_arrays(self, arrays: Sequence[Tensor]) -> None:
        """Nothing."""

    def _attended_cells(self, group: AttentionGroup, span_index: int) -> CellIndex:
        return self._cells[group].attended[span_index]

    def _new_cells(self, group: AttentionGroup) -> CellIndex:
        return self._cells[group].new


def _device_table(group: AttentionGroup) -> DeviceTable:
    assert group.device_table is not None, "cells in CPU memory"
    return group.device_table
