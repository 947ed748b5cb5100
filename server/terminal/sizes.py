"""Numbers for people: counts, and sizes in bytes."""

from __future__ import annotations


def format_count(number: int) -> str:
    """Such as 1.5B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def format_size(number: int) -> str:
    """Such as 1.5 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
