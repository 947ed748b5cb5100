"""Assigns the slots of the cache to sequences and connects them to the prefix cache.

A released slot is empty; its keys and values live on in the prefix cache.
"""

from __future__ import annotations

from engine.schedule.sequence import Sequence
from kvcache.cache import Cache
from kvcache.spec import Span


class Slots:
    """The slots of one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._free = list(range(cache.slots - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Slots without a sequence."""
        return len(self._free)

    def acquire(self, sequence: Sequence) -> int:
        """Give the sequence a slot; the length that the slot reused from the prefix cache.

        A shifted sequence returns to its last stage at which all tokens are found that cannot be recomputed.
        """
        if sequence.needs_long_factors:
            sequence.switch_to_long_factors()
        sequence.slot = self._free.pop()
        while (cached_length := self.reuse_prefix(sequence)) < sequence.context.restore_length:
            self._cache.clear(sequence.slot)
            sequence.context.undo_shift()
        return cached_length

    def restart_with_long_factors(self, sequence: Sequence) -> None:
        """Recompute the sequence with the long rotary factors; its old keys and values stay in the prefix cache."""
        assert sequence.slot is not None, "a waiting sequence has no slot"
        self.insert_prefix(sequence)
        self._cache.clear(sequence.slot)
        sequence.switch_to_long_factors()
        self.reuse_prefix(sequence)

    def reuse_prefix(self, sequence: Sequence) -> int:
        """Extend the slot by cells of the prefix cache that hold the next tokens of the sequence; its new length.

        Tokens that need logits or hidden states are not reused, and never the last one. Where the prefix cache matches
        more tokens than a slot can resume at, the end of the match becomes a checkpoint.
        """
        assert sequence.slot is not None, "a waiting sequence has no slot"
        keys = sequence.context.prefix_keys(min(sequence.reusable_length, self._cache.capacity))
        salt = sequence.context.salt
        cached_length = self._cache.reuse_prefix(sequence.slot, keys, salt=salt)
        match = self._cache.match_prefix(keys, salt=salt)
        sequence.record_prefix_match(match.length, diverged=match.diverged)
        return self.rewind(sequence, cached_length)

    def rewind(self, sequence: Sequence, length: int) -> int:
        """Shorten the slot to `length` or to the next shorter length at which it can resume; its new length.

        Never inside a bidirectional range, which one forward computes as a whole.
        """
        assert sequence.slot is not None, "a waiting sequence has no slot"
        target = min(length, self._cache.cached_length(sequence.slot))
        while (aligned := sequence.context.align_down(target)) < self._cache.cached_length(sequence.slot):
            target = self._cache.rewind(sequence.slot, aligned)
        return target

    def insert_span(self, sequence: Sequence, span: Span) -> None:
        """Insert a computed span of the prompt into the prefix cache, with its checkpoints."""
        if sequence.context.shifts:
            return
        for position in sequence.checkpoints(span.start, span.stop):
            self._insert_prefix(sequence, position, checkpoint=True)
        if span.stop <= len(sequence.request.prompt):
            self._insert_prefix(sequence, span.stop)

    def insert_prefix(self, sequence: Sequence) -> None:
        """Insert all tokens of the slot into the prefix cache, under the salt of the sequence's context history."""
        assert sequence.slot is not None, "a waiting sequence has no slot"
        self._insert_prefix(sequence, self._cache.cached_length(sequence.slot))

    def release(self, sequence: Sequence) -> None:
        """Clear and free the slot of the sequence."""
        assert sequence.slot is not None, "a sequence leaves a slot that it does not have"
        self._cache.clear(sequence.slot)
        self._free.append(sequence.slot)
        sequence.slot = None

    def _insert_prefix(self, sequence: Sequence, length: int, *, checkpoint: bool = False) -> None:
        assert sequence.slot is not None, "a waiting sequence has no slot"
        keys = sequence.context.prefix_keys(length)
        self._cache.insert_prefix(sequence.slot, keys, salt=sequence.context.salt, checkpoint=checkpoint)
