"""Who sits in which slot, and what a prompt need not compute: the cache remembers what others computed.

Owns the slots of the cache. A slot that a sequence leaves is empty; what it held lives on in the cache's prefix tree.
"""

from __future__ import annotations

from engine.schedule.sequence import Sequence
from kvcache.cache import Cache
from kvcache.spec import Span


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
        """Seat the sequence and return the length at which it stands: what need not be computed.

        One that was shifted goes back to the latest shift behind which all is found that cannot be computed.
        """
        if sequence.outgrown:
            sequence.extend()
        sequence.slot = self._free.pop()
        while (standing := self.recall(sequence)) < sequence.lineage.floor:
            self._cache.clear(sequence.slot)
            sequence.lineage.back()
        return standing

    def restart(self, sequence: Sequence) -> None:
        """Let an outgrown sequence begin anew; others may have what it computed before."""
        assert sequence.slot is not None, "a waiting sequence has no slot"
        self.remember(sequence)
        self._cache.clear(sequence.slot)
        sequence.extend()
        self.recall(sequence)

    def recall(self, sequence: Sequence) -> int:
        """Take over what the cache remembers by now of the sequence's tokens; the length at which it stands then.

        What stands behind rows that the sequence needs stays to be computed, one token at least. Where tokens are known
        farther than the slot can stand, others left there before: the sequence makes that a place to resume at.
        """
        assert sequence.slot is not None, "a waiting sequence has no slot"
        keys = sequence.lineage.keys(min(sequence.reusable, self._cache.capacity))
        salt = sequence.lineage.salt
        standing = self._cache.recall(sequence.slot, keys, salt=salt)
        known = self._cache.known(keys, salt=salt)
        sequence.find(known.length, parted=known.parted)
        return self.rewind(sequence, standing)

    def rewind(self, sequence: Sequence, length: int) -> int:
        """Let the slot stand at `length` or below, where it can go on; the length at which it stands then.

        It never stands inside a mutual range, for that is computed whole.
        """
        assert sequence.slot is not None, "a waiting sequence has no slot"
        standing = min(length, self._cache.length(sequence.slot))
        while (whole := sequence.lineage.whole(standing)) < self._cache.length(sequence.slot):
            standing = self._cache.rewind(sequence.slot, whole)
        return standing

    def computed(self, sequence: Sequence, span: Span) -> None:
        """Let others have what a span that begins in the prompt computed, and make its marks places to resume at."""
        if sequence.lineage.shifts:
            return
        for mark in sequence.marks(span.start, span.stop):
            self._remember(sequence, mark, seal=True)
        if span.stop <= len(sequence.request.prompt):
            self._remember(sequence, span.stop)

    def remember(self, sequence: Sequence) -> None:
        """Keep all that the slot holds for those who have the same tokens and the same past."""
        assert sequence.slot is not None, "a waiting sequence has no slot"
        self._remember(sequence, self._cache.length(sequence.slot))

    def release(self, sequence: Sequence) -> None:
        """Let the sequence leave its slot, which is empty then."""
        assert sequence.slot is not None, "a sequence leaves a slot that it does not have"
        self._cache.clear(sequence.slot)
        self._free.append(sequence.slot)
        sequence.slot = None

    def _remember(self, sequence: Sequence, length: int, *, seal: bool = False) -> None:
        assert sequence.slot is not None, "a waiting sequence has no slot"
        self._cache.remember(sequence.slot, sequence.lineage.keys(length), salt=sequence.lineage.salt, seal=seal)
