"""What the cache refuses. A refused operation has changed nothing.

CacheError        the root; itself, where the cache is used while a forward is open
├── OutOfCells    the pool has fewer free cells than the operation needs
└── BadSpan       a forward was asked for rows that do not continue their slot
"""

from __future__ import annotations


class CacheError(Exception):
    """The root of all errors of this package."""


class OutOfCells(CacheError):
    """The pool has too few free cells; free some (clear or rewind a slot) and ask again."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} cells needed, {free} free")
        self.needed, self.free = needed, free


class BadSpan(CacheError):
    """A span does not start where its slot stands, is empty, too long, or names its slot a second time."""
