"""Decides what the next step computes. There is no prefill and no decode: a sequence has tokens, its slot stands at a
length, and a step grants it a span of what is missing.

Owns the queues. Cells are the only gate: what the cache remembers is evicted for them, then the youngest sequence goes
back to the queue; it resumes later with the same text, for a token depends on nothing but its own past (sampling.py).
Prompts that begin alike are computed once: the younger one waits while an older one computes what it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
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


@dataclass(frozen=True, slots=True)
class _Lead:
    """An older sequence whose prompt begins like the follower's, for `common` tokens."""

    sequence: Sequence
    common: int


class Scheduler:
    """The waiting and the running sequences over one cache.

    chunk  rows of prompt a step at most, over all sequences; the oldest prompt goes first
    """

    def __init__(self, cache: Cache, *, chunk: int, on_start: Callable[[Sequence, int], None]) -> None:
        self._cache = cache
        self._chunk = chunk
        self._on_start = on_start
        self._slots = Slots(cache)
        self._leads: dict[Sequence, _Lead] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.waiting or self.running)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is: it is over."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._unseat(sequence)

    def plan(self) -> list[Grant]:
        """The spans of the next step, with enough free cells for all of them."""
        self._admit()
        for sequence in tuple(self.running):
            if sequence.overfull and sequence.slot is not None:
                self._shift(sequence)
        self._follow()
        grants = self._grants()
        while (lacking := sum(grant.span.length for grant in grants) - self._cache.free_cells) > 0:
            self._make_room(lacking)
            grants = self._grants()
        return grants

    def computed(self, grants: Iterable[Grant]) -> None:
        """Take note that a step computed its grants: what was a prompt can serve others now."""
        for grant in grants:
            if grant.sequence.slot is not None and grant.span.stop <= len(grant.sequence.request.prompt):
                self._slots.remember(grant.sequence)

    def _admit(self) -> None:
        while self.waiting and self._slots.free:
            sequence = self.waiting.popleft()
            standing = self._slots.acquire(sequence)
            self.running.append(sequence)
            if len(self.running) > 1 and not self._fits():
                self._unseat(sequence)
                self.waiting.appendleft(sequence)
                return
            self._elect(sequence)
            self._on_start(sequence, standing)

    def _unseat(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.release(sequence)
        self._leads.pop(sequence, None)

    def _fits(self) -> bool:
        """Whether all tokens of the running sequences find cells, without anybody having to leave."""
        missing = sum(self._missing(sequence) for sequence in self.running)
        return missing <= self._cache.free_cells + self._cache.idle_cells()

    def _missing(self, sequence: Sequence) -> int:
        assert sequence.slot is not None, "a waiting sequence has no length"
        return len(sequence.tokens) - self._cache.length(sequence.slot)

    def _follow(self) -> None:
        """Let followers take over what their leaders have computed, once that is all or will be no more."""
        for sequence in tuple(self._leads):
            if not self._holds(sequence):
                sequence.gain(self._slots.recall(sequence))
                self._elect(sequence)

    def _holds(self, sequence: Sequence) -> bool:
        """Whether an older sequence is about to compute what this one needs next."""
        lead = self._leads.get(sequence)
        if lead is None or lead.sequence.slot is None or self._missing(lead.sequence) <= 1:
            return False
        return self._cache.length(lead.sequence.slot) < lead.common

    def _elect(self, sequence: Sequence) -> None:
        """Choose whom to wait for: the one of the older that has most in common beyond what is there already."""
        self._leads.pop(sequence, None)
        if self._missing(sequence) <= 1:
            return
        at, best = len(sequence.tokens) - self._missing(sequence), 0
        for other in self.running[: self.running.index(sequence)]:
            common = min(_common(other.tokens, sequence.tokens), len(sequence.tokens) - 1)
            if self._missing(other) > 1 and common > max(at, best):
                best = common
                self._leads[sequence] = _Lead(other, common)

    def _grants(self) -> list[Grant]:
        """A row for everyone who lacks just one, and the chunk's rows of prompt, oldest sequence first."""
        grants, left = [], self._chunk
        for sequence in self.running:
            missing = self._missing(sequence)
            # A recurrent state exists only where a span ends. The same prompt again needs one before its last row.
            whole = missing - 1 if self._cache.states is not None else missing
            length = 1 if missing == 1 else min(whole, left)
            if sequence.slot is None or length == 0 or self._holds(sequence):
                continue
            left -= length if missing > 1 else 0
            grants.append(Grant(sequence, Span(sequence.slot, len(sequence.tokens) - missing, length)))
        return grants

    def _make_room(self, cells: int) -> None:
        """Free some cells: what is remembered and wanted least, or the youngest sequence's, which goes back in line."""
        if self._cache.evict(cells):
            return
        assert len(self.running) > 1, "one sequence alone always fits: its capacity is at most the pool"
        youngest = self.running[-1]
        self._unseat(youngest)
        # Its shifted part is gone with the slot, so what is left of it will be computed as plain tokens.
        youngest.plain = None
        self.waiting.appendleft(youngest)
        self.preemptions += 1

    def _shift(self, sequence: Sequence) -> None:
        """Drop the older half behind the kept tokens, in the cache and in the sequence."""
        keep = sequence.keep
        drop = max((len(sequence.tokens) - 1 - keep) // 2, 1)
        while sequence.slot is not None:
            try:
                standing = self._move(sequence.slot, keep, drop)
            except OutOfCells as error:
                self._make_private(error.needed - error.free)
                continue
            sequence.drop(drop)
            # What moved still knows the dropped text; what must be computed anew does not.
            if standing > keep:
                sequence.plain = min(keep, keep if sequence.plain is None else sequence.plain)
            return

    def _move(self, slot: int, keep: int, drop: int) -> int:
        """Shift a slot; one that came back from the queue has nothing to be moved yet, and computes it in its place."""
        if self._cache.length(slot) < keep + drop:
            return self._cache.rewind(slot, keep)
        return self._cache.shift(slot, keep, drop)

    def _make_private(self, cells: int) -> None:
        """Free cells for copies of shared ones; a sequence that shares with the memory alone gets its cells back."""
        if len(self.running) > 1 or self._cache.idle_cells():
            self._make_room(cells)
        else:
            self._cache.forget()


def _common(left: list[int], right: list[int]) -> int:
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
