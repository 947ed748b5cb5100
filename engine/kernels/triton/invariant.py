"""Row-invariant products and sums on a GPU (engine/kernels/products.py): one tile for any number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.triton.linear import Weights, expert_tiles, multiply, one_tile
from engine.kernels.triton.products import sum_kernel

# Numbers of a row that are summed at once.
_SUMMED = 1024


class TritonProduct:
    """The kernels of this package; implements RowInvariantProduct."""

    sums_rows = True

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See RowInvariantProduct."""
        return multiply(rows, _weights(weight[None]), one_tile(rows.dtype))

    def batch(self, left: Tensor, right: Tensor) -> Tensor:
        """See RowInvariantProduct."""
        batch, rows, inner = left.shape
        numbers = torch.arange(batch * rows, device=left.device) // rows
        return self._multiply(left.reshape(-1, inner), right.mT, numbers).view(batch, rows, -1)

    def grouped(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """See RowInvariantProduct."""
        numbers = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device, dtype=ends.dtype), right=True)
        return self._multiply(rows, weights.mT, numbers)

    def sums(self, rows: Tensor) -> Tensor:
        """See RowInvariantProduct."""
        sums = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        if len(rows):
            rows = rows if rows.stride(-1) == 1 else rows.contiguous()
            sum_kernel[(len(rows),)](rows, sums, rows.stride(0), rows.shape[1], BLOCK=_SUMMED)
        return sums

    def _multiply(self, rows: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
        """Each row times the weight [outputs, columns] of its number, ascending; zeros for a number beyond all."""
        tile = one_tile(rows.dtype)
        # The columns may be positions: their number must not matter.
        return multiply(
            rows, _weights(weights), tile, tiles=expert_tiles(numbers, len(weights), tile.rows), is_split=False
        )


def _weights(weights: Tensor) -> Weights:
    """Weights [matrices, outputs, columns]."""
    strides = weights.stride()
    return Weights(
        layout=None,
        outputs=weights.shape[1],
        columns=weights.shape[2],
        codes=weights,
        scales=weights,
        super_scales=weights,
        lookup=weights,
        code_stride=strides[0],
        output_stride=strides[1],
        column_stride=strides[2],
    )
