"""Products of rows and quantised matrices on the CPU by the C++ kernel, with the interface of engine/kernels/linear.py.

A row has the same bits for any batch and any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine.kernels.blocks import EXACT_FORMATS, InfiniteScale, allocate_packed, check_exponents, dequantize
from engine.kernels.cpu.build.layout import Mirrors, check_layout
from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.kernels.linear import MultiplyRows
from engine.kernels.packing import PackedMatrix, PackedStorage

# The enumerations of format.h: of rows and outputs.
FORMATS = {torch.float32: 0, torch.bfloat16: 1}
# Those of weights, after float32 and bfloat16.
WEIGHT_FORMATS: dict[WeightFormat, int] = {format: 2 + index for index, format in enumerate(LAYOUTS)}


class _MatrixFields(Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("format", c_int64),
        ("outputs", c_int64),
        ("output", c_void_p),
    ]


class _CallFields(Structure):
    _fields_ = [
        ("input", c_void_p),
        *((name, c_int64) for name in ("format", "stride", "rows", "columns")),
        ("matrices", POINTER(_MatrixFields)),
        *((name, c_int64) for name in ("count", "threads")),
    ]


class PlainCallFields(Structure):
    """`PlainLinearCall` of linear.h, for engine/kernels/cpu/products/row_invariant.py."""

    _fields_ = [
        *((name, c_void_p) for name in ("rows", "weights", "output")),
        *((name, c_int64) for name in ("format", "batch", "count", "outputs", "columns")),
        *((name, c_int64) for name in ("row_stride", "row_batch_stride", "weight_stride", "weight_batch_stride")),
        ("threads", c_int64),
    ]


class _BlockFields(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("blocks", "codes", "scales")),
        *((name, c_int64) for name in ("type", "outputs", "columns", "threads")),
    ]


class _UnpackFields(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("blocks", "numbers")),
        *((name, c_int64) for name in ("type", "outputs", "columns", "threads")),
    ]


# By the names in linear.h.
_MIRRORS: Mirrors = {
    "QuantisedMatrix": _MatrixFields,
    "LinearCall": _CallFields,
    "BlockCall": _BlockFields,
    "UnpackCall": _UnpackFields,
    "PlainLinearCall": PlainCallFields,
}


def load_library(file: Path) -> ctypes.CDLL:
    """Load a library of `linear`. Raises OSError; LayoutMismatch (an OSError) if its structures have another layout."""
    library = ctypes.CDLL(str(file))
    check_layout(library, _MIRRORS)
    return library


class NativeLinear:
    """The kernel of one library file, which engine/kernels/cpu/build/libraries.py provides."""

    def __init__(self, file: Path) -> None:
        """Raises OSError if the file cannot be loaded."""
        library = load_library(file)
        self._call, self._pack = library.cellar_multiply, library.cellar_pack_blocks
        self._call.argtypes, self._call.restype = [POINTER(_CallFields)], c_int64
        self._pack.argtypes, self._pack.restype = [POINTER(_BlockFields)], c_int64
        self._unpack = library.cellar_unpack_blocks
        self._unpack.argtypes, self._unpack.restype = [POINTER(_UnpackFields)], c_int64

    def prepare(self, matrices: Sequence[PackedMatrix]) -> MultiplyRows:
        """A function as of engine.kernels.linear.prepare, with float32 sums. Not thread-safe."""
        return _PreparedMatrices(self._call, matrices)

    def multiply(self, rows: Tensor, matrices: Sequence[PackedMatrix]) -> list[Tensor]:
        """See engine.kernels.linear.multiply."""
        return self.prepare(matrices)(rows)

    def pack_blocks(
        self, blocks: Tensor, type: GGMLQuantizationType, storage: PackedStorage | None = None
    ) -> PackedMatrix | None:
        """See engine.kernels.blocks.pack_blocks."""
        packed = allocate_packed(blocks, type, storage)
        if packed is None:
            return None
        check_exponents(blocks, type)
        rows = blocks.contiguous()
        fields = _BlockFields(
            rows.data_ptr(),
            packed.codes.data_ptr(),
            packed.scales.data_ptr(),
            int(type),
            packed.outputs,
            packed.columns,
            torch.get_num_threads(),
        )
        if self._pack(byref(fields)):
            raise InfiniteScale(type)
        return packed

    def dequantize(self, blocks: Tensor, type: GGMLQuantizationType) -> Tensor | None:
        """See engine.kernels.blocks.dequantize."""
        if type not in EXACT_FORMATS:
            return dequantize(blocks, type)
        columns, size = GGML_QUANT_SIZES[type]
        rows = blocks.contiguous()
        numbers = torch.empty(len(rows), rows.shape[1] // size * columns)
        fields = _UnpackFields(rows.data_ptr(), numbers.data_ptr(), int(type), *numbers.shape, torch.get_num_threads())
        self._unpack(byref(fields))
        return numbers


class _PreparedMatrices:
    """Matrices, described to the kernel once."""

    def __init__(self, call: Any, matrices: Sequence[PackedMatrix]) -> None:
        self._call, self._packed = call, list(matrices)
        [self._columns] = {matrix.columns for matrix in matrices}
        self._matrices = (_MatrixFields * len(matrices))(*map(_describe, matrices))
        self._fields = _CallFields(columns=self._columns, matrices=self._matrices, count=len(matrices))

    def __call__(self, rows: Tensor) -> list[Tensor]:
        """The products. Raises ValueError for rows of another width."""
        # A torch function mode (engine/model/invariant.py) has nothing to do here.
        with torch._C.DisableTorchFunction():
            return self._multiply(rows)

    def _multiply(self, rows: Tensor) -> list[Tensor]:
        count, columns = rows.shape
        if columns != self._columns:
            raise ValueError(f"rows of {columns} columns do not fit matrices of {self._columns}")
        inputs = rows if rows.dtype in FORMATS else rows.float()
        if inputs.stride(1) != 1:
            inputs = inputs.contiguous()
        outputs = [torch.empty(count, matrix.outputs, dtype=inputs.dtype) for matrix in self._packed]
        for fields, output in zip(self._matrices, outputs, strict=True):
            fields.output = output.data_ptr()
        call = self._fields
        call.input, call.format = inputs.data_ptr(), FORMATS[inputs.dtype]
        call.stride, call.rows, call.threads = inputs.stride(0), count, torch.get_num_threads()
        if self._call(byref(call)):
            raise MemoryError(f"no memory for {count} rows of {columns} columns")
        return outputs if inputs.dtype == rows.dtype else [output.to(rows.dtype) for output in outputs]


def _describe(matrix: PackedMatrix) -> _MatrixFields:
    return _MatrixFields(
        matrix.codes.data_ptr(), matrix.scales.data_ptr(), WEIGHT_FORMATS[matrix.format], matrix.outputs
    )
