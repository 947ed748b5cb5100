"""Rotation of cached keys to new positions (RoPE)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvcache.spec import Rotation


def rotate(keys: Tensor, distance: int, rotation: Rotation) -> Tensor:
    """A copy of the keys, moved by `distance` positions.

    keys      [..., key_width], rotated to their old positions
    distance  positions; negative is towards the start

    Rotations add up, so rotating by the difference equals encoding anew (RoFormer, arXiv 2104.09864, section 3.2).
    Attention scaling (YaRN) is part of the cached keys and is not applied again. Computed in float64: a rounded cosine
    changes the length of the key at every shift; after a thousand shifts the error is 2e-5 of the key in float32,
    8e-7 in float64.
    """
    pairs = len(rotation.inverse_frequency)
    if pairs == 0:
        return keys.clone()
    angles = distance * _inverse_frequency(rotation, keys.device)
    cos, sin = angles.cos(), angles.sin()
    rotated = keys.clone()
    first, second = column_pairs(rotated, rotation)
    x, y = first.double(), second.double()
    # Both products before either write: for float64 keys, x and y are views of the columns.
    rotated_x, rotated_y = x * cos - y * sin, y * cos + x * sin
    first.copy_(rotated_x)
    second.copy_(rotated_y)
    return rotated


@cache
def _inverse_frequency(rotation: Rotation, device: torch.device) -> Tensor:
    """Float64 [pairs]: one copy to a device for all shifts."""
    return torch.tensor(rotation.inverse_frequency, dtype=torch.float64, device=device)


def column_pairs(keys: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Views of the first and second column of every rotated pair, each [..., pairs]."""
    begin, pairs = rotation.offset, len(rotation.inverse_frequency)
    if rotation.layout == "half":
        return keys[..., begin : begin + pairs], keys[..., begin + pairs : begin + 2 * pairs]
    return keys[..., begin : begin + 2 * pairs : 2], keys[..., begin + 1 : begin + 2 * pairs : 2]
