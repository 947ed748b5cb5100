"""Who sits in which slot, and what a prompt need not compute: the cache remembers what others computed.

Owns the slots of the cache. A slot that a sequence leaves is empty; what it held lives on in the cache's prefix tree.
"""

from __future__ import annotations

from engine.sequence import Sequence
from kvcache.cache import Cache


class Slots:
    """The seats of the cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._free = list(range(cache.slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that no sequence sits in."""
        return len(self._free)

    def acquire(self, sequence: Sequence) -> int:
        """Seat the sequence and return the length at which it stands: what need not be computed."""
        sequence.slot = self._free.pop()
        return self.recall(sequence)

    def recall(self, sequence: Sequence) -> int:
        """Take over what the cache remembers by now of the sequence's tokens; the length at which it stands then.

        At least one token stays to be computed, for without a row there are no logits.
        """
        assert sequence.slot is not None, "a waiting sequence has no slot"
        return self._cache.recall(sequence.slot, sequence.tokens[:-1])

    def remember(self, sequence: Sequence) -> None:
        """Let others have what the sequence computed, as far as it depends on nothing but its tokens."""
        assert sequence.slot is not None, "a waiting sequence has no slot"
        length = self._cache.length(sequence.slot)
        plain = length if sequence.plain is None else min(length, sequence.plain)
        self._cache.remember(sequence.slot, sequence.tokens[:plain])

    def release(self, sequence: Sequence) -> None:
        """Let the sequence leave its slot, which is empty then."""
        assert sequence.slot is not None, "a sequence leaves a slot that it does not have"
        self.remember(sequence)
        self._cache.clear(sequence.slot)
        self._free.append(sequence.slot)
        sequence.slot = None
