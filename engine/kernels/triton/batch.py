"""The tables of a batch on the device: one copy serves all layers of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.forward import Segment
from kvcache.row_forward import RowCells
from kvcache.spec import AttentionRange
from kvcache.staging import to_device

# Numbers of a tile, see attention.load_tile.
FIELDS = 7
# Rows of a segment up to which it has the tiles of decoding: draft tokens are verified with the bits of decoding.
DECODE_ROWS = 16


@dataclass(frozen=True)
class Tiling:
    """Sizes on which the bits of a row depend.

    decode  lanes of a tile for segments of up to DECODE_ROWS rows
    prompt  lanes of a tile for longer segments
    split   positions that are summed in one program, a multiple of the block
    block   positions of a block; None: by the width of keys
    """

    decode: int = 16
    prompt: int = 64
    split: int = 512
    block: int | None = None

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> Tiling:
        """The sizes for queries of a dtype: one tile size in float32, in which larger tiles exceed the registers."""
        return cls(prompt=cls.decode) if dtype == torch.float32 else cls()


@dataclass(frozen=True, slots=True)
class TileSet:
    """The tiles of one size.

    table         int32 [tiles, FIELDS], see attention.load_tile
    lanes         of a tile
    splits        of the tile with most of them
    partial_rows  rows of all tiles
    """

    table: Tensor
    lanes: int
    splits: int
    partial_rows: int


@dataclass(frozen=True, slots=True)
class BatchTables:
    """See engine/kernels/triton/attention.py."""

    cells: Tensor
    bounds: Tensor
    tile_sets: tuple[TileSet, ...]


class SegmentArrays:
    """Segments as arrays, one entry each; `rows` entries are rows of the whole batch."""

    def __init__(self, segments: Sequence[Segment], attention_range: AttentionRange, rows: int) -> None:
        """Raises ValueError for a segment with rows outside the batch, or with cells that do not end with its rows."""
        self.first_rows = np.array([segment.batch_slice.start for segment in segments], dtype=np.int64)
        self.counts = np.array([segment.batch_slice.stop for segment in segments], dtype=np.int64) - self.first_rows
        self.starts = np.array([segment.start for segment in segments], dtype=np.int64)
        self.is_run = np.array([isinstance(segment.cells, slice) for segment in segments], dtype=np.int64)
        oldest = np.array([segment.oldest_visible for segment in segments], dtype=np.int64)
        lengths = np.array([_cell_count(segment) for segment in segments], dtype=np.int64)
        if np.any(self.first_rows < 0) or np.any(self.counts < 0) or np.any(self.first_rows + self.counts > rows):
            raise ValueError("the kernel needs that segments are in the batch")
        if np.any(lengths != self.starts + self.counts - oldest):
            raise ValueError("the kernel needs that tables end with the rows")
        self.cells, listed = _listed_cells([segment.cells for segment in segments if isinstance(segment.cells, Tensor)])
        first_cells = np.array([segment.cells.start if isinstance(segment.cells, slice) else 0 for segment in segments])
        first_cells[self.is_run == 0] = listed
        self.bases = first_cells - oldest
        self.bounds = self._visible(segments, attention_range, rows)

    def _visible(self, segments: Sequence[Segment], attention_range: AttentionRange, rows: int) -> NDArray[np.int64]:
        """The first and last visible position of each row of the batch, [2, rows]."""
        offsets = _within(self.counts)
        index, positions = (
            np.repeat(self.first_rows, self.counts) + offsets,
            np.repeat(self.starts, self.counts) + offsets,
        )
        bounds = np.zeros((2, rows), dtype=np.int64)
        bounds[0, index], bounds[1, index] = attention_range.oldest_visible(positions), positions
        for segment in segments:
            visible = bounds[1, segment.batch_slice]
            for start, stop in segment.bidirectional:
                inside = slice(max(start - segment.start, 0), max(stop - segment.start, 0))
                visible[inside] = np.maximum(visible[inside], stop - 1)
        if attention_range.kind == "chunk":
            last_of_chunk = positions // attention_range.size * attention_range.size + attention_range.size - 1
            bounds[1, index] = np.minimum(bounds[1, index], last_of_chunk)
        return bounds

    def tiles(self, chosen: NDArray[np.bool_], rows: int) -> NDArray[np.int64]:
        """Tiles [tiles, FIELDS] of `rows` rows each for some segments."""
        index = np.flatnonzero(chosen)
        tile_counts = -(-self.counts[index] // rows)
        segment, before = np.repeat(index, tile_counts), _within(tile_counts) * rows
        first, count = self.first_rows[segment] + before, np.minimum(self.counts[segment] - before, rows)
        # The bounds of rows never decrease inside a segment.
        oldest, stop = self.bounds[0, first], self.bounds[1, first + count - 1] + 1
        columns = (first, count, _exclusive_sum(count), self.bases[segment], self.is_run[segment], oldest, stop)
        return np.stack(columns, axis=1)


class HostTables:
    """The tables of segments of a batch with `rows` rows, before their copy to the device.

    numbers  int32: all tables, each from a multiple of 16 bytes on
    """

    def __init__(
        self, segments: Sequence[Segment], attention_range: AttentionRange, rows: int, *, group: int, tiling: Tiling
    ) -> None:
        """`group` query heads share a key head. Raises ValueError as SegmentArrays does."""
        arrays = SegmentArrays(segments, attention_range, rows)
        is_short = arrays.counts <= (DECODE_ROWS if tiling.decode != tiling.prompt else rows)
        tables = [
            (lanes, arrays.tiles(chosen, max(lanes // group, 1)))
            for lanes, chosen in ((tiling.decode, is_short), (tiling.prompt, ~is_short))
        ]
        self._tables = [(lanes, table) for lanes, table in tables if len(table)]
        self._cells, self._tiling = arrays.cells, tiling
        self._parts = [arrays.bounds, *(table for _, table in self._tables)]
        # Kernels are compiled for the alignment of their pointers.
        self._starts = _exclusive_sum(np.array([-(-part.size // 4) * 4 for part in self._parts]))
        self.numbers = np.zeros(int(self._starts[-1]) + self._parts[-1].size, dtype=np.int32)
        for start, part in zip(self._starts, self._parts, strict=True):
            self.numbers[start : start + part.size] = part.ravel()

    def on_device(self, numbers: Tensor) -> BatchTables:
        """The tables, with `numbers` copied to the device."""
        bounds, *sent = (
            numbers[start : start + part.size].view(part.shape)
            for start, part in zip(self._starts.tolist(), self._parts, strict=True)
        )
        tile_sets = tuple(
            TileSet(table, lanes, _most_splits(tiles, self._tiling.split), int(tiles[:, 1].sum()))
            for (lanes, tiles), table in zip(self._tables, sent, strict=True)
        )
        cells = numbers.new_zeros(1, dtype=torch.int64) if self._cells is None else self._cells
        return BatchTables(cells, bounds, tile_sets)


def make_tables(
    segments: Sequence[Segment],
    attention_range: AttentionRange,
    rows: int,
    *,
    group: int,
    tiling: Tiling,
    device: torch.device,
) -> BatchTables:
    """HostTables with a separate copy to the device."""
    tables = HostTables(segments, attention_range, rows, group=group, tiling=tiling)
    return tables.on_device(to_device(tables.numbers, device))


def row_tables(cells: RowCells, *, group: int, tiling: Tiling) -> BatchTables:
    """The tables of a batch with one token a sequence; a tile for each row, as `make_tables` has them."""
    count = len(cells.latest)
    rows, ones = torch.arange(count, device=cells.latest.device), torch.ones_like(cells.latest)
    columns = (rows, ones, rows, cells.begins, ones - 1, cells.oldest, cells.latest + 1)
    table, bounds = (torch.stack(parts, dim).int() for parts, dim in ((columns, 1), ((cells.oldest, cells.latest), 0)))
    splits = -(-cells.max_attended // tiling.split) + 1
    return BatchTables(cells.table, bounds, (TileSet(table, tiling.decode, splits, count),))


def _most_splits(table: NDArray[np.int64], split: int) -> int:
    """Splits of the tile with most of them."""
    start, stop = table[:, FIELDS - 2], table[:, FIELDS - 1]
    return int((-(-stop // split) - start // split).max())


def _listed_cells(tables: Sequence[Tensor]) -> tuple[Tensor | None, NDArray[np.int64]]:
    """All tables in one tensor, and the index at which each begins; views of one tensor are not copied."""
    if not tables:
        return None, np.empty(0, dtype=np.int64)
    storage = tables[0].untyped_storage()
    if all(table.untyped_storage().data_ptr() == storage.data_ptr() for table in tables):
        entries = storage.nbytes() // tables[0].itemsize
        return tables[0].as_strided((entries,), (1,), 0), np.array([table.storage_offset() for table in tables])
    return torch.cat(list(tables)), _exclusive_sum(np.array([len(table) for table in tables]))


def _cell_count(segment: Segment) -> int:
    cells = segment.cells
    return cells.stop - cells.start if isinstance(cells, slice) else cells.shape[0]


def _exclusive_sum(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of all counts before each."""
    return np.cumsum(counts) - counts


def _within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers 0 to count - 1 of each count, in one array."""
    return np.arange(int(counts.sum())) - np.repeat(_exclusive_sum(counts), counts)
