"""Comparison of tensors that may differ by rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.margins import within
from engine.native.decoder import UnsupportedArchitecture

# Relative to the largest number: some hundred roundings of float32.
TOLERANCE = 2e-5
# Of the sums of a residual connection.
_ROUNDINGS = 2


def relative_difference(expected: Tensor, actual: Tensor) -> float:
    """The largest difference, relative to the largest actual number; infinite for different shapes."""
    if expected.shape != actual.shape:
        return math.inf
    size = float((expected.float() - actual.float()).abs().max())
    return size / max(1e-3, float(actual.float().abs().max()))


def is_close(expected: Tensor, actual: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    difference = relative_difference(expected, actual)
    return within("a recomputed operation equals the traced one", difference, TOLERANCE)


def require_close(operation: str, expected: Tensor, actual: Tensor) -> None:
    """Raise UnsupportedArchitecture unless the input of an operation is the output of the one before."""
    if not is_close(expected, actual):
        raise UnsupportedArchitecture(f"the input of {operation} is not the output of the operation before it")


def least_squares_ratio(rows: Tensor, others: Tensor) -> float:
    """The factor from `rows` to `others` by least squares; exactly 1 within rounding."""
    if rows.shape != others.shape:
        raise UnsupportedArchitecture("its rows change their width")
    wide = rows.double()
    ratio = float((wide * others.double()).sum() / (wide * wide).sum().clamp_min(1e-30))
    return 1.0 if abs(ratio - 1.0) < 1e-5 else ratio


def residual_ratio(states: Tensor, output: Tensor, summed: Tensor) -> float:
    """The factor of `output` in the sum states + factor * output; exactly 1 within rounding.

    The sum rounds an output that is small next to the states to few digits.
    """
    ratio = least_squares_ratio(output, summed - states)
    rounding = _ROUNDINGS * torch.finfo(torch.float32).eps * float(states.norm() / output.norm().clamp_min(1e-30))
    return 1.0 if abs(ratio - 1.0) < rounding else ratio
