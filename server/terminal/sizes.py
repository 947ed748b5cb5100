"""Numbers for people: counts, and sizes in bytes.

Memory is in powers of 1024, as in the options; files are in powers of 1000, as on the hub.
"""

from __future__ import annotations

from rich.filesize import decimal


def format_count(number: int) -> str:
    """Such as 1.5B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def format_file_size(number: int) -> str:
    """Of files, such as 1.6 GB."""
    return decimal(number)
