"""Turning cached keys to other positions."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.spec import Rotation


def rotate(keys: Tensor, by: int, rotation: Rotation) -> Tensor:
    """Keys moved by `by` positions; the input stays as it is.

    keys  [..., key_width], already turned to their old positions
    by    positions, negative is towards the start

    Turns add up, so turning by the difference equals encoding anew (RoFormer, arXiv 2104.09864, section 3.2).
    Attention scaling (YaRN) is in the keys already and must not be applied again. Computed in float32 or better:
    sixteen shifts in bfloat16 arithmetic would cost 0.7 % of the key (design notes, algorithms 3.11).
    """
    pairs = len(rotation.inverse_frequency)
    if pairs == 0:
        return keys.clone()
    exact = torch.promote_types(keys.dtype, torch.float32)
    # The angle needs float64: 100,000 positions times a float32 frequency is off by 0.006 radians.
    angles = by * torch.tensor(rotation.inverse_frequency, dtype=torch.float64, device=keys.device)
    cos, sin = angles.cos().to(exact), angles.sin().to(exact)
    turned = keys.clone()
    first, second = _pairs(turned, rotation, pairs)
    x, y = first.to(exact), second.to(exact)
    # Both before either is written: in float32 and float64 x and y are the columns themselves, not copies.
    moved_x, moved_y = x * cos - y * sin, y * cos + x * sin
    first.copy_(moved_x)
    second.copy_(moved_y)
    return turned


def _pairs(keys: Tensor, rotation: Rotation, pairs: int) -> tuple[Tensor, Tensor]:
    """Views of the first and second column of every pair, each [..., pairs]."""
    begin = rotation.offset
    if rotation.layout == "half":
        return keys[..., begin : begin + pairs], keys[..., begin + pairs : begin + 2 * pairs]
    return keys[..., begin : begin + 2 * pairs : 2], keys[..., begin + 1 : begin + 2 * pairs : 2]
