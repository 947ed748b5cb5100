"""Errors of the cache. An operation that raises one has changed nothing.

CacheError        base class; raised itself where the cache is used while a forward is open
├── OutOfCells    the pool has fewer free cells than the operation needs
└── BadSpan       a span does not continue its slot
"""

from __future__ import annotations


class CacheError(Exception):
    """Base class of the errors of this package."""


class OutOfCells(CacheError):
    """The pool has too few free cells: clear or rewind a slot, or evict, and retry."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} cells needed, {free} free")
        self.needed, self.free = needed, free


class BadSpan(CacheError):
    """A span does not start at the cached length of its slot, is empty or too long, or repeats a slot."""
