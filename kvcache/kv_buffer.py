"""Storage of one pool's keys or values, in a format of its own: rows of numbers in, rows of numbers out.

float      a row as it is, in any floating type: reading a run of cells in that type is a view
int8       a byte a column and a float32 scale a part of a row: a quarter of float32, and 4 bytes a head and part
turned     int8 behind a Hadamard transform: keys, whose few large columns would set the scale of all the others

A row is quantised alone, whatever is written beside it, so that neither batch nor chunks show in what is stored.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from kvcache.hadamard import hadamard_transform
from kvcache.spec import GroupSpec

# Cells as planes take them: a slice where they follow each other, so that reading is a view; else int64 [cells].
CellIndex: TypeAlias = slice | Tensor


class KVBuffer(Protocol):
    """Rows of one width for every layer, head and cell of a group."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All that is stored, by name: [layers, heads, cells, ...] each."""
        ...

    @property
    def width(self) -> int:
        """Columns of a row."""
        ...

    def write(self, layer: int, cells: CellIndex, rows: Tensor) -> None:
        """Store one layer's rows [heads, len(cells), width], of any floating type."""
        ...

    def read(self, layer: int, cells: CellIndex, dtype: torch.dtype) -> Tensor:
        """One layer's rows [heads, len(cells), width] as they are stored: behind `spread`. Not to be written."""
        ...

    def transform(self, rows: Tensor) -> Tensor:
        """Rows as the plane stores them, or back: an orthonormal transform that is its own inverse.

        Scores do not change if both sides are spread, so a query is, and keys are read without a transform.

        rows  [..., width], or [..., width of the first part]
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer of a plane: what attention reads."""

    buffer: KVBuffer
    layer: int

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.buffer.width

    def read(self, cells: CellIndex, dtype: torch.dtype) -> Tensor:
        """Rows [heads, len(cells), width] behind `spread`; a view where the format and the cells allow one."""
        return self.buffer.read(self.layer, cells, dtype)

    def transform(self, rows: Tensor) -> Tensor:
        """Plane.transform, in the type of the rows."""
        return self.buffer.transform(rows).to(rows.dtype)


class FloatKVBuffer:
    """Rows as they are, in one floating type: [layers, heads, cells, width]."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The rows."""
        return {"rows": self.rows}

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.rows.shape[-1]

    def write(self, layer: int, cells: CellIndex, rows: Tensor) -> None:
        """Store rows, rounded to the plane's type."""
        _scatter(self.rows[layer], cells, rows)

    def read(self, layer: int, cells: CellIndex, dtype: torch.dtype) -> Tensor:
        """Rows; a view if the cells are a run and the type is the plane's."""
        return _gather(self.rows[layer], cells).to(dtype)

    def transform(self, rows: Tensor) -> Tensor:
        """Nothing is spread."""
        return rows


class Int8KVBuffer:
    """A row part's columns as multiples of its scale, which is a 127th of its largest: off by half a scale at most.

    codes   [layers, heads, cells, width] int8
    scales  [layers, heads, cells, parts] float32: as float16 they would save 1.5 % at width 128, and could overflow
    parts   the widths of the parts of a row
    """

    def __init__(self, codes: Tensor, scales: Tensor, parts: Sequence[int]) -> None:
        self.codes, self.scales, self.parts = codes, scales, list(parts)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Codes and scales."""
        return {"codes": self.codes, "scales": self.scales}

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.codes.shape[-1]

    def write(self, layer: int, cells: CellIndex, rows: Tensor) -> None:
        """Quantise rows, each part of each alone; a part with a value that is not finite reads back as NaN."""
        spread = self.transform(rows).to(torch.promote_types(rows.dtype, torch.float32))
        parts = torch.split(spread, self.parts, -1)
        scales = [(part.abs().amax(-1, keepdim=True) / 127).float() for part in parts]
        # A row of zeros reads back as zeros by any scale, but 0 / 0 is no code.
        scales = [scale.clamp_min(torch.finfo(torch.float32).tiny) for scale in scales]
        codes = [(part / scale).round_() for part, scale in zip(parts, scales, strict=True)]
        if codes:
            _scatter(self.codes[layer], cells, torch.cat(codes, -1))
            _scatter(self.scales[layer], cells, torch.cat(scales, -1))

    def read(self, layer: int, cells: CellIndex, dtype: torch.dtype) -> Tensor:
        """Rows, computed anew."""
        rows, scales = _gather(self.codes[layer], cells).to(dtype), _gather(self.scales[layer], cells)
        for part, scale in zip(torch.split(rows, self.parts, -1), torch.split(scales, 1, -1), strict=True):
            part.mul_(scale)
        return rows

    def transform(self, rows: Tensor) -> Tensor:
        """Nothing is spread."""
        return rows


class HadamardInt8KVBuffer(Int8KVBuffer):
    """Int8 rows, each part behind a Hadamard transform (kvcache/hadamard.py)."""

    def transform(self, rows: Tensor) -> Tensor:
        """Transform every part of the rows, or the first alone if they have no more columns."""
        parts = self.parts if rows.shape[-1] == self.width else self.parts[:1]
        return torch.cat([hadamard_transform(part) for part in torch.split(rows, parts, -1)], -1)


def allocate_kv_buffers(
    spec: GroupSpec, cells: int, dtype: torch.dtype, device: torch.device
) -> tuple[KVBuffer, KVBuffer]:
    """The keys and values of a group's cells, all zeros, in the format that a type stands for."""
    shape = (len(spec.layers), spec.heads, cells)
    if dtype != torch.int8:
        keys, values = (_zeroed_memory((*shape, width), dtype, device) for width in (spec.key_width, spec.value_width))
        return FloatKVBuffer(keys), FloatKVBuffer(values)
    codes, other_codes = (
        _zeroed_memory((*shape, width), dtype, device) for width in (spec.key_width, spec.value_width)
    )
    scales, other_scales = (
        _zeroed_memory((*shape, len(parts)), torch.float32, device) for parts in (spec.key_parts, spec.value_parts)
    )
    return (
        HadamardInt8KVBuffer(codes, scales, spec.key_parts),
        Int8KVBuffer(other_codes, other_scales, spec.value_parts),
    )


def copy_cells(buffer: KVBuffer, sources: Tensor, targets: Tensor) -> None:
    """Copy cells in every layer, bit by bit."""
    for tensor in buffer.tensors.values():
        tensor[:, :, targets] = tensor[:, :, sources]


def _gather(stored: Tensor, cells: CellIndex) -> Tensor:
    return stored[:, cells] if isinstance(cells, slice) else stored.index_select(1, cells)


def _scatter(stored: Tensor, cells: CellIndex, rows: Tensor) -> None:
    if isinstance(cells, slice):
        stored[:, cells] = rows
    else:
        stored.index_copy_(1, cells, rows.to(stored.dtype))


def _zeroed_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not just memory: a cell that was never written must be finite, for it may stand under a mask.

    On a CPU they are pages that the system hands out zeroed when they are first touched; torch would write all of them
    (measured: 7 GiB resident, and seconds, for a cache that was still empty). In small pages: a sequence in a new place
    of the pool touches a page a layer and head, and to zero 2 MiB for each took 0.8 s (30 layers of 3 heads).
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
