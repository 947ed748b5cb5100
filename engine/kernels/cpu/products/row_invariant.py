"""Row-invariant products (engine/kernels/products.py) on the CPU by the C++ kernel.

Each number is summed in a fixed order, for any batch and any number of threads.
"""

from __future__ import annotations

from ctypes import POINTER, byref, c_int64
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels.cpu.products.linear import FORMATS, PlainCallFields, load_library
from engine.kernels.products import HostProduct


class NativeProduct(HostProduct):
    """The kernel of one library file of `linear`, of a variant with vectors; implements RowInvariantProduct."""

    def __init__(self, file: Path) -> None:
        """Raises OSError if the file cannot be loaded."""
        self._call = load_library(file).cellar_multiply_plain
        self._call.argtypes, self._call.restype = [POINTER(PlainCallFields)], c_int64

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See RowInvariantProduct."""
        return self._multiply(rows[None], weight[None])[0]

    def batch(self, left: Tensor, right: Tensor) -> Tensor:
        """See RowInvariantProduct."""
        return self._multiply(left, right.mT)

    def _multiply(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Rows [batch, rows, columns] times weights [batch, outputs, columns]."""
        inputs = _contiguous_columns(rows.float())
        matrices = _contiguous_columns(weights if weights.dtype in FORMATS else weights.float())
        batch, count, columns = inputs.shape
        output = torch.empty(batch, count, matrices.shape[1])
        self._call(
            byref(
                PlainCallFields(
                    rows=inputs.data_ptr(),
                    weights=matrices.data_ptr(),
                    output=output.data_ptr(),
                    format=FORMATS[matrices.dtype],
                    batch=batch,
                    count=count,
                    outputs=matrices.shape[1],
                    columns=columns,
                    row_stride=inputs.stride(1),
                    row_batch_stride=inputs.stride(0),
                    weight_stride=matrices.stride(1),
                    weight_batch_stride=matrices.stride(0),
                    threads=torch.get_num_threads(),
                )
            )
        )
        return output.to(rows.dtype)


def _contiguous_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
