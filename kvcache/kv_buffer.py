"""KV buffers: storage of the keys or values of one pool. A row is one cell's vector in one layer and head.

float          rows in any floating type; reading a run of cells in that type is a view
int8           one byte a column and one float32 scale for each part of a row
Hadamard int8  int8 after a Hadamard transform, for keys: a few large columns would set the scale of all others

Each row is quantised alone: stored content depends neither on the batch nor on the chunk size.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from kvcache.spec import GroupSpec

# Index of cells: a slice for one run, so that a read is a view; else int64 [cells].
CellIndex: TypeAlias = slice | Tensor


class KVBuffer(Protocol):
    """Rows of one width for every layer, head and cell of a group."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The stored tensors by name: [layers, heads, cells, ...] each."""
        ...

    @property
    def width(self) -> int:
        """Columns of a row."""
        ...

    def write(self, layer: int, cells: CellIndex, rows: Tensor) -> None:
        """Store one layer's rows [heads, len(cells), width], of any floating type."""
        ...

    def read(self, layer: int, cells: CellIndex, dtype: torch.dtype) -> Tensor:
        """One layer's rows [heads, len(cells), width], with `transform` applied; read only."""
        ...

    def round(self, rows: Tensor) -> Tensor:
        """Rows [..., width] as they are read back from cells, without a transform, in their own type."""
        ...

    def transform(self, rows: Tensor) -> Tensor:
        """The orthonormal transform of stored rows, which is its own inverse.

        Attention scores are unchanged if queries and keys are transformed alike, so keys are read without an inverse.

        rows  [..., width], or [..., width of the first part]
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer of a KV buffer, as attention kernels read it."""

    buffer: KVBuffer
    layer: int

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.buffer.width

    def read(self, cells: CellIndex, dtype: torch.dtype) -> Tensor:
        """Rows [heads, len(cells), width] with `transform` applied; a view where format and cells allow one."""
        return self.buffer.read(self.layer, cells, dtype)

    def transform(self, rows: Tensor) -> Tensor:
        """KVBuffer.transform, in the type of the rows."""
        return self.buffer.transform(rows).to(rows.dtype)


class FloatKVBuffer:
    """Rows in one floating type: [layers, heads, cells, width]."""

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
        """Store rows, rounded to the type of the buffer."""
        _scatter(self.rows[layer], cells, rows)

    def read(self, layer: int, cells: CellIndex, dtype: torch.dtype) -> Tensor:
        """Rows; a view if the cells are one run and `dtype` is the type of the buffer."""
        return _gather(self.rows[layer], cells).to(dtype)

    def round(self, rows: Tensor) -> Tensor:
        return rows.to(self.rows.dtype).to(rows.dtype)

    def transform(self, rows: Tensor) -> Tensor:
        """The identity."""
        return rows


