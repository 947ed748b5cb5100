"""Turning cached keys to other positions."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.spec import Rotation


def rotate(keys: Tensor, distance: int, rotation: Rotation) -> Tensor:
    """Keys moved by `distance` positions; the input stays as it is.

    keys  [..., key_width], already turned to their old positions
    by    positions, negative is towards the start

    Turns add up, so turning by the difference equals encoding anew (RoFormer, arXiv 2104.09864, section 3.2).
    Attention scaling (YaRN) is in the keys already and must not be applied again. Computed in float64: a rounded cosine
    is a wrong length every time it is used, and a thousand shifts in float32 would cost 2e-5 of the key, in float64
    they cost 8e-7 (sixteen in bfloat16: 0.7 %, design notes, algorithms 3.11).
    """
    pairs = len(rotation.inverse_frequency)
    if pairs == 0:
        return keys.clone()
    angles = distance * torch.tensor(rotation.inverse_frequency, dtype=torch.float64, device=keys.device)
    cos, sin = angles.cos(), angles.sin()
    turned = keys.clone()
    first, second = column_pairs(turned, rotation)
    x, y = first.double(), second.double()
    # Both before either is written: in float64 x and y are the columns themselves, not copies.
    moved_x, moved_y = x * cos - y * sin, y * cos + x * sin
    first.copy_(moved_x)
    second.copy_(moved_y)
    return turned


def column_pairs(keys: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Views of the first and second column of every pair, each [..., pairs]."""
    begin, pairs = rotation.offset, len(rotation.inverse_frequency)
    if rotation.layout == "half":
        return keys[..., begin : begin + pairs], keys[..., begin + pairs : begin + 2 * pairs]
    return keys[..., begin : begin + 2 * pairs : 2], keys[..., begin + 1 : begin + 2 * pairs : 2]
