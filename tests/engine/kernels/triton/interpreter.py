"""The Triton kernels on the device of the tests: a GPU if there is one, else the CPU, by Triton's interpreter.

Test modules import the kernels from here, and are skipped where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcache.forward import Segment
from kvcache.kv_buffer import FloatKVBuffer, HadamardInt8KVBuffer, Int8KVBuffer, KVBuffer
from tests.engine.kernels.test_attention import Batch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# The interpreter multiplies the bits of bfloat16 numbers as integers.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16

pytest.importorskip("triton", reason="Triton is installed on Linux for x86-64 only", exc_type=ImportError)

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

from engine.kernels.triton import check, launch, linear  # noqa: E402
from engine.kernels.triton import kernels as kernels_module  # noqa: E402
from engine.kernels.triton.batch import DECODE_ROWS, SegmentArrays, Tiling, make_tables  # noqa: E402
from engine.kernels.triton.kernels import TritonKernels  # noqa: E402

__all__ = [
    "DECODE_ROWS",
    "DEVICE",
    "HALF",
    "SegmentArrays",
    "Tiling",
    "TritonKernels",
    "check",
    "kernels_module",
    "launch",
    "linear",
    "make_tables",
]

# The interpreter takes a millisecond for a block of a tile, so tests have small ones.
SMALL = Tiling(decode=16, prompt=32, split=64, block=32)
ONE_TILE = replace(SMALL, prompt=16)


_dot_of_numpy = InterpreterBuilder.create_dot


def _dot(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: Any) -> TensorHandle:
    """The interpreter's tl.dot with sums in float64: in numpy's float32, a row's bits depend on its place in a tile."""
    if a.data.dtype.kind != "f":
        return _dot_of_numpy(builder, a, b, d, *options)
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


InterpreterBuilder.create_dot = _dot


def on_device(work: Batch) -> Batch:
    """The batch on the device of the tests."""
    segments = tuple(
        replace(one, cells=one.cells.to(DEVICE)) if isinstance(one.cells, Tensor) else one for one in work.segments
    )
    return replace(
        work,
        query=work.query.to(DEVICE),
        keys=buffer_on_device(work.keys),
        values=buffer_on_device(work.values),
        segments=segments,
    )


def buffer_on_device(buffer: KVBuffer) -> KVBuffer:
    """A copy of the buffer on the device of the tests."""
    if isinstance(buffer, FloatKVBuffer):
        return FloatKVBuffer(buffer.rows.to(DEVICE, copy=True))
    assert isinstance(buffer, Int8KVBuffer)
    kind = HadamardInt8KVBuffer if isinstance(buffer, HadamardInt8KVBuffer) else Int8KVBuffer
    return kind(buffer.codes.to(DEVICE, copy=True), buffer.scales.to(DEVICE, copy=True), buffer.parts)


def alone(work: Batch, number: int) -> Batch:
    """One sequence of the batch without the others."""
    segment = work.segments[number]
    rows = segment.batch_slice
    moved = replace(segment, batch_slice=slice(0, rows.stop - rows.start))
    return replace(work, query=work.query[:, rows], segments=(moved,))


def cut(segment: Segment, start: int, stop: int, row: int, oldest_visible: int) -> Segment:
    """Rows [start, stop) of a segment as a chunk from row `row` on."""
    assert isinstance(segment.cells, Tensor)
    assert segment.oldest_visible == 0
    own = segment.cells[oldest_visible : segment.start + stop]
    return Segment(slice(row, row + stop - start), segment.start + start, own, oldest_visible)
