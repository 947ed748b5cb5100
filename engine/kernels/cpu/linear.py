"""Rows times quantised matrices on the CPU by the C++ kernel: what engine/kernels/linear.py computes.

A row comes out the same, bit for bit, whatever rows stand beside it and with any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.kernels.linear import MultiplyRows
from engine.kernels.packing import PackedMatrix

# The enumeration of linear.h.
_FORMATS = {torch.float32: 0, torch.bfloat16: 1}


class _MatrixFields(Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("bits", c_int64),
        ("outputs", c_int64),
        ("output", c_void_p),
    ]


class _ProductFields(Structure):
    _fields_ = [
        ("input", c_void_p),
        *((name, c_int64) for name in ("format", "stride", "rows", "columns")),
        ("matrices", POINTER(_MatrixFields)),
        *((name, c_int64) for name in ("count", "threads")),
    ]


class NativeLinear:
    """The kernel of one library file, which engine/kernels/cpu/build.py provides."""

    def __init__(self, library: Path) -> None:
        self._call = ctypes.CDLL(str(library)).cellar_multiply
        self._call.argtypes, self._call.restype = [POINTER(_ProductFields)], c_int64

    def prepare(self, matrices: Sequence[PackedMatrix]) -> MultiplyRows:
        """What returns, for rows, what engine.kernels.linear.multiply does, from float32 sums. For one thread's use."""
        return _PreparedMatrices(self._call, matrices)

    def multiply(self, rows: Tensor, matrices: Sequence[PackedMatrix]) -> list[Tensor]:
        """The same for once."""
        return self.prepare(matrices)(rows)


class _PreparedMatrices:
    """Some matrices, described to the kernel once."""

    def __init__(self, call: Any, matrices: Sequence[PackedMatrix]) -> None:
        self._call, self._held = call, list(matrices)
        [self._columns] = {matrix.columns for matrix in matrices}
        self._matrices = (_MatrixFields * len(matrices))(*map(_describe, matrices))
        self._product = _ProductFields(columns=self._columns, matrices=self._matrices, count=len(matrices))

    def __call__(self, rows: Tensor) -> list[Tensor]:
        """The products. Raises ValueError for rows of another width."""
        # A mode that looks at every function of torch (engine/model/invariant.py) has nothing to see here.
        with torch._C.DisableTorchFunction():
            return self._multiply(rows)

    def _multiply(self, rows: Tensor) -> list[Tensor]:
        count, columns = rows.shape
        if columns != self._columns:
            raise ValueError(f"rows of {columns} columns do not fit matrices of {self._columns}")
        known = rows if rows.dtype in _FORMATS else rows.float()
        if known.stride(1) != 1:
            known = known.contiguous()
        outputs = [torch.empty(count, matrix.outputs, dtype=known.dtype) for matrix in self._held]
        for described, output in zip(self._matrices, outputs, strict=True):
            described.output = output.data_ptr()
        product = self._product
        product.input, product.format = known.data_ptr(), _FORMATS[known.dtype]
        product.stride, product.rows, product.threads = known.stride(0), count, torch.get_num_threads()
        if self._call(byref(product)):
            raise MemoryError(f"no memory for {count} rows of {columns} columns")
        return outputs if known.dtype == rows.dtype else [output.to(rows.dtype) for output in outputs]


def _describe(matrix: PackedMatrix) -> _MatrixFields:
    return _MatrixFields(matrix.codes.data_ptr(), matrix.scales.data_ptr(), matrix.bits, matrix.outputs)
