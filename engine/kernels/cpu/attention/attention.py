"""Attention on the CPU by the C++ kernel, with the interface of engine/kernels/reference.py.

The kernel reads each key and value once for all query heads that share it, through the cell table, in the dtype of the
pool, and sums in float32. Softmax weights for bfloat16 cells are rounded to bfloat16 if the queries are bfloat16 and
the processor multiplies it. A row has the same bits for any chunks of the prompt, any batch and any number of threads.
It uses as many threads as torch, of the same OpenMP pool.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.attention_input import AttentionInput
from engine.kernels.cpu.build.layout import Mirrors, check_layout, struct_of
from kvcache.forward import Segment
from kvcache.kv_buffer import FloatKVBuffer, Int8KVBuffer, LayerKV

# The enumerations of attention.h.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
ATTENTION_RANGES = {"full": 0, "window": 1, "chunk": 2}
_NO_MEMORY, _BAD_CELL = 1, 2


class SegmentFields(Structure):
    """`Segment` of attention.h."""

    _fields_ = [(name, c_int64) for name in ("row", "rows", "start", "first", "first_cell")] + [("cells", c_void_p)]


_SEGMENT = struct_of(SegmentFields)


class KVBufferFields(Structure):
    """`KVBuffer` of attention.h."""

    _fields_ = [("data", c_void_p), ("scales", c_void_p)] + [
        (name, c_int64)
        for name in ("width", "head_stride", "cell_stride", "scale_head_stride", "scale_cell_stride", "part_width")
    ]


class _AttentionCallFields(Structure):
    _fields_ = [
        ("query", c_void_p),
        ("query_head_stride", c_int64),
        ("query_row_stride", c_int64),
        ("output", c_void_p),
        ("sinks", c_void_p),
        ("segments", c_void_p),
        ("segment_count", c_int64),
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("cells", c_int64),
        ("keys", KVBufferFields),
        ("values", KVBufferFields),
        ("format", c_int64),
        ("attention_range", c_int64),
        ("attention_range_size", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("rounds_to_bfloat16", c_int64),
        ("threads", c_int64),
    ]


# By the names in attention.h.
_MIRRORS: Mirrors = {
    "Segment": SegmentFields,
    "KVBuffer": KVBufferFields,
    "AttentionCall": _AttentionCallFields,
}


@dataclass(frozen=True, slots=True)
class KernelBuffer:
    """The keys or values of a layer as stored.

    numbers     [key_heads, cells, width]
    scales      [key_heads, cells, parts] of int8; None: other formats
    part_width  columns of the first part; there are at most two
    """

    numbers: Tensor
    scales: Tensor | None
    part_width: int

    @classmethod
    def of(cls, layer: LayerKV) -> KernelBuffer | None:
        """The stored rows of a layer; None for a KV dtype or device that the kernel does not support."""
        buffer, index = layer.buffer, layer.layer
        if isinstance(buffer, FloatKVBuffer) and buffer.rows.dtype in FORMATS and buffer.rows.device.type == "cpu":
            return cls(buffer.rows[index], None, buffer.width)
        if isinstance(buffer, Int8KVBuffer) and buffer.codes.device.type == "cpu":
            return cls(buffer.codes[index], buffer.scales[index], buffer.parts[0] if buffer.parts else 0)
        return None

    @property
    def has_parts(self) -> bool:
        """Whether rows have two parts, with a scale each."""
        return self.part_width != self.numbers.shape[2]

    def first(self, width: int) -> KernelBuffer:
        """The first columns, which are within the first part."""
        return replace(self, numbers=self.numbers[..., :width], part_width=min(width, self.part_width))


class NativeAttention:
    """The kernel of one library file, which engine/kernels/cpu/build/libraries.py provides."""

    def __init__(self, file: Path) -> None:
        """Raises OSError if the file cannot be loaded, LayoutMismatch (an OSError) for other structures."""
        library = ctypes.CDLL(str(file))
        check_layout(library, _MIRRORS)
        self._call = library.cellar_attend
        self._call.argtypes, self._call.restype = [POINTER(_AttentionCallFields)], c_int64

    def attend(self, inputs: AttentionInput) -> Tensor:
        """See reference.attend, which computes float64, other KV dtypes, bias and bidirectional ranges.

        Raises ValueError for shapes that do not fit, IndexError for a table that names a cell outside the pool.
        """
        query, k, v = inputs.query, KernelBuffer.of(inputs.keys), KernelBuffer.of(inputs.values)
        is_reference = query.dtype == torch.float64 or inputs.bias is not None or _has_bidirectional(inputs.segments)
        if k is None or v is None or k.has_parts or v.has_parts or is_reference:
            return reference.attend(inputs)
        # A torch function mode (engine/model/invariant.py) has nothing to do here.
        with torch._C.DisableTorchFunction():
            transformed = _float32(inputs.keys.transform(query))
            # The queries are rounded already, and so is the output.
            output = self.attend_float32(inputs, transformed, k, v, rounds_to_bfloat16=query.dtype == torch.bfloat16)
            return output.to(query.dtype)

    def attend_float32(
        self,
        inputs: AttentionInput,
        query: Tensor,
        keys: KernelBuffer,
        values: KernelBuffer,
        *,
        rounds_to_bfloat16: bool = False,
    ) -> Tensor:
        """The output of `attend` in float32.

        query               of the inputs in float32, transformed as the keys are
        keys, values        of the inputs
        rounds_to_bfloat16  whether queries and weights may be rounded for products with bfloat16 keys and values, where
                            the processor is faster so
        """
        segments, attention_range = inputs.segments, inputs.attention_range
        sinks = None if inputs.sinks is None else _float32(inputs.sinks)
        _check(query, keys.numbers, values.numbers, sinks, segments)
        output = torch.empty(query.shape[1], query.shape[0], values.numbers.shape[2])
        table = segment_table(segments)
        call = _describe(query, keys, values, sinks, output)
        call.segments, call.segment_count = address(table), len(segments)
        call.attention_range = ATTENTION_RANGES[attention_range.kind]
        call.attention_range_size = attention_range.size
        call.scale, call.softcap, call.rounds_to_bfloat16 = inputs.scale, inputs.softcap or 0.0, rounds_to_bfloat16
        self._run(call)
        return output

    def _run(self, call: _AttentionCallFields) -> None:
        outcome = self._call(byref(call))
        if outcome == _NO_MEMORY:
            raise MemoryError("no memory for the attention of a batch")
        if outcome == _BAD_CELL:
            raise IndexError(f"a table names a cell outside the pool of {call.cells}")


def _has_bidirectional(segments: Sequence[Segment]) -> bool:
    return any(segment.bidirectional for segment in segments)


def _float32(tensor: Tensor) -> Tensor:
    """In float32, the last dimension contiguous."""
    floats = tensor.float()
    return floats if floats.stride(-1) == 1 else floats.contiguous()


def _check(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, segments: Sequence[Segment]) -> None:
    """Raise ValueError for shapes with which the kernel would read outside the tensors."""
    heads, rows, width = query.shape
    conditions = {
        "keys and values are of one pool": keys.shape[:2] == values.shape[:2] and keys.dtype == values.dtype,
        "queries are as wide as keys": width == keys.shape[2],
        "heads are a multiple of key heads": heads % keys.shape[0] == 0,
        "columns are contiguous": keys.stride(2) == values.stride(2) == 1,
        "every head has a sink": sinks is None or sinks.shape == (heads,),
        "segments are in the batch": all(
            0 <= segment.batch_slice.start <= segment.batch_slice.stop <= rows for segment in segments
        ),
        "tables end with the rows": all(_is_whole(segment) for segment in segments),
    }
    for name, holds in conditions.items():
        if not holds:
            raise ValueError(f"the kernel needs that {name}")


def _is_whole(segment: Segment) -> bool:
    """Whether there is a cell for each position, and a table is contiguous int64."""
    rows = segment.batch_slice.stop - segment.batch_slice.start
    cells, length = segment.cells, segment.start + rows - segment.oldest_visible
    if isinstance(cells, slice):
        return bool(cells.stop - cells.start == length)
    return cells.shape == (length,) and cells.dtype == torch.int64 and cells.is_contiguous()


def _describe(
    query: Tensor, keys: KernelBuffer, values: KernelBuffer, sinks: Tensor | None, output: Tensor
) -> _AttentionCallFields:
    """A call without its segments; the tensors must outlive it."""
    heads, cells, _ = keys.numbers.shape
    return _AttentionCallFields(
        query=query.data_ptr(),
        query_head_stride=query.stride(0),
        query_row_stride=query.stride(1),
        output=output.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        heads=query.shape[0],
        key_heads=heads,
        cells=cells,
        keys=kv_buffer_fields(keys),
        values=kv_buffer_fields(values),
        format=FORMATS[keys.numbers.dtype],
        threads=torch.get_num_threads(),
    )


def segment_table(segments: Sequence[Segment]) -> array[int]:
    """The Segment (attention.h) of each segment. The tensors of cells must outlive it."""
    table = array("q", bytes(_SEGMENT.size * len(segments)))
    write_segments(table, segments)
    return table


def write_segments(table: array[int], segments: Sequence[Segment]) -> None:
    """Overwrite a segment_table of the same length. struct.pack_into takes a third of the time of ctypes structures."""
    for index, segment in enumerate(segments):
        rows, cells = segment.batch_slice, segment.cells
        first_cell, cell_table = (cells.start, 0) if isinstance(cells, slice) else (0, cells.data_ptr())
        numbers = (rows.start, rows.stop - rows.start, segment.start, segment.oldest_visible, first_cell, cell_table)
        _SEGMENT.pack_into(table, index * _SEGMENT.size, *numbers)


def address(numbers: array[int]) -> int:
    """The address of an array, valid until it is resized or deleted."""
    return numbers.buffer_info()[0]


def kv_buffer_fields(buffer: KernelBuffer) -> KVBufferFields:
    """The fields of a buffer, which must outlive them."""
    numbers, scales = buffer.numbers, buffer.scales
    return KVBufferFields(
        data=numbers.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        width=numbers.shape[2],
        head_stride=numbers.stride(0),
        cell_stride=numbers.stride(1),
        scale_head_stride=0 if scales is None else scales.stride(0),
        scale_cell_stride=0 if scales is None else scales.stride(1),
        part_width=buffer.part_width,
    )
