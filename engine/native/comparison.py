"""Whether two computations of one thing say the same, but for rounding."""

from __future__ import annotations

import math

from torch import Tensor

from engine.model.margins import within
from engine.native.decoder import UnsupportedArchitecture

# Of the largest number: some hundred roundings of float32.
TOLERANCE = 2e-5


def relative_difference(expected: Tensor, actual: Tensor) -> float:
    """The largest difference of two tensors relative to the largest number; infinite where shapes differ."""
    if expected.shape != actual.shape:
        return math.inf
    size = float((expected.float() - actual.float()).abs().max())
    return size / max(1e-3, float(actual.float().abs().max()))


def is_close(expected: Tensor, actual: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    return within("a part computed anew is the part traced", relative_difference(expected, actual), TOLERANCE)


def require_close(what: str, expected: Tensor, actual: Tensor) -> None:
    """Raise UnsupportedArchitecture where two tensors differ."""
    if not is_close(expected, actual):
        raise UnsupportedArchitecture(f"{what} takes something else than what the part before it makes")


def least_squares_ratio(rows: Tensor, others: Tensor) -> float:
    """How many times as large the others are, by least squares; 1 where that is all but it."""
    if rows.shape != others.shape:
        raise UnsupportedArchitecture("its rows change their width")
    wide = rows.double()
    found = float((wide * others.double()).sum() / (wide * wide).sum().clamp_min(1e-30))
    return 1.0 if abs(found - 1.0) < 1e-5 else found
