"""Attention over cells, latent attention and stores on a GPU, with the interface of engine/kernels/reference.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import latent, reference, row_attention
from engine.kernels.attention_input import AttentionInput, RowAttentionInput
from engine.kernels.cell_kernels import CellKernels
from engine.kernels.latent import AbsorptionRule, LatentProjection
from engine.kernels.triton import launch
from engine.kernels.triton.batch import BatchTables, HostTables, Tiling, make_tables, row_tables
from engine.kernels.triton.launch import Scoring, StoredRows, stored_rows
from engine.types.request import MlaMode
from kvcache.forward import Segment
from kvcache.kv_buffer import CellIndex, HadamardInt8KVBuffer, Int8KVBuffer, LayerKV, store_rows
from kvcache.row_forward import RowCells
from kvcache.spec import AttentionRange, GroupSpec

_Inputs = TypeVar("_Inputs", AttentionInput, RowAttentionInput)

# Batches with tables on the device: one for each group of a model and of its draft model.
_KEPT_TABLES = 16
# Columns of keys at most for the tiles of prompts: larger ones exceed the shared memory.
PROMPT_WIDTH = 256


@dataclass(frozen=True, slots=True)
class _Layout:
    """Beside segments, the properties of layers that their tables depend on.

    group  query heads that share a key head
    rule   of layers with latents: the tables are those of absorbed segments
    """

    group: int
    tiling: Tiling
    rule: AbsorptionRule | None = None


class TritonKernels(CellKernels):
    """Computes bias and float64 by the reference. Belongs to the engine thread.

    With one tile size (Tiling.decode == Tiling.prompt) a row has the same bits for any batch and any chunks of its
    prompt; else for any batch, and decoded rows have other bits than rows of a prompt.
    """

    def __init__(self, tiling: Tiling | None = None) -> None:
        self._tiling = tiling or Tiling()
        self._decode_tiling = replace(self._tiling, prompt=self._tiling.decode)
        # By the identity of segments or RowCells, which are the same objects in all layers of a group.
        self._tables: dict[tuple[object, ...], tuple[object, BatchTables]] = {}
        # The layouts of all layers so far, in order, by key heads and columns of a key.
        self._layouts: dict[tuple[int, int], dict[_Layout, None]] = {}
        # The keys and segments of the tables of the last `batch_arrays`.
        self._planned: list[tuple[tuple[object, ...], Sequence[Segment], HostTables]] = []

    def __call__(self, inputs: AttentionInput) -> Tensor:
        """See reference.attend. Raises ValueError for shapes that do not fit."""
        keys, values = stored_rows(inputs.keys), stored_rows(inputs.values)
        if inputs.bias is not None or keys is None or values is None or inputs.query.dtype == torch.float64:
            return reference.attend(inputs)
        return self._attend(_transformed(inputs), keys, values)

    def attend_latent(self, inputs: AttentionInput, projection: LatentProjection, *, mode: MlaMode = "auto") -> Tensor:
        """See latent.attend: absorbed segments are one batch, expanded ones are computed by torch."""
        query, stored, width = inputs.query, stored_rows(inputs.keys), projection.latent_width
        if stored is None or not _has_latent_kernel(stored, width) or query.dtype == torch.float64:
            return latent.attend(inputs, projection, mode=mode)
        rule = AbsorptionRule.of(projection, mode)
        self._layout(query.shape[0], stored.numbers.shape[0], inputs.keys.width, rule)
        absorbed = [candidate for candidate in inputs.segments if rule.applies(candidate)]
        output = query.new_empty(query.shape[1], query.shape[0], projection.values.shape[1])
        for segment in inputs.segments:
            if not rule.applies(segment):
                segment_inputs = replace(inputs, query=query[:, segment.batch_slice], segments=[_alone(segment)])
                output[segment.batch_slice] = latent.attend(segment_inputs, projection, mode="expand")
        if absorbed:
            self._absorb(output, replace(inputs, segments=absorbed), replace(stored, width=width), projection, rule)
        return output

    def _absorb(
        self,
        output: Tensor,
        inputs: AttentionInput,
        latents: StoredRows,
        projection: LatentProjection,
        rule: AbsorptionRule,
    ) -> None:
        """Write the output rows of the segments."""
        query, cells, runs = inputs.query, inputs.keys, list(_runs(inputs.segments))
        reduced = query.new_empty(*query.shape[:2], cells.width)
        for rows in runs:
            reduced[:, rows] = _transform(cells, latent.absorb_keys(query[:, rows], projection), cells.width)
        keys = replace(latents, width=cells.width)
        mixed = self._attend(replace(inputs, query=reduced), keys, latents, rule)
        for rows in runs:
            values = _transform(cells, mixed[rows].transpose(0, 1), latents.width)
            output[rows] = latent.project_values(values, projection)

    def attend_rows(self, inputs: RowAttentionInput) -> Tensor:
        """See row_attention.attend_rows: the bits of `__call__` for the same rows."""
        keys, values = stored_rows(inputs.keys), stored_rows(inputs.values)
        if keys is None or values is None or inputs.query.dtype == torch.float64:
            return row_attention.attend_rows(inputs)
        tables = self._row_tables(inputs.cells, inputs.query.shape[0] // keys.numbers.shape[0])
        return self._launch(_transformed(inputs), keys, values, tables)

    def attend_latent_rows(self, inputs: RowAttentionInput, projection: LatentProjection) -> Tensor:
        """See row_attention.attend_latent_rows."""
        query, latents = inputs.query, inputs.keys
        stored, width = stored_rows(latents), projection.latent_width
        if stored is None or not _has_latent_kernel(stored, width) or query.dtype == torch.float64:
            return row_attention.attend_latent_rows(inputs, projection)
        reduced = _transform(latents, latent.absorb_keys(query, projection), latents.width)
        keys, values = replace(stored, width=latents.width), replace(stored, width=width)
        tables = self._row_tables(inputs.cells, query.shape[0])
        mixed = self._launch(replace(inputs, query=reduced), keys, values, tables)
        return latent.project_values(_transform(latents, mixed.transpose(0, 1), width), projection)

    def store(self, keys: LayerKV, values: LayerKV, cells: CellIndex, key_rows: Tensor, value_rows: Tensor) -> None:
        """See kvcache.kv_buffer.store_rows."""
        if not launch.store(keys, values, cells, key_rows, value_rows):
            store_rows(keys, values, cells, key_rows, value_rows)

    def batch_arrays(self, groups: Iterable[tuple[GroupSpec, Sequence[Segment]]], rows: int) -> list[NDArray[np.int32]]:
        """See CellKernels."""
        self._planned = []
        for spec, segments in groups:
            for layout in self._layouts.get((spec.heads, spec.key_width), ()):
                chosen = [segment for segment in segments if layout.rule is None or layout.rule.applies(segment)]
                if chosen:
                    self._plan(chosen, spec.attention_range, rows, layout)
        return [tables.numbers for *_, tables in self._planned]

    def set_batch_arrays(self, arrays: Sequence[Tensor]) -> None:
        """See CellKernels."""
        for (key, segments, tables), numbers in zip(self._planned, arrays, strict=True):
            self._keep(key, segments, tables.on_device(numbers))
        self._planned = []

    def _plan(self, segments: Sequence[Segment], attention_range: AttentionRange, rows: int, layout: _Layout) -> None:
        tables = HostTables(segments, attention_range, rows, group=layout.group, tiling=layout.tiling)
        self._planned.append((_table_key(segments, attention_range, rows, layout), segments, tables))

    def _attend(
        self, inputs: AttentionInput, keys: StoredRows, values: StoredRows, rule: AbsorptionRule | None = None
    ) -> Tensor:
        """The query of the inputs is transformed as the keys are."""
        return self._launch(inputs, keys, values, self._tables_of(inputs, keys, rule))

    def _launch(
        self, inputs: AttentionInput | RowAttentionInput, keys: StoredRows, values: StoredRows, tables: BatchTables
    ) -> Tensor:
        """See `_attend`."""
        _check(inputs, keys, values)
        buffer, query = inputs.keys.buffer, launch.contiguous_columns(inputs.query)
        parts = buffer.parts if isinstance(buffer, Int8KVBuffer) else ()
        columns = launch.key_columns(keys, query.shape[2], parts)
        scoring = Scoring(inputs.scale, inputs.softcap, inputs.sinks)
        return launch.attend(query, keys, values, columns, tables, scoring, self._tiling)

    def _tables_of(self, inputs: AttentionInput, keys: StoredRows, rule: AbsorptionRule | None) -> BatchTables:
        query, segments, attention_range = inputs.query, inputs.segments, inputs.attention_range
        layout, rows = self._layout(query.shape[0], keys.numbers.shape[0], keys.width, rule), query.shape[1]
        return self._kept(
            _table_key(segments, attention_range, rows, layout),
            segments,
            lambda: make_tables(
                segments, attention_range, rows, group=layout.group, tiling=layout.tiling, device=query.device
            ),
        )

    def _layout(self, heads: int, key_heads: int, width: int, rule: AbsorptionRule | None) -> _Layout:
        """The layout of layers with keys of `width` columns, for `batch_arrays` from now on."""
        tiling = self._tiling if width <= PROMPT_WIDTH else self._decode_tiling
        layout = _Layout(heads // key_heads, tiling, rule)
        self._layouts.setdefault((key_heads, width), {})[layout] = None
        return layout

    def _row_tables(self, cells: RowCells, group: int) -> BatchTables:
        return self._kept((id(cells), group), cells, lambda: row_tables(cells, group=group, tiling=self._decode_tiling))

    def _kept(self, key: tuple[object, ...], source: object, make: Callable[[], BatchTables]) -> BatchTables:
        """Tables by the identity of their source, which is kept alive."""
        if key not in self._tables:
            self._keep(key, source, make())
        return self._tables[key][1]

    def _keep(self, key: tuple[object, ...], source: object, tables: BatchTables) -> None:
        if len(self._tables) == _KEPT_TABLES:
            del self._tables[next(iter(self._tables))]
        self._tables[key] = (source, tables)


def _table_key(
    segments: Sequence[Segment], attention_range: AttentionRange, rows: int, layout: _Layout
) -> tuple[object, ...]:
    return (*map(id, segments), attention_range, rows, layout)


def _has_latent_kernel(stored: StoredRows, latent_width: int) -> bool:
    """Whether the kernel multiplies latents of a width: it takes separate scales at powers of two only."""
    return stored.parts < 2 or latent_width == launch.power_of_two(latent_width)


def _runs(segments: Sequence[Segment]) -> Iterator[slice]:
    """The rows of segments in the order of the batch, adjacent ones joined."""
    start, stop = segments[0].batch_slice.start, segments[0].batch_slice.stop
    for segment in segments[1:]:
        if segment.batch_slice.start != stop:
            yield slice(start, stop)
            start = segment.batch_slice.start
        stop = segment.batch_slice.stop
    yield slice(start, stop)


def _transformed(inputs: _Inputs) -> _Inputs:
    """The inputs with queries that are transformed as the keys are."""
    return replace(inputs, query=_transform(inputs.keys, inputs.query, inputs.keys.width))


def _transform(cells: LayerKV, rows: Tensor, width: int) -> Tensor:
    """LayerKV.transform of rows [heads, rows, width], in one launch."""
    buffer = cells.buffer
    if not isinstance(buffer, HadamardInt8KVBuffer):
        return rows
    return launch.transform(rows, buffer.parts if width == cells.width else buffer.parts[:1])


def _alone(segment: Segment) -> Segment:
    """The segment as the only one of its batch."""
    return replace(segment, batch_slice=slice(0, segment.batch_slice.stop - segment.batch_slice.start))


def _check(inputs: AttentionInput | RowAttentionInput, keys: StoredRows, values: StoredRows) -> None:
    """Raise ValueError for shapes with which a kernel would read outside the tensors."""
    query, sinks = inputs.query, inputs.sinks
    conditions = {
        "keys and values are of one pool": keys.numbers.shape[:2] == values.numbers.shape[:2],
        "queries are as wide as keys": query.shape[2] == keys.width,
        "heads are a multiple of key heads": query.shape[0] % keys.numbers.shape[0] == 0,
        "keys and values are contiguous": keys.numbers.is_contiguous() and values.numbers.is_contiguous(),
        "every head has a sink": sinks is None or sinks.shape == query.shape[:1],
    }
    for name, holds in conditions.items():
        if not holds:
            raise ValueError(f"the kernel needs that {name}")
