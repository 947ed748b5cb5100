"""Sizes of memory in words."""

from __future__ import annotations


def format_size(number: float) -> str:
    """Such as 1.5 GiB, in the largest unit of which there is at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"
