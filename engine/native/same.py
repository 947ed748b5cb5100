"""Whether two computations of one thing say the same, but for rounding."""

from __future__ import annotations

from torch import Tensor

from engine.native.decoder import NoShape

# Of the largest number: some hundred roundings of float32.
TOLERANCE = 2e-5


def same(expected: Tensor, actual: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    if expected.shape != actual.shape:
        return False
    size = float((expected.float() - actual.float()).abs().max())
    return size <= TOLERANCE * max(1e-3, float(actual.float().abs().max()))


def agree(what: str, expected: Tensor, actual: Tensor) -> None:
    """Raise NoShape where two tensors differ."""
    if not same(expected, actual):
        raise NoShape(f"{what} takes something else than what the part before it makes")


def ratio(rows: Tensor, others: Tensor) -> float:
    """How many times as large the others are, by least squares; 1 where that is all but it."""
    if rows.shape != others.shape:
        raise NoShape("its rows change their width")
    wide = rows.double()
    found = float((wide * others.double()).sum() / (wide * wide).sum().clamp_min(1e-30))
    return 1.0 if abs(found - 1.0) < 1e-5 else found
