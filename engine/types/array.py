"""Arrays that cross the border of the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Array:
    """A numpy array as bytes: `data` in C order, little-endian, of the type named by `dtype`."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
