"""Attention on the CPU by the C++ kernel: what engine/kernels/reference.py computes, from the pool as it lies.

The kernel reads every key and value once for all query heads that share it, through the table, in whatever format the
pool has; it sums in float32. Where queries and cells are bfloat16, and the processor multiplies that, weights are
rounded to it too. Its rows come out the same, bit for bit, however a prompt was cut into forwards, whatever else the
batch holds, and with any number of threads. It uses as many threads as torch does, from the same OpenMP pool.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.reference import ScoreBias
from kvcache.forward import Segment
from kvcache.kv_buffer import FloatKVBuffer, Int8KVBuffer, LayerKV
from kvcache.spec import AttentionRange

# The enumerations of attention.h.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
REACHES = {"full": 0, "window": 1, "chunk": 2}
_NO_MEMORY, _BAD_CELL = 1, 2
# A segment: row, rows, start, first, run, and the address of the cells.
_SEGMENT = struct.Struct("6q")


class KVBufferFields(Structure):
    """A layer's keys or values, as attention.h has them."""

    _fields_ = [("data", c_void_p), ("scales", c_void_p)] + [
        (name, c_int64) for name in ("width", "head_stride", "cell_stride", "scale_stride")
    ]


class _AttendFields(Structure):
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
        ("reach", c_int64),
        ("reach_size", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("rounds", c_int64),
        ("threads", c_int64),
    ]


@dataclass(frozen=True, slots=True)
class KernelBuffer:
    """A layer's keys or values as they lie: numbers [key_heads, cells, width], scales [key_heads, cells] of int8."""

    numbers: Tensor
    scales: Tensor | None = None


class NativeAttention:
    """The kernel of one library file, which engine/kernels/cpu/build.py provides."""

    def __init__(self, library: Path) -> None:
        self._call = ctypes.CDLL(str(library)).cellar_attend
        self._call.argtypes, self._call.restype = [POINTER(_AttendFields)], c_int64

    def attend(
        self,
        query: Tensor,
        keys: LayerKV,
        values: LayerKV,
        segments: Sequence[Segment],
        reach: AttentionRange,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: ScoreBias | None = None,
    ) -> Tensor:
        """What reference.attend returns; it is asked itself in float64, in other formats, for a bias or mutual ranges.

        Raises ValueError for shapes that do not fit, IndexError for a table that names a cell outside the pool.
        """
        k, v = kernel_buffer(keys), kernel_buffer(values)
        if k is None or v is None or query.dtype == torch.float64 or bias is not None or _is_mutual(segments):
            return reference.attend(
                query, keys, values, segments, reach, scale=scale, softcap=softcap, sinks=sinks, bias=bias
            )
        # Who asks in bfloat16 has rounded queries, and gets no more digits back.
        rounds = query.dtype == torch.bfloat16
        # A mode that looks at every function of torch (engine/model/invariant.py) has nothing to see here.
        with torch._C.DisableTorchFunction():
            queries, bent = _floats(keys.transform(query)), None if sinks is None else _floats(sinks)
            sums = self.attend_float32(
                queries, k, v, segments, reach, scale=scale, softcap=softcap, sinks=bent, rounds=rounds
            )
            return sums.to(query.dtype)

    def attend_float32(
        self,
        query: Tensor,
        keys: KernelBuffer,
        values: KernelBuffer,
        segments: Sequence[Segment],
        reach: AttentionRange,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        rounds: bool = False,
    ) -> Tensor:
        """What `attend` returns, of float32 queries and sinks and as it is summed, in float32.

        rounds  whether queries and weights may be rounded to bfloat16 to meet keys and values in it, where the
                processor is faster so
        """
        _check(query, keys.numbers, values.numbers, sinks, segments)
        output = torch.empty(query.shape[1], query.shape[0], values.numbers.shape[2])
        table = segment_table(segments)
        call = _describe(query, keys, values, sinks, output)
        call.segments, call.segment_count = address(table), len(segments)
        call.reach, call.reach_size = REACHES[reach.kind], reach.size
        call.scale, call.softcap, call.rounds = scale, softcap or 0.0, rounds
        self._run(call)
        return output

    def _run(self, call: _AttendFields) -> None:
        outcome = self._call(byref(call))
        if outcome == _NO_MEMORY:
            raise MemoryError("no memory for the attention of a batch")
        if outcome == _BAD_CELL:
            raise IndexError(f"a table names a cell outside the pool of {call.cells}")


