"""Angles of positions that differ by axis (M-RoPE): each pair of columns is rotated by the position on its own axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.native.decoder import RotarySpec
from engine.step.input import ROTARY_AXES


def pair_axes(model: Any, rotary: RotarySpec) -> Tensor | None:
    """The axis of each pair of columns, int64 [pairs], as the model's module of these frequencies has it.

    None: there is no such module, or it takes one position for each token.
    """
    frequencies = torch.tensor(rotary.rotation.inverse_frequency).abs()
    for module in model.modules():
        table = getattr(module, "inv_freq", None)
        if (
            isinstance(table, Tensor)
            and table.shape == frequencies.shape
            and torch.allclose(table.float(), frequencies)
        ):
            return _axes_of_module(module, len(frequencies))
    return None


def _axes_of_module(module: Any, pairs: int) -> Tensor | None:
    """By the sines of one token for each axis, at position 1 on that axis and 0 on the others."""
    positions = torch.eye(ROTARY_AXES, dtype=torch.int64)[:, :, None]
    try:
        with torch.inference_mode():
            _, sines = module(torch.empty(1), positions)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    if sines.dim() != 3 or sines.shape[:2] != (ROTARY_AXES, 1) or sines.shape[2] < pairs:
        return None
    rotates = sines[:, 0, :pairs] != 0
    return rotates.int().argmax(0) if bool((rotates.sum(0) == 1).all()) else None


def angles_by_axis(angles: tuple[Tensor, Tensor], axes: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, pairs] from tables [capacity, pairs], of positions [axes, tokens] below the capacity.

    A token with one position on all axes has the bits of the table.
    """
    rows, columns = positions[-ROTARY_AXES:][axes].T, torch.arange(len(axes))
    cosine, sine = angles
    # Of the layout of the rows otherwise.
    return cosine[rows, columns].contiguous(), sine[rows, columns].contiguous()
