"""Decides what the next step computes. There is no prefill and no decode: a sequence has tokens, its slot stands at a
length, and a step grants it a span of what is missing.

Owns the queues. Cells are the only gate: idle slots are evicted for them, then the youngest sequence goes back to the
queue; it resumes later with the same text, for a token depends on nothing but its own past (engine/sampling.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.sequence import Sequence
from engine.slots import Slots
from kvcache.cache import Cache
from kvcache.errors import OutOfCells
from kvcache.spec import Span


@dataclass(frozen=True, slots=True)
class Grant:
    """What a step computes for one sequence."""

    sequence: Sequence
    span: Span

    @property
    def complete(self) -> bool:
        """Whether nothing is missing afterwards, so that the last row's logits give the next token."""
        return self.span.stop == len(self.sequence.tokens)


class Scheduler:
    """The waiting and the running sequences over one cache.

    chunk  rows of prompt a step at most, over all sequences; the oldest prompt goes first
    """

    def __init__(self, cache: Cache, *, chunk: int, on_start: Callable[[Sequence, int], None]) -> None:
        self._cache = cache
        self._chunk = chunk
        self._on_start = on_start
        self._slots = Slots(cache)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.waiting or self.running)

    @property
    def copies(self) -> int:
        """How often a sequence began with another slot's cells."""
        return self._slots.copies

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is: it is over."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._slots.release(sequence)

    def plan(self) -> list[Grant]:
        """The spans of the next step, with enough free cells for all of them."""
        self._admit()
        for sequence in tuple(self.running):
            if sequence.overfull and sequence.slot is not None:
                self._shift(sequence)
        grants = self._grants()
        while sum(grant.span.length for grant in grants) > self._cache.free_cells:
            self._make_room()
            grants = self._grants()
        return grants

    def _admit(self) -> None:
        while self.waiting and self._slots.free and self._fits(self.waiting[0]):
            sequence = self.waiting.popleft()
            standing = self._slots.acquire(sequence)
            self.running.append(sequence)
            self._on_start(sequence, standing)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether its tokens and the next rows of the running ones find cells, without anybody having to leave."""
        if not self.running:
            return True
        needed = len(sequence.tokens) + sum(self._missing(other) for other in self.running)
        return needed <= self._cache.free_cells + self._slots.idle_cells

    def _missing(self, sequence: Sequence) -> int:
        assert sequence.slot is not None, "a waiting sequence has no length"
        return len(sequence.tokens) - self._cache.length(sequence.slot)

    def _grants(self) -> list[Grant]:
        """A row for everyone who lacks just one, and the chunk's rows of prompt, oldest sequence first."""
        grants, left = [], self._chunk
        for sequence in self.running:
            missing = self._missing(sequence)
            length = 1 if missing == 1 else min(missing, left)
            left -= length if missing > 1 else 0
            if length and sequence.slot is not None:
                start = len(sequence.tokens) - missing
                grants.append(Grant(sequence, Span(sequence.slot, start, length)))
        return grants

    def _make_room(self) -> None:
        """Free some cells: an idle slot's, or the youngest sequence's, which goes back to the head of the queue."""
        if self._slots.evict():
            return
        assert len(self.running) > 1, "one sequence alone always fits: its capacity is at most the pool"
        youngest = self.running.pop()
        self._slots.release(youngest)
        # Its shifted part is gone with the slot, so what is left of it will be computed as plain tokens.
        youngest.plain = None
        self.waiting.appendleft(youngest)
        self.preemptions += 1

    def _shift(self, sequence: Sequence) -> None:
        """Drop the older half behind the kept tokens, in the cache and in the sequence."""
        keep = sequence.keep
        while sequence.slot is not None:
            drop = max((self._cache.length(sequence.slot) - keep) // 2, 1)
            try:
                standing = self._cache.shift(sequence.slot, keep, drop)
            except OutOfCells:
                self._make_room()
                continue
            sequence.drop(drop)
            # What moved still knows the dropped text; what must be computed anew does not.
            if standing > keep:
                sequence.plain = min(keep, keep if sequence.plain is None else sequence.plain)
            return