def kernel_buffer(stored: LayerKV) -> KernelBuffer | None:
    """What a layer holds; None in a format that the kernel does not know."""
    plane, layer = stored.buffer, stored.layer
    if isinstance(plane, FloatKVBuffer) and plane.rows.dtype in FORMATS and plane.rows.device.type == "cpu":
        return KernelBuffer(plane.rows[layer])
    # Latents are stored in parts with a scale each.
    if isinstance(plane, Int8KVBuffer) and len(plane.parts) == 1 and plane.codes.device.type == "cpu":
        return KernelBuffer(plane.codes[layer], plane.scales[layer, :, :, 0])
    return None


def _is_mutual(segments: Sequence[Segment]) -> bool:
    """Whether some rows see rows behind them."""
    return any(segment.bidirectional for segment in segments)


def _floats(tensor: Tensor) -> Tensor:
    """The same in float32, its last dimension without gaps."""
    floats = tensor.float()
    return floats if floats.stride(-1) == 1 else floats.contiguous()


def _check(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, segments: Sequence[Segment]) -> None:
    """Raise ValueError for what the kernel, which only sees addresses, would read past."""
    heads, rows, width = query.shape
    sound = {
        "keys and values are of one pool": keys.shape[:2] == values.shape[:2] and keys.dtype == values.dtype,
        "queries are as wide as keys": width == keys.shape[2],
        "heads are a multiple of key heads": heads % keys.shape[0] == 0,
        "columns lie side by side": keys.stride(2) == values.stride(2) == 1,
        "every head has a sink": sinks is None or sinks.shape == (heads,),
        "segments lie in the batch": all(
            0 <= one.batch_slice.start <= one.batch_slice.stop <= rows for one in segments
        ),
        "tables end with the rows": all(_is_whole(one) for one in segments),
    }
    for name, holds in sound.items():
        if not holds:
            raise ValueError(f"the kernel needs that {name}")


def _is_whole(segment: Segment) -> bool:
    """Whether the cells are as many as the positions, and a table is what the kernel reads: int64 side by side."""
    cells, length = (
        segment.cells,
        segment.start + segment.batch_slice.stop - segment.batch_slice.start - segment.oldest_visible,
    )
    if isinstance(cells, slice):
        return bool(cells.stop - cells.start == length)
    return cells.shape == (length,) and cells.dtype == torch.int64 and cells.is_contiguous()


def _describe(
    query: Tensor, keys: KernelBuffer, values: KernelBuffer, sinks: Tensor | None, output: Tensor
) -> _AttendFields:
    """The addresses and sizes of a call but for its segments; the tensors must outlive it."""
    heads, cells, _ = keys.numbers.shape
    return _AttendFields(
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
    """Segments as attention.h has them. The tensors of cells must outlive it."""
    table = array("q", bytes(_SEGMENT.size * len(segments)))
    write_segments(table, segments)
    return table


def write_segments(table: array[int], segments: Sequence[Segment]) -> None:
    """Write segments to a table of as many, see segment_table.

    Numbers in an array take a third of the time of a ctypes structure.
    """
    for at, segment in enumerate(segments):
        rows, cells = segment.batch_slice, segment.cells
        run, place = (cells.start, 0) if isinstance(cells, slice) else (0, cells.data_ptr())
        numbers = (rows.start, rows.stop - rows.start, segment.start, segment.oldest_visible, run, place)
        _SEGMENT.pack_into(table, at * _SEGMENT.size, *numbers)


def address(numbers: array[int]) -> int:
    """Where numbers lie, as long as they live and do not grow."""
    return numbers.buffer_info()[0]


def kv_buffer_fields(rows: KernelBuffer) -> KVBufferFields:
    """The fields of rows, which must outlive them."""
    numbers, scales = rows.numbers, rows.scales
    return KVBufferFields(
        data=numbers.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        width=numbers.shape[2],
        head_stride=numbers.stride(0),
        cell_stride=numbers.stride(1),
        scale_stride=0 if scales is None else scales.stride(0),
    )
