"""Decides what the next step computes. There is no prefill and no decode: a sequence has tokens, its slot stands at a
length, and a step grants it a span of what is missing.

Owns the queues. Cells are the only gate: what the cache remembers is evicted for them, then the youngest sequence of
the last tier goes back to the queue; it resumes later with the same text, for a token depends on nothing but its own
past (sampling.py). Slots are shared fairly by owner and by request, also by preemption (fairness.py).
Prompts that begin alike are computed once: the younger one waits while an older one computes what it needs.
How many rows of prompt a step may have is up to its budget (budget.py); of the prompts those go first that are due.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from engine.schedule.draft import Draft
from engine.schedule.fairness import Fairness
from engine.schedule.prefill_budget import Budget
from engine.schedule.sequence import Sequence
from engine.schedule.slots import Slots
from engine.schedule.work import Work
from engine.text.prefix import common_prefix
from kvcache.cache import Cache
from kvcache.errors import OutOfCells
from kvcache.spec import Span

# A prompt is due when so many rows of prompts were computed for each one that it needs. In simulated mixes of long and
# short ones on a busy machine that takes 0.4 of the time of first come, first served to the median first token and 0.6
# to the mean one. The last of the long ones takes up to 2.4 times as long; shortest first, 5 times.
_PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Grant:
    """What a step computes for one sequence: a span of its tokens, and rows for guesses at what comes behind them."""

    sequence: Sequence
    span: Span
    draft: Draft | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is missing afterwards, so that the last row's logits give the next token."""
        return self.span.stop == len(self.sequence.tokens)

    @property
    def speaks(self) -> bool:
        """Whether the last row's logits are to give the next token."""
        return self.complete and self.sequence.limit > 0

    @property
    def telling(self) -> int:
        """How many of the last rows are to give a token: that behind the span, and those of the draft."""
        return len(self.guesses) + 1 if self.speaks else 0

    @property
    def silent(self) -> bool:
        """Whether nobody asks for anything but what is said."""
        sequence = self.sequence
        return sequence.scores is None and sequence.pool is None and sequence.request.logprobs is None

    @property
    def scored(self) -> range:
        """The positions of the span whose logits score a token of the prompt."""
        scores = self.sequence.scores
        return range(0) if scores is None else scores.rows(self.span.start, self.span.stop)

    @property
    def pooled(self) -> range:
        """The positions of the span whose states become part of a vector."""
        pool = self.sequence.pool
        return range(0) if pool is None else pool.rows(self.span.start, self.span.stop)

    @property
    def cost(self) -> int:
        """Tokens that the owner is charged: those computed, and one more for each whose log-probabilities are read."""
        asked = self.telling if self.sequence.request.logprobs is not None else 0
        return self.rows.length + len(self.scored) + asked

    @property
    def guesses(self) -> tuple[int, ...]:
        """The tokens of the draft."""
        return () if self.draft is None else self.draft.tokens

    @property
    def rows(self) -> Span:
        """The span with the rows of the draft."""
        if self.draft is None:
            return self.span
        count = len(self.guesses)
        return replace(self.span, length=self.span.length + count, guessed=count)

    @property
    def tokens(self) -> list[int]:
        """The tokens of all rows."""
        tokens = self.sequence.tokens[self.span.start : self.span.stop]
        return tokens if self.draft is None else [*tokens, *self.draft.tokens]


@dataclass(frozen=True, slots=True)
class _Lead:
    """An older sequence whose prompt begins like the follower's, for `common` tokens."""

    sequence: Sequence
    common: int


