"""Blocks of GGUF K-quants from quantised weights, exactly: the inverse of engine.kernels.blocks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.row_major import RowMajorWeights, split_dim

# Columns of a block; rows are whole blocks.
BLOCK_COLUMNS = 256


def encode_blocks(weights: RowMajorWeights) -> NDArray[np.uint8]:
    """The blocks of `q4_k` or `q6_k` weights, uint8 [outputs, bytes of a row].

    Raises ValueError for rows of incomplete blocks, and for scales and minimums of `q4_k` beyond 6 bits.
    """
    if weights.codes.shape[1] % BLOCK_COLUMNS:
        raise ValueError(f"rows of {weights.codes.shape[1]} columns are no whole blocks")
    blocks = _q4_k(weights) if weights.format == "q4_k" else _q6_k(weights)
    encoded: NDArray[np.uint8] = blocks.flatten(1).numpy()
    return encoded


def _q4_k(weights: RowMajorWeights) -> Tensor:
    """A super-scale, a super-minimum, scales and minimums, codes of 4 bits."""
    assert weights.minimums is not None
    assert weights.super_scales is not None
    assert weights.super_minimums is not None
    low, high = split_dim(weights.codes, 1, (-1, 4, 2, 32)).unbind(3)
    scales, minimums = (split_dim(numbers, 1, (-1, 8)) for numbers in (weights.scales, weights.minimums))
    if max(int(scales.max()), int(minimums.max())) > 63:
        raise ValueError("a scale or minimum has more than 6 bits")
    supers = (_bytes(weights.super_scales), _bytes(-weights.super_minimums))
    return torch.cat((*supers, _k_scales(scales, minimums), (low | high << 4).flatten(2)), 2)


def _k_scales(scales: Tensor, minimums: Tensor) -> Tensor:
    """The scales and minimums of 8 groups, 6 bits each, in 12 bytes."""
    first = scales[..., :4] | scales[..., 4:] >> 4 << 6
    second = minimums[..., :4] | minimums[..., 4:] >> 4 << 6
    return torch.cat((first, second, scales[..., 4:] & 15 | minimums[..., 4:] << 4), 2)


def _q6_k(weights: RowMajorWeights) -> Tensor:
    """Halves of 128 columns: nibbles of columns [0, 64) and [64, 128), pairs of high bits of 32 columns each."""
    assert weights.super_scales is not None
    halves = split_dim(weights.codes, 1, (-1, 2, 128))
    first, second = (halves & 15).chunk(2, 3)
    pairs = split_dim(halves >> 4, 3, (4, 32)) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = pairs[..., 0, :] | pairs[..., 1, :] | pairs[..., 2, :] | pairs[..., 3, :]
    scales = split_dim(weights.scales.view(torch.uint8), 1, (-1, 16))
    return torch.cat(((first | second << 4).flatten(2), high.flatten(2), scales, _bytes(weights.super_scales)), 2)


def _bytes(numbers: Tensor) -> Tensor:
    """Float16 numbers [outputs, blocks] as bytes [outputs, blocks, 2]."""
    return numbers.flatten().view(torch.uint8).view(*numbers.shape, 2)
