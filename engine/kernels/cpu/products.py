"""Row-invariant products (engine/kernels/products.py) on the CPU by the C++ kernel.

A number of a product is summed in one order, whatever stands beside it and with any number of threads.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

# The enumeration of linear.h.
_FORMATS = {torch.float32: 0, torch.bfloat16: 1}


class _PlainProductFields(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("rows", "weights", "output")),
        *((name, c_int64) for name in ("format", "batch", "count", "outputs", "columns")),
        *((name, c_int64) for name in ("row_stride", "row_batch_stride", "weight_stride", "weight_batch_stride")),
        ("threads", c_int64),
    ]


class NativeProduct:
    """The kernel of one library file of `linear`, of a variant with vectors. See Product."""

    def __init__(self, library: Path) -> None:
        self._call = ctypes.CDLL(str(library)).cellar_multiply_plain
        self._call.argtypes, self._call.restype = [POINTER(_PlainProductFields)], c_int64

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The product [rows, outputs] of rows [rows, columns] and a weight [outputs, columns]."""
        return self._multiply(rows[None], weight[None])[0]

    def batch(self, left: Tensor, right: Tensor) -> Tensor:
        """The products [batch, rows, columns] of [batch, rows, inner] and [batch, inner, columns]."""
        return self._multiply(left, right.mT)

    def _multiply(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Rows [batch, rows, columns] times weights [batch, outputs, columns]."""
        known = _side_by_side(rows.float())
        stored = _side_by_side(weights if weights.dtype in _FORMATS else weights.float())
        batch, count, columns = known.shape
        output = torch.empty(batch, count, stored.shape[1])
        self._call(
            byref(
                _PlainProductFields(
                    rows=known.data_ptr(),
                    weights=stored.data_ptr(),
                    output=output.data_ptr(),
                    format=_FORMATS[stored.dtype],
                    batch=batch,
                    count=count,
                    outputs=stored.shape[1],
                    columns=columns,
                    row_stride=known.stride(1),
                    row_batch_stride=known.stride(0),
                    weight_stride=stored.stride(1),
                    weight_batch_stride=stored.stride(0),
                    threads=torch.get_num_threads(),
                )
            )
        )
        return output.to(rows.dtype)


def _side_by_side(tensor: Tensor) -> Tensor:
    """The same, its last dimension without gaps."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
