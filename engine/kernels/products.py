"""Row-invariant matrix products: each number has the same bits for any batch and any number of positions.

Libraries choose an algorithm by the shape, so that rows round differently with their number (measured: float32 rows
differ by 2e-6 between 1 and 8 rows). Here they only get tiles of one shape, padded with zeros: the place of a row in a
tile does not change its bits (measured; the self-test checks it at each start, engine/load/check/selftest.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

# Tile size in rows, and in positions: keys of scores, or values of a sum.
ROWS, POSITIONS = 16, 64
# Of float32, 64 bytes: without AVX-512, products of few outputs also round by the address of a row.
ALIGNED_COLUMNS = 16


class RowInvariantProduct(Protocol):
    """Computes row-invariant products.

    sums_rows  whether it has `sums`; if not, torch's products are row-invariant for contiguous rows
    """

    sums_rows: bool

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The product [rows, outputs] of rows [rows, columns] and a weight [outputs, columns]."""
        ...

    def batch(self, left: Tensor, right: Tensor) -> Tensor:
        """The products [batch, rows, columns] of [batch, rows, inner] and [batch, inner, columns].

        Zeros at the end of `inner`, as for the positions of a shorter sequence, change no bit.
        """
        ...

    def grouped(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """The products [rows, columns] of each row [inner] and the weight of its group, of [groups, inner, columns].

        ends  [groups]: the row after each group; rows after the last group have products of zeros
        """
        ...

    def sums(self, rows: Tensor) -> Tensor:
        """The sums of rows [rows, columns], float32."""
        ...


class HostProduct(ABC):
    """The parts of a RowInvariantProduct that are the same in all of the CPU."""

    sums_rows = False

    @abstractmethod
    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See RowInvariantProduct."""

    def grouped(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """See RowInvariantProduct. Waits for the ends."""
        products, start = rows.new_zeros(len(rows), weights.shape[2]), 0
        for weight, end in zip(weights, ends.tolist(), strict=True):
            if end > start:
                products[start:end] = self.linear(rows[start:end], weight.mT)
            start = end
        return products

    def sums(self, rows: Tensor) -> Tensor:
        """See RowInvariantProduct."""
        return rows.contiguous().sum(-1, dtype=torch.float32)


class TiledProduct(HostProduct):
    """Products of torch, a tile of one shape at a time; implements RowInvariantProduct."""

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See RowInvariantProduct."""
        weight = _padded(weight, ALIGNED_COLUMNS, 1)
        tiles = torch.split(_padded(_padded(rows, ALIGNED_COLUMNS, 1), ROWS, 0), ROWS)
        return torch.cat([functional.linear(tile, weight) for tile in tiles])[: len(rows)]

    def batch(self, left: Tensor, right: Tensor) -> Tensor:
        """See RowInvariantProduct."""
        (_, rows, _), columns = left.shape, right.shape[2]
        lefts = [_tiled(tile, POSITIONS, 2) for tile in torch.split(_padded(left, ROWS, 1), ROWS, 1)]
        rights = _tiled(_padded(right, POSITIONS, 1), POSITIONS, 2)
        return torch.cat([_product(left, rights) for left in lefts], 1)[:, :rows, :columns].contiguous()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Tiles [batch, ROWS, inner tiles, POSITIONS] times [batch, inner, column tiles, POSITIONS]."""
    batch, count = len(right), right.shape[2]
    total = right.new_zeros(batch * count, ROWS, POSITIONS)
    for number, part in enumerate(torch.split(right, POSITIONS, 1)):
        left_columns = left[:, :, number, None].expand(-1, -1, count, -1).transpose(1, 2).flatten(0, 1)
        # Tiles are added in order, so that tiles of zeros at the end change nothing.
        total = total + torch.bmm(left_columns, part.transpose(1, 2).flatten(0, 1))
    return total.view(batch, count, ROWS, POSITIONS).transpose(1, 2).flatten(2)


def _tiled(tensor: Tensor, size: int, dimension: int) -> Tensor:
    """A dimension split in tiles of a size, the last one padded."""
    padded = _padded(tensor, size, dimension)
    return padded.reshape(*padded.shape[:dimension], -1, size, *padded.shape[dimension + 1 :])


def _padded(tensor: Tensor, size: int, dimension: int) -> Tensor:
    """Zeros added at the end of a dimension, up to a multiple of a size."""
    padding = -tensor.shape[dimension] % size
    return functional.pad(tensor, (*(0, 0) * (tensor.dim() - dimension - 1), 0, padding)) if padding else tensor
