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
    def free_count(self) -> int:
        """Slots that no sequence sits in."""
        return len(self._free)

    def acquire(self, sequence: Sequence) -> int:
        """Seat the sequence and return the length at which it stands: what need not be computed.

        One that was shifted goes back to the latest shift behind which all is found that cannot be computed.
        """
        if sequence.needs_long_factors:
            sequence.switch_to_long_factors()
        sequence.slot = self._free.pop()
        while (standing := self.reuse_prefix(sequence)) < sequence.context.restore_length:
            self._cache.clear(sequence.slot)
            sequence.context.undo_shift()
        return standing

    def restart_with_long_factors(self, sequence: Sequence) -> None:
        """Let an outgrown sequence begin anew; others may have what it computed before."""
        assert sequence.slot is not None, "a waiting sequence has no slot"
        self.insert_prefix(sequence)
        self._cache.clear(sequence.slot)
        sequence.switch_to_long_factors()
        self.reuse_prefix(sequence)

    def reuse_prefix(self, sequence: Sequence) -> int:
        """Take over what the cache remembers by now of the sequence's tokens; the length at which it stands then.

        What stands behind rows that the sequence needs stays to be computed, one token at least. Where tokens are known
        farther than the slot can stand, others left there before: the sequence makes that a place to resume at.
        """
        assert sequence.slot is not None, "a waiting sequence has no slot"
        keys = sequence.context.prefix_keys(min(sequence.reusable_length, self._cache.capacity))
        salt = sequence.context.salt
        standing = self._cache.reuse_prefix(sequence.slot, keys, salt=salt)
        known = self._cache.match_prefix(keys, salt=salt)
        sequence.record_prefix_match(known.length, diverged=known.diverged)
        return self.rewind(sequence, standing)

    def rewind(self, sequence: Sequence, length: int) -> int:
        """Let the slot stand at `length` or below, where it can go on; the length at which it stands then.

        It never stands inside a mutual range, for that is computed whole.
        """
        assert sequence.slot is not None, "a waiting sequence has no slot"
        standing = min(length, self._cache.cached_length(sequence.slot))
        while (whole := sequence.context.align_down(standing)) < self._cache.cached_length(sequence.slot):
            standing = self._cache.rewind(sequence.slot, whole)
        return standing

    def insert_span(self, sequence: Sequence, span: Span) -> None:
        """Let others have what a span that begins in the prompt computed, and make its marks places to resume at."""
        if sequence.context.shifts:
            return
        for mark in sequence.checkpoints(span.start, span.stop):
            self._insert_prefix(sequence, mark, seal=True)
        if span.stop <= len(sequence.request.prompt):
            self._insert_prefix(sequence, span.stop)

    def insert_prefix(self, sequence: Sequence) -> None:
        """Keep all that the slot holds for those who have the same tokens and the same past."""
        assert sequence.slot is not None, "a waiting sequence has no slot"
        self._insert_prefix(sequence, self._cache.cached_length(sequence.slot))

    def release(self, sequence: Sequence) -> None:
        """Let the sequence leave its slot, which is empty then."""
        assert sequence.slot is not None, "a sequence leaves a slot that it does not have"
        self._cache.clear(sequence.slot)
        self._free.append(sequence.slot)
        sequence.slot = None

    def _insert_prefix(self, sequence: Sequence, length: int, *, seal: bool = False) -> None:
        assert sequence.slot is not None, "a waiting sequence has no slot"
        self._cache.insert_prefix(
            sequence.slot, sequence.context.prefix_keys(length), salt=sequence.context.salt, checkpoint=seal
        )
