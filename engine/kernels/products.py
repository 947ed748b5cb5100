"""Matrix products whose every number is the same bit for bit, whatever rows and positions are computed beside it.

A library chooses its way to a product by its shape, so that rows round differently with their number (measured: float32
rows differ by 2e-6 between 1 and 8 of them). Here a library only gets tiles of one shape, padded with zeros: the place
of a row in a tile does not change it (measured; the self-test looks at each start, engine/load/selftest.py).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

# Rows of a tile, and positions: keys that are scored, or values that are added up.
ROWS, POSITIONS = 16, 64


class RowInvariantProduct(Protocol):
    """Computes row-invariant products in its own way."""

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The product [rows, outputs] of rows [rows, columns] and a weight [outputs, columns]."""
        ...

    def batch(self, left: Tensor, right: Tensor) -> Tensor:
        """The products [batch, rows, columns] of [batch, rows, inner] and [batch, inner, columns].

        Zeros at the end of `inner` change no bit, so it may be the positions of a sequence.
        """
        ...


class TiledProduct:
    """The products of torch, a tile of one shape at a time."""

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See Product."""
        tiles = torch.split(_padded(rows, ROWS, 0), ROWS)
        return torch.cat([functional.linear(tile, weight) for tile in tiles])[: len(rows)]

    def batch(self, left: Tensor, right: Tensor) -> Tensor:
        """See Product."""
        (_, rows, _), columns = left.shape, right.shape[2]
        lefts = [_tiled(tile, POSITIONS, 2) for tile in torch.split(_padded(left, ROWS, 1), ROWS, 1)]
        rights = _tiled(_padded(right, POSITIONS, 1), POSITIONS, 2)
        return torch.cat([_product(own, rights) for own in lefts], 1)[:, :rows, :columns].contiguous()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Tiles [batch, ROWS, tiles, POSITIONS] of inner columns times [batch, inner, tiles, POSITIONS] of outputs."""
    batch, count = len(right), right.shape[2]
    total = right.new_zeros(batch * count, ROWS, POSITIONS)
    for number, part in enumerate(torch.split(right, POSITIONS, 1)):
        own = left[:, :, number, None].expand(-1, -1, count, -1).transpose(1, 2).flatten(0, 1)
        # One tile after the other: so tiles of zeros behind the last change nothing.
        total = total + torch.bmm(own, part.transpose(1, 2).flatten(0, 1))
    return total.view(batch, count, ROWS, POSITIONS).transpose(1, 2).flatten(2)


def _tiled(tensor: Tensor, size: int, dimension: int) -> Tensor:
    """A dimension as tiles of a size, the last one padded."""
    whole = _padded(tensor, size, dimension)
    return whole.reshape(*whole.shape[:dimension], -1, size, *whole.shape[dimension + 1 :])


def _padded(tensor: Tensor, size: int, dimension: int) -> Tensor:
    """With zeros at the end of a dimension, up to a multiple of a size."""
    lack = -tensor.shape[dimension] % size
    return functional.pad(tensor, (*(0, 0) * (tensor.dim() - dimension - 1), 0, lack)) if lack else tensor
