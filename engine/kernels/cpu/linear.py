"""Rows times quantised matrices on the CPU by the C++ kernel: what engine/kernels/linear.py computes.

A row comes out the same, bit for bit, whatever rows stand beside it and with any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels.packing import Packed


class _Matrix(Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("bits", c_int64),
        ("outputs", c_int64),
        ("output", c_void_p),
    ]


class _Product(Structure):
    _fields_ = [
        ("input", c_void_p),
        *((name, c_int64) for name in ("stride", "rows", "columns")),
        ("matrices", POINTER(_Matrix)),
        *((name, c_int64) for name in ("count", "threads")),
    ]


class NativeLinear:
    """The kernel of one library file, which engine/kernels/cpu/build.py provides."""

    def __init__(self, library: Path) -> None:
        self._call = ctypes.CDLL(str(library)).cellar_multiply
        self._call.argtypes, self._call.restype = [POINTER(_Product)], c_int64

    def multiply(self, rows: Tensor, matrices: Sequence[Packed]) -> list[Tensor]:
        """What engine.kernels.linear.multiply returns, computed in float32. Raises ValueError where widths differ."""
        count, columns = rows.shape
        if any(matrix.columns != columns for matrix in matrices):
            raise ValueError(f"rows of {columns} columns do not fit {[matrix.columns for matrix in matrices]}")
        floats = rows.float()
        if floats.stride(1) != 1:
            floats = floats.contiguous()
        outputs = [torch.empty(count, matrix.outputs) for matrix in matrices]
        described = (_Matrix * len(matrices))(*map(_describe, matrices, outputs))
        product = _Product(
            floats.data_ptr(), floats.stride(0), count, columns, described, len(matrices), torch.get_num_threads()
        )
        if self._call(byref(product)):
            raise MemoryError(f"no memory for {count} rows of {columns} columns")
        return outputs if rows.dtype == torch.float32 else [output.to(rows.dtype) for output in outputs]


def _describe(matrix: Packed, output: Tensor) -> _Matrix:
    return _Matrix(matrix.codes.data_ptr(), matrix.scales.data_ptr(), matrix.bits, matrix.outputs, output.data_ptr())
