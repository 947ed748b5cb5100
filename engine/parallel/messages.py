"""The messages of rank 0 to the workers, as lists of integers: a forward, a move of cached keys, the geometry, the end.

Cells are encoded as runs: pairs (start, stop) of consecutive cells, in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch

from engine.load.load import LoadedModel
from engine.step.input import HiddenRows, StepInput
from kvcache.cell_pool import CellArray
from kvcache.forward import ForwardCells
from kvcache.kv_buffer import CellIndex
from kvcache.spec import Span

_FORWARD, _MOVE, _GEOMETRY, _STOP = range(4)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The size of a new cache of rank 0, and a digest of its layers, which must be those of the worker."""

    slots: int
    context: int
    cells: int
    digest: int


@dataclass(frozen=True, slots=True)
class RepeatForward:
    """One step; cells by group. For the other fields see StepInput."""

    spans: tuple[Span, ...]
    tokens: tuple[int, ...]
    logit_rows: tuple[int, ...]
    hidden: HiddenRows | None
    cells: tuple[ForwardCells, ...]


@dataclass(frozen=True, slots=True)
class MoveKeys:
    """A shift: see AttentionGroup.move_cells."""

    group: int
    old: CellArray
    new: CellArray
    distance: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    """The end of the worker."""


def geometry_of(loaded: LoadedModel) -> Geometry:
    """The geometry of the cache of a model."""
    specs = [astuple(layer.spec) for layer in loaded.layers]
    parts = (specs, str(loaded.kv_dtype), loaded.capacity)
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return Geometry(loaded.info.slots, loaded.info.context, loaded.memory.cells, int.from_bytes(digest[:7]))


Message: TypeAlias = Geometry | RepeatForward | MoveKeys | StopWorker


def forward_message(step: StepInput) -> RepeatForward:
    """The message of a step; rank 0 samples."""
    forward = step.forward
    cells = tuple(forward.group_cells(group) for group in forward.groups)
    return RepeatForward(forward.spans, tuple(step.tokens), tuple(step.logit_rows), step.hidden, cells)


def encode(message: Message) -> list[int]:
    """A message as integers."""
    match message:
        case RepeatForward():
            return [_FORWARD, *_encode_forward(message)]
        case MoveKeys(group, old, new, distance):
            return [_MOVE, group, distance, *_encode_runs(_runs(old)), *_encode_runs(_runs(new))]
        case Geometry(slots, context, cells, digest):
            return [_GEOMETRY, slots, context, cells, digest]
        case StopWorker():
            return [_STOP]


def decode(words: Sequence[int]) -> Message:
    """The message of `encode`."""
    kind, *content = words
    reader = iter(content)
    if kind == _FORWARD:
        return _decode_forward(reader)
    if kind == _MOVE:
        group, distance = next(reader), next(reader)
        return MoveKeys(group, _array(_decode_runs(reader)), _array(_decode_runs(reader)), distance)
    return Geometry(*content) if kind == _GEOMETRY else StopWorker()


def _encode_forward(message: RepeatForward) -> Iterator[int]:
    for span in message.spans:
        assert not span.bidirectional, "models with an encoder are refused"
    yield from _counted(chain(*((span.slot, span.start, span.length, span.long_factors) for span in message.spans)))
    yield from _counted(message.tokens)
    yield from _counted(message.logit_rows)
    for numbers in ((), ()) if message.hidden is None else (message.hidden.rows, message.hidden.layers):
        yield from _counted(numbers)
    yield len(message.cells)
    for cells in message.cells:
        for index in (cells.new, *cells.attended):
            yield from _encode_runs(_index_runs(index))


def _decode_forward(reader: Iterator[int]) -> RepeatForward:
    numbers = _read_counted(reader)
    parts = (numbers[index : index + 4] for index in range(0, len(numbers), 4))
    spans = tuple(Span(slot, start, length, long_factors=bool(factors)) for slot, start, length, factors in parts)
    tokens, logit_rows, rows, layers = (_read_counted(reader) for _ in range(4))
    hidden = HiddenRows(rows, layers) if layers else None
    cells = tuple(
        ForwardCells(_cell_index(_decode_runs(reader)), tuple(_cell_index(_decode_runs(reader)) for _ in spans))
        for _ in range(next(reader))
    )
    return RepeatForward(spans, tokens, logit_rows, hidden, cells)


def _counted(numbers: Iterator[int] | Sequence[int]) -> list[int]:
    """The numbers after their count."""
    listed = list(numbers)
    return [len(listed), *listed]


def _read_counted(reader: Iterator[int]) -> tuple[int, ...]:
    return tuple(next(reader) for _ in range(next(reader)))


def _index_runs(index: CellIndex) -> list[tuple[int, int]]:
    return [(index.start, index.stop)] if isinstance(index, slice) else _runs(index.cpu().numpy())


def _runs(cells: CellArray) -> list[tuple[int, int]]:
    """The runs of consecutive cells, in order."""
    bounds = np.flatnonzero(np.diff(cells) != 1) + 1
    parts = np.split(cells, bounds) if len(cells) else []
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def _encode_runs(runs: Sequence[tuple[int, int]]) -> list[int]:
    return _counted(chain(*runs))


def _decode_runs(reader: Iterator[int]) -> list[tuple[int, int]]:
    numbers = _read_counted(reader)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _array(runs: Sequence[tuple[int, int]]) -> CellArray:
    empty = np.empty(0, dtype=np.int64)
    return np.concatenate([empty, *(np.arange(start, stop, dtype=np.int64) for start, stop in runs)])


def _cell_index(runs: Sequence[tuple[int, int]]) -> CellIndex:
    """A slice for one run, so that a read is a view, as on rank 0."""
    return slice(*runs[0]) if len(runs) == 1 else torch.from_numpy(_array(runs))