class Scheduler:
    """The waiting and the running sequences over one cache.

    budget  of the rows of prompt in a step, over all sequences
    scored  of them those that score a token, at most: each has logits
    """

    def __init__(self, cache: Cache, budget: Budget, *, scored: int, on_start: Callable[[Sequence, int], None]) -> None:
        self._cache = cache
        self._budget, self._scored = budget, scored
        self._on_start = on_start
        self._slots = Slots(cache)
        self._fairness = Fairness()
        # Whether preemption would make no share fairer, until a sequence is queued or leaves its slot.
        self._shared = False
        self._leads: dict[Sequence, _Lead] = {}
        # Rows of prompts that were computed so far, and when each of the running sequences came, by that clock.
        self._prompted = 0
        self._came: dict[Sequence, int] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.waiting or self.running)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence, behind all that are served before it or as soon."""
        ranks = [other.rank for other in self.waiting]
        self.waiting.insert(bisect_right(ranks, sequence.rank), sequence)
        self._fairness.enter(sequence)
        self._shared = False

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is: it is over, and what it computed can serve others."""
        # What a shift moved is found only by a sequence of the same past when it comes back, and this one will not.
        if sequence.slot is not None and not sequence.lineage.floor:
            self._slots.remember(sequence)
        self.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and remember nothing of it: it broke."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._unseat(sequence)
        self._fairness.leave(sequence)

    def plan(self) -> list[Grant]:
        """The spans of the next step, with enough free cells for all of them."""
        self._admit()
        for sequence in tuple(self.running):
            if len(sequence.tokens) > self._cache.capacity and self._is_full(sequence):
                self._shift(sequence)
        self._follow()
        for sequence in self.running:
            if sequence.outgrown:
                self._slots.restart(sequence)
        grants = self._grants()
        while grants and self._is_crowded(grants):
            self._preempt()
            grants = self._grants()
        return grants

    def computed(self, grants: Iterable[Grant]) -> None:
        """Take note that a step computed its grants: what was a prompt can serve others now."""
        for grant in grants:
            sequence, span = grant.sequence, grant.span
            self._prompted += span.length if span.length > 1 else 0
            self._fairness.charge(sequence, grant.cost)
            if sequence.slot is not None and span.start < len(sequence.request.prompt):
                self._slots.computed(sequence, span)

    def _admit(self) -> None:
        """Give slots to waiting sequences: free ones as far as there are cells, then by preemption."""
        while self.waiting and (self._slots.free or not self._shared):
            sequence = self._fairness.next(self.waiting, self.running) if self._slots.free else None
            if sequence is not None and self._assign(sequence):
                continue
            preemption = self._fairness.preemption(self.waiting, self.running)
            if preemption is None:
                # What is not ready yet may change that without notice.
                self._shared = all(one.ready for one in self.waiting)
                return
            sequence, victim = preemption
            self._requeue(victim)
            self._assign(sequence)

    def _assign(self, sequence: Sequence) -> bool:
        """Give the sequence a slot, unless others would have to leave for its tokens; whether it has one."""
        standing = self._slots.acquire(sequence)
        self.running.append(sequence)
        self._came[sequence] = self._prompted
        if len(self.running) > 1 and not self._fits():
            self._unseat(sequence)
            return False
        self.waiting.remove(sequence)
        self._fairness.slot_assigned(sequence)
        self._elect(sequence)
        self._on_start(sequence, standing)
        return True

    def _unseat(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.release(sequence)
        self._leads.pop(sequence, None)
        self._shared = False
        del self._came[sequence]

    def _fits(self) -> bool:
        """Whether all tokens of the running sequences find cells, without anybody having to leave."""
        missing = sum(min(len(sequence.tokens), self._cache.capacity) for sequence in self.running)
        missing -= sum(self._cache.length(sequence.slot) for sequence in self.running if sequence.slot is not None)
        return missing <= self._cache.free_cells + self._cache.idle_cells()

    def _missing(self, sequence: Sequence) -> int:
        """Tokens that are not computed yet. Where shifts are due, not all of them have a place."""
        assert sequence.slot is not None, "a waiting sequence has no length"
        return len(sequence.tokens) - self._cache.length(sequence.slot)

    def _is_full(self, sequence: Sequence) -> bool:
        """Whether its slot is full; it may have left it."""
        return sequence.slot is not None and self._cache.length(sequence.slot) == self._cache.capacity

    def _is_crowded(self, grants: Collection[Grant]) -> bool:
        """Whether the cells are too few for all grants, though what is remembered makes room for them."""
        if sum([grant.span.length for grant in grants]) <= self._cache.free_rows:
            return False
        return self._cache.make_room([grant.span for grant in grants]) > 0

    def _follow(self) -> None:
        """Let followers take over what their leaders have computed, once that is all or will be no more."""
        for sequence in tuple(self._leads):
            if not self._holds(sequence):
                sequence.gain(self._slots.recall(sequence))
                self._elect(sequence)

    def _holds(self, sequence: Sequence) -> bool:
        """Whether an older sequence is about to compute what this one needs next."""
        lead = self._leads.get(sequence)
        if lead is None or lead.sequence.slot is None or lead.sequence.lineage.shifts:
            return False
        return self._missing(lead.sequence) > 1 and self._cache.length(lead.sequence.slot) < lead.common

    def _elect(self, sequence: Sequence) -> None:
        """Choose whom to wait for: the one of the older that has most in common beyond what is there already."""
        self._leads.pop(sequence, None)
        if self._missing(sequence) <= 1:
            return
        at, best = len(sequence.tokens) - self._missing(sequence), None
        for other in self.running[: self.running.index(sequence)]:
            common = sequence.lineage.whole(min(self._offered(other, sequence), sequence.reusable))
            if common > max(at, best.common if best else 0):
                best = _Lead(other, common)
        if best is not None:
            self._leads[sequence] = best
            best.sequence.mark(best.common)

    def _offered(self, leader: Sequence, sequence: Sequence) -> int:
        """How much of the sequence's beginning another will have computed with its prompt."""
        alike = leader.lineage.salt == sequence.lineage.salt and not leader.lineage.shifts
        if not alike or self._missing(leader) <= 1:
            return 0
        prompt = len(leader.request.prompt)
        return common_prefix(leader.lineage.keys(prompt), sequence.lineage.keys(prompt))

    def _grants(self) -> list[Grant]:
        """A row for everyone who lacks just one, and rows of prompts as far as the budget allows, those due first."""
        grants = []
        for sequence in self.running:
            if self._missing(sequence) == 1:
                grants.append(self._grant(sequence, len(sequence.tokens) - 1, 1))
        if len(grants) < len(self.running):
            grants += self._prompt_grants(grants)
        return grants

    def _prompt_grants(self, others: Iterable[Grant]) -> list[Grant]:
        """What prompts get beside the grants of others."""
        grants: list[Grant] = []
        allowance = self._budget.allow(Work.of(grant.span for grant in others))
        scored = max(self._scored - sum(len(grant.scored) for grant in others), 0)
        for sequence in self._prompts():
            start = len(sequence.tokens) - self._missing(sequence)
            # A mutual range comes whole, whatever it costs.
            least = 0 if grants else sum(stop - start for _, stop in sequence.lineage.mutual(start, start + 1))
            length = self._rows(sequence, start, max(allowance.rows(start), least), scored)
            if length:
                grants.append(self._grant(sequence, start, length))
                allowance.take(Work.of([grants[-1].span]))
                scored = max(scored - len(grants[-1].scored), 0)
        return grants

    def _grant(self, sequence: Sequence, start: int, length: int) -> Grant:
        """The next rows of a sequence, whose slot stands at `start`."""
        assert sequence.slot is not None, "a waiting sequence has no slot"
        mutual = sequence.lineage.mutual(start, start + length)
        return Grant(sequence, Span(sequence.slot, start, length, mutual, extended=sequence.extended))

    def _prompts(self) -> list[Sequence]:
        """Those who lack more than one row and wait for nobody, those due first; one is due when its followers are."""
        due = {one: (one.rank, self._came[one] + _PATIENCE * self._missing(one)) for one in self.running}
        held = {one for one in self.running if self._holds(one)}
        for follower in reversed(self.running):
            if follower in held:
                leader = self._leads[follower].sequence
                due[leader] = min(due[leader], due[follower])
        free = [one for one in self.running if one not in held and self._missing(one) > 1]
        return sorted(free, key=lambda one: due[one])

    def _rows(self, sequence: Sequence, start: int, most: int, scored: int) -> int:
        """Rows that one forward may bring, up to `most`: not past the capacity, nor past a mark that needs a state.

        scored  of them, those that score a token at most
        A mutual range comes whole, or not yet.
        """
        if sequence.scores is not None and not sequence.request.mutual:
            most = min(most, max(sequence.scores.next - start, 0) + scored)
        stop = sequence.lineage.whole(min(start + most, len(sequence.tokens), self._cache.capacity))
        # A recurrent state exists only where a span ends.
        marks = sequence.marks(start, stop) if self._cache.states is not None else []
        return (marks[0] if marks else stop) - start

    def _preempt(self) -> None:
        """Send the sequence that is served last back in line, because cells ran out."""
        assert len(self.running) > 1, "one sequence alone always fits: its capacity is at most the pool"
        last = self._fairness.victim(self.running)
        self._requeue(last)
        self._fairness.slot_lost(last)

    def _requeue(self, sequence: Sequence) -> None:
        """Send a sequence back in line, before its like.

        What it computed is remembered, until somebody needs its cells.
        """
        self._slots.remember(sequence)
        self._unseat(sequence)
        self.waiting.insert(bisect_left([other.rank for other in self.waiting], sequence.rank), sequence)
        self.preemptions += 1
        # Others may have waited for it. They do not any more: it may come back behind them, and wait for them.
        self._follow()

    def _shift(self, sequence: Sequence) -> None:
        """Drop what the sequence drops at a full context, in the cache and in the sequence."""
        cut, states = sequence.lineage.cut(), sequence.request.recurrent_shift
        assert cut is not None, "a sequence with nothing to drop has ended"
        while sequence.slot is not None:
            try:
                standing = cut.start
                if sequence.is_rotated_alike:
                    standing = self._cache.shift(sequence.slot, cut.start, cut.drop, states=states)
            except OutOfCells:
                self._make_private()
            else:
                if standing <= cut.start:
                    # Nothing moved. How much of what earlier shifts moved is left may depend on chunks: none shall be.
                    standing = self._slots.rewind(sequence, min(standing, sequence.lineage.plain))
                sequence.lineage.shift(cut, standing)
                return

    def _make_private(self) -> None:
        """Free cells for copies of shared ones; a sequence that shares with the memory alone gets its cells back."""
        if len(self.running) > 1:
            self._preempt()
        else:
            self._cache.forget()
