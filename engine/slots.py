"""Who sits in which slot, and what can be reused: a new prompt starts where the best slot's content leaves it.

Owns the slots of the cache. A slot that a sequence left keeps its content until the slot or its cells are needed.
This is the one place that decides about reuse; the prefix tree will take it over behind `acquire`.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from engine.sequence import Sequence
from kvcache.cache import Cache


class Slots:
    """The seats of the cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._owners: list[Sequence | None] = [None] * cache.slots
        self._left: list[list[int]] = [[] for _ in range(cache.slots)]
        self._used_at = [0] * cache.slots
        self._clock = 0
        self.copies = 0

    @property
    def free(self) -> int:
        """Slots that no sequence sits in."""
        return self._owners.count(None)

    @property
    def idle_cells(self) -> int:
        """Cells that evicting idle slots may free; less where they are shared."""
        return sum(self._cache.length(slot) for slot in self._idle())

    def acquire(self, sequence: Sequence) -> int:
        """Seat the sequence in a free slot and return the length at which it stands there: what need not be computed.

        At least one token stays to be computed, for without a row there are no logits.
        """
        tokens = sequence.tokens
        source, length = self._best(tokens)
        length = min(length, len(tokens) - 1)
        target = self._seat(source, length)
        standing = self._cache.copy_prefix(source, target, length)
        self.copies += source != target and standing > 0
        self._owners[target], self._left[target] = sequence, []
        sequence.slot = target
        self._touch(target)
        return standing

    def release(self, sequence: Sequence) -> None:
        """Let the sequence leave its slot. What it computed stays there for others, as far as it is plain."""
        slot = sequence.slot
        assert slot is not None, "a sequence leaves a slot that it does not have"
        self._left[slot] = sequence.tokens[: self._offered(slot)]
        self._cache.rewind(slot, len(self._left[slot]))
        self._owners[slot] = sequence.slot = None
        self._touch(slot)

    def evict(self) -> int:
        """Empty the idle slot that was used longest ago; the number of tokens it held, 0 if none holds any."""
        held = [slot for slot in self._idle() if self._cache.length(slot)]
        if not held:
            return 0
        oldest = min(held, key=self._used_at.__getitem__)
        length = self._cache.length(oldest)
        self._cache.clear(oldest)
        self._left[oldest] = []
        return length

    def _idle(self) -> list[int]:
        return [slot for slot, owner in enumerate(self._owners) if owner is None]

    def _offered(self, slot: int) -> int:
        """Leading tokens of a slot whose cells hold for anybody with the same tokens."""
        owner, length = self._owners[slot], self._cache.length(slot)
        return length if owner is None or owner.plain is None else min(length, owner.plain)

    def _best(self, tokens: Tokens[int]) -> tuple[int, int]:
        """The slot with the longest usable common beginning, and its length; an idle one where they are equal."""
        best = (-1, False, 0)
        for slot, owner in enumerate(self._owners):
            content = self._left[slot] if owner is None else owner.tokens
            common = min(_common(content, tokens), self._offered(slot))
            best = max(best, (common, owner is None, -slot))
        return -best[2], best[0]

    def _seat(self, source: int, length: int) -> int:
        """The slot to sit in: the source itself if it is idle and loses next to nothing by it, else the oldest idle."""
        idle = self._idle()
        if source in idle and length + 1 >= self._cache.length(source):
            return source
        return min(idle, key=lambda slot: (self._cache.length(slot) > 0, self._used_at[slot]))

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used_at[slot] = self._clock


def _common(left: Tokens[int], right: Tokens[int]) -> int:
    """The length of the common beginning, by halving: comparing slices is what Python does fast."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