class Int8KVBuffer:
    """Rows as int8 codes with a scale for each part: part = codes * scale, scale = max |part| / 127.

    codes   [layers, heads, cells, width] int8
    scales  [layers, heads, cells, parts] float32: float16 would save 1.5 % at width 128, but could overflow
    parts   widths of the parts of a row
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
        """Quantise rows; a part with a value that is not finite reads back as NaN."""
        if self.parts:
            codes, scales = self._quantise(rows)
            _scatter(self.codes[layer], cells, codes)
            _scatter(self.scales[layer], cells, scales)

    def read(self, layer: int, cells: CellIndex, dtype: torch.dtype) -> Tensor:
        """Dequantised rows."""
        return self._dequantise(_gather(self.codes[layer], cells), _gather(self.scales[layer], cells), dtype)

    def round(self, rows: Tensor) -> Tensor:
        if not self.parts:
            return rows
        return self.transform(self._dequantise(*self._quantise(rows), rows.dtype)).to(rows.dtype)

    def _quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The codes, which are whole numbers, and the scales of rows."""
        transformed = self.transform(rows).to(torch.promote_types(rows.dtype, torch.float32))
        parts = torch.split(transformed, self.parts, -1)
        scales = [(part.abs().amax(-1, keepdim=True) / 127).float() for part in parts]
        # Zeros read back as zeros with any scale, but 0 / 0 has no code.
        scales = [scale.clamp_min(torch.finfo(torch.float32).tiny) for scale in scales]
        codes = [(part / scale).round_() for part, scale in zip(parts, scales, strict=True)]
        return torch.cat(codes, -1).to(torch.int8), torch.cat(scales, -1)

    def _dequantise(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        rows = codes.to(dtype)
        for part, scale in zip(torch.split(rows, self.parts, -1), torch.split(scales, 1, -1), strict=True):
            part.mul_(scale)
        return rows

    def transform(self, rows: Tensor) -> Tensor:
        """The identity."""
        return rows


class HadamardInt8KVBuffer(Int8KVBuffer):
    """Int8 rows; each part is Hadamard-transformed."""

    def transform(self, rows: Tensor) -> Tensor:
        """Transform every part of the rows, or the first part alone if `rows` has no more columns."""
        parts = self.parts if rows.shape[-1] == self.width else self.parts[:1]
        return torch.cat([hadamard_transform(part) for part in torch.split(rows, parts, -1)], -1)


def allocate_kv_buffers(
    spec: GroupSpec, cells: int, dtype: torch.dtype, device: torch.device
) -> tuple[KVBuffer, KVBuffer]:
    """Zeroed buffers for the keys and the values of a group's cells."""
    shape = (len(spec.layers), spec.heads, cells)
    if dtype != torch.int8:
        keys, values = (_zeroed_memory((*shape, width), dtype, device) for width in (spec.key_width, spec.value_width))
        return FloatKVBuffer(keys), FloatKVBuffer(values)
    key_codes, value_codes = (
        _zeroed_memory((*shape, width), dtype, device) for width in (spec.key_width, spec.value_width)
    )
    key_scales, value_scales = (
        _zeroed_memory((*shape, len(parts)), torch.float32, device) for parts in (spec.key_parts, spec.value_parts)
    )
    return (
        HadamardInt8KVBuffer(key_codes, key_scales, spec.key_parts),
        Int8KVBuffer(value_codes, value_scales, spec.value_parts),
    )


class StoreFunction(Protocol):
    """The interface of `store_rows` and the kernels."""

    def __call__(self, keys: LayerKV, values: LayerKV, cells: CellIndex, key_rows: Tensor, value_rows: Tensor) -> None:
        """Store rows [heads, len(cells), width] of one layer, of any floating type."""
        ...


def store_rows(keys: LayerKV, values: LayerKV, cells: CellIndex, key_rows: Tensor, value_rows: Tensor) -> None:
    """Store rows [heads, len(cells), width] of one layer, of any floating type."""
    keys.buffer.write(keys.layer, cells, key_rows)
    values.buffer.write(values.layer, cells, value_rows)


def copy_cells(buffer: KVBuffer, sources: Tensor, targets: Tensor) -> None:
    """Copy cells in every layer without requantising."""
    for tensor in buffer.tensors.values():
        tensor[:, :, targets] = tensor[:, :, sources]


def hadamard_transform(rows: Tensor) -> Tensor:
    """Rows times the orthonormal Hadamard matrix, which is its own inverse; in float32 or better.

    rows  [..., width]; a width that is no power of two is split into equal blocks of its largest power-of-two divisor

    It spreads outlier columns over the whole block before quantisation (QuaRot, arXiv 2404.00456, section 4.2).
    Sums and differences of pairs only: the bits of a row do not depend on its neighbours, as they would in a matrix
    product (for a single row of 8 heads of 128 columns that would take 6 us instead of 72).
    """
    # Columns first: each stage then reads and writes long contiguous runs, alternating between two buffers.
    exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
    columns = exact.movedim(-1, 0).clone(memory_format=torch.contiguous_format)
    other, width = torch.empty_like(columns), columns.shape[0]
    block, half = width & -width, 1  # the lowest set bit
    while half < block:
        pairs = (width // (2 * half), 2, half, *columns.shape[1:])
        (first, second), (total, difference) = columns.view(pairs).unbind(1), other.view(pairs).unbind(1)
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        columns, other, half = other, columns, 2 * half
    return columns.div(math.sqrt(block)).movedim(0, -1)


def _gather(stored: Tensor, cells: CellIndex) -> Tensor:
    return stored[:, cells] if isinstance(cells, slice) else stored.index_select(1, cells)


def _scatter(stored: Tensor, cells: CellIndex, rows: Tensor) -> None:
    if isinstance(cells, slice):
        stored[:, cells] = rows
    else:
        stored.index_copy_(1, cells, rows.to(stored.dtype))


def _zeroed_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: a cell that was never written must be finite, because a masked read may include it.

    On a CPU the pages are mapped and zeroed by the system on first use; torch.zeros would write all of them (measured:
    7 GiB resident, and seconds, for an empty cache). Huge pages are off: a sequence at a new place of the pool touches
    one page for each layer and head, and zeroing 2 MiB for each took 0.8 s (30 layers of 3 heads).
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
