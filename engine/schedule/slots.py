"""The slots of a cache: of the model's, by the scheduler, and of a drafter's (engine/draft/slots.py).

A released slot is empty; its keys and values live on in the prefix cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from kvcache.cache import Cache

log = logging.getLogger("cellar.engine")


class CachedContext(Protocol):
    """The tokens that a slot caches, as keys of the prefix cache."""

    @property
    def salt(self) -> bytes:
        """Separates its entries in the prefix cache from entries of other salts."""

    def prefix_keys(self, length: int) -> Sequence[int]:
        """The keys of the first `length` tokens, or of fewer where others may not reuse more."""

    def align_down(self, length: int) -> int:
        """The largest length up to `length` that the slot may be shortened to."""


class Slots:
    """Free and assigned slots of one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._free = list(range(cache.slots - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Slots that are not assigned."""
        return len(self._free)

    def acquire(self) -> int:
        """Assign a free slot, which is empty."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Clear and free an assigned slot."""
        self._cache.clear(slot)
        self._free.append(slot)

    def rewind(self, slot: int, context: CachedContext, length: int) -> int:
        """Shorten the slot to `length` or to the next shorter length at which it can resume; its new length."""
        target = min(length, self._cache.cached_length(slot))
        while (aligned := context.align_down(target)) < self._cache.cached_length(slot):
            target = self._cache.rewind(slot, aligned)
        return target

    def insert_prefix(
        self, slot: int, context: CachedContext, length: int | None = None, *, checkpoint: bool = False
    ) -> None:
        """Insert the first `length` tokens of the slot into the prefix cache; None: all. Failures are logged."""
        try:
            keys = context.prefix_keys(self._cache.cached_length(slot) if length is None else length)
            self._cache.insert_prefix(slot, keys, salt=context.salt, checkpoint=checkpoint)
        except Exception:
            log.exception("tokens are not added to the prefix cache")

    def reuse_prefix(self, slot: int, context: CachedContext, length: int) -> int:
        """Extend the slot by cached cells of its first `length` tokens; its new length. Failures are logged."""
        try:
            return self._cache.reuse_prefix(slot, context.prefix_keys(length), salt=context.salt)
        except Exception:
            log.exception("tokens of the prefix cache are not reused")
            return self._cache.rewind(slot, self._cache.cached_length(slot))
