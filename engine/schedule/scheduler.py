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
from engine.text.prefix import common_prefix_length
from kvcache.cache import Cache
from kvcache.errors import OutOfCells
from kvcache.spec import Span

# A prompt is due when so many rows of prompts were computed for each one that it needs. In simulated mixes of long and
# short ones on a busy machine that takes 0.4 of the time of first come, first served to the median first token and 0.6
# to the mean one. The last of the long ones takes up to 2.4 times as long; shortest first, 5 times.
_DEADLINE_FACTOR = 4


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """What a step computes for one sequence: a span of its tokens, and rows for guesses at what comes behind them."""

    sequence: Sequence
    span: Span
    draft: Draft | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing afterwards, so that the last row's logits give the next token."""
        return self.span.stop == len(self.sequence.tokens)

    @property
    def is_sampled(self) -> bool:
        """Whether the last row's logits are to give the next token."""
        return self.is_complete and self.sequence.max_new_tokens > 0

    @property
    def sample_count(self) -> int:
        """How many of the last rows are to give a token: that behind the span, and those of the draft."""
        return len(self.draft_tokens) + 1 if self.is_sampled else 0

    @property
    def samples_only(self) -> bool:
        """Whether nobody asks for anything but what is said."""
        sequence = self.sequence
        return sequence.scores is None and sequence.pool is None and sequence.request.logprobs is None

    @property
    def scored_positions(self) -> range:
        """The positions of the span whose logits score a token of the prompt."""
        scores = self.sequence.scores
        return range(0) if scores is None else scores.logit_positions(self.span.start, self.span.stop)

    @property
    def pooled_positions(self) -> range:
        """The positions of the span whose states become part of a vector."""
        pool = self.sequence.pool
        return range(0) if pool is None else pool.state_positions(self.span.start, self.span.stop)

    @property
    def charged_tokens(self) -> int:
        """Tokens that the owner is charged: those computed, and one more for each whose log-probabilities are read."""
        asked = self.sample_count if self.sequence.request.logprobs is not None else 0
        return self.batch_span.length + len(self.scored_positions) + asked

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        """The tokens of the draft."""
        return () if self.draft is None else self.draft.tokens

    @property
    def batch_span(self) -> Span:
        """The span with the rows of the draft."""
        if self.draft is None:
            return self.span
        count = len(self.draft_tokens)
        return replace(self.span, length=self.span.length + count, draft_tokens=count)

    @property
    def batch_tokens(self) -> list[int]:
        """The tokens of all rows."""
        tokens = self.sequence.tokens[self.span.start : self.span.stop]
        return tokens if self.draft is None else [*tokens, *self.draft.tokens]


@dataclass(frozen=True, slots=True)
class _Leader:
    """An older sequence whose prompt begins like the follower's, for `shared_length` tokens."""

    sequence: Sequence
    shared_length: int


class Scheduler:
    """The waiting and the running sequences over one cache.

    budget  of the rows of prompt in a step, over all sequences
    scored  of them those that score a token, at most: each has logits
    """

    def __init__(
        self, cache: Cache, budget: Budget, *, max_scored: int, on_start: Callable[[Sequence, int], None]
    ) -> None:
        self._cache = cache
        self._budget, self._max_scored = budget, max_scored
        self._on_start = on_start
        self._slots = Slots(cache)
        self._fairness = Fairness()
        # Whether preemption would make no share fairer, until a sequence is queued or leaves its slot.
        self._shares_are_fair = False
        self._leaders: dict[Sequence, _Leader] = {}
        # Rows of prompts that were computed so far, and when each of the running sequences came, by that clock.
        self._prefilled_tokens = 0
        self._admitted_at: dict[Sequence, int] = {}
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
        self._fairness.add(sequence)
        self._shares_are_fair = False

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is: it is over, and what it computed can serve others."""
        # What a shift moved is found only by a sequence of the same past when it comes back, and this one will not.
        if sequence.slot is not None and not sequence.context.restore_length:
            self._slots.insert_prefix(sequence)
        self.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and remember nothing of it: it broke."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._release_slot(sequence)
        self._fairness.remove(sequence)

    def schedule(self) -> list[ScheduledSequence]:
        """The spans of the next step, with enough free cells for all of them."""
        self._admit()
        for sequence in tuple(self.running):
            if len(sequence.tokens) > self._cache.capacity and self._is_at_capacity(sequence):
                self._shift(sequence)
        self._update_followers()
        for sequence in self.running:
            if sequence.needs_long_factors:
                self._slots.restart_with_long_factors(sequence)
        grants = self._schedule_running()
        while grants and self._lacks_cells(grants):
            self._preempt()
            grants = self._schedule_running()
        return grants

    def record_step(self, scheduled: Iterable[ScheduledSequence]) -> None:
        """Take note that a step computed its grants: what was a prompt can serve others now."""
        for grant in scheduled:
            sequence, span = grant.sequence, grant.span
            self._prefilled_tokens += span.length if span.length > 1 else 0
            self._fairness.charge(sequence, grant.charged_tokens)
            if sequence.slot is not None and span.start < len(sequence.request.prompt):
                self._slots.insert_span(sequence, span)

    def _admit(self) -> None:
        """Give slots to waiting sequences: free ones as far as there are cells, then by preemption."""
        while self.waiting and (self._slots.free_count or not self._shares_are_fair):
            sequence = self._fairness.next_admission(self.waiting, self.running) if self._slots.free_count else None
            if sequence is not None and self._assign(sequence):
                continue
            preemption = self._fairness.find_preemption(self.waiting, self.running)
            if preemption is None:
                # What is not ready yet may change that without notice.
                self._shares_are_fair = all(one.is_ready for one in self.waiting)
                return
            sequence, victim = preemption
            self._requeue(victim)
            self._assign(sequence)

    def _assign(self, sequence: Sequence) -> bool:
        """Give the sequence a slot, unless others would have to leave for its tokens; whether it has one."""
        standing = self._slots.acquire(sequence)
        self.running.append(sequence)
        self._admitted_at[sequence] = self._prefilled_tokens
        if len(self.running) > 1 and not self._all_fit():
            self._release_slot(sequence)
            return False
        self.waiting.remove(sequence)
        self._fairness.slot_assigned(sequence)
        self._choose_leader(sequence)
        self._on_start(sequence, standing)
        return True

    def _release_slot(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.release(sequence)
        self._leaders.pop(sequence, None)
        self._shares_are_fair = False
        del self._admitted_at[sequence]

    def _all_fit(self) -> bool:
        """Whether all tokens of the running sequences find cells, without anybody having to leave."""
        missing = sum(min(len(sequence.tokens), self._cache.capacity) for sequence in self.running)
        missing -= sum(
            self._cache.cached_length(sequence.slot) for sequence in self.running if sequence.slot is not None
        )
        return missing <= self._cache.free_cells + self._cache.evictable_cells()

    def _uncomputed_tokens(self, sequence: Sequence) -> int:
        """Tokens that are not computed yet. Where shifts are due, not all of them have a place."""
        assert sequence.slot is not None, "a waiting sequence has no length"
        return len(sequence.tokens) - self._cache.cached_length(sequence.slot)

    def _is_at_capacity(self, sequence: Sequence) -> bool:
        """Whether its slot is full; it may have left it."""
        return sequence.slot is not None and self._cache.cached_length(sequence.slot) == self._cache.capacity

    def _lacks_cells(self, scheduled: Collection[ScheduledSequence]) -> bool:
        """Whether the cells are too few for all grants, though what is remembered makes room for them."""
        if sum([grant.span.length for grant in scheduled]) <= self._cache.appendable_tokens:
            return False
        return self._cache.evict_for([grant.span for grant in scheduled]) > 0

    def _update_followers(self) -> None:
        """Let followers take over what their leaders have computed, once that is all or will be no more."""
        for sequence in tuple(self._leaders):
            if not self._waits_for_leader(sequence):
                sequence.update_cached(self._slots.reuse_prefix(sequence))
                self._choose_leader(sequence)

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """Whether an older sequence is about to compute what this one needs next."""
        lead = self._leaders.get(sequence)
        if lead is None or lead.sequence.slot is None or lead.sequence.context.shifts:
            return False
        return (
            self._uncomputed_tokens(lead.sequence) > 1
            and self._cache.cached_length(lead.sequence.slot) < lead.shared_length
        )

    def _choose_leader(self, sequence: Sequence) -> None:
        """Choose whom to wait for: the one of the older that has most in common beyond what is there already."""
        self._leaders.pop(sequence, None)
        if self._uncomputed_tokens(sequence) <= 1:
            return
        at, best = len(sequence.tokens) - self._uncomputed_tokens(sequence), None
        for other in self.running[: self.running.index(sequence)]:
            common = sequence.context.align_down(min(self._shared_length(other, sequence), sequence.reusable_length))
            if common > max(at, best.shared_length if best else 0):
                best = _Leader(other, common)
        if best is not None:
            self._leaders[sequence] = best
            best.sequence.add_checkpoint(best.shared_length)

    def _shared_length(self, leader: Sequence, sequence: Sequence) -> int:
        """How much of the sequence's beginning another will have computed with its prompt."""
        alike = leader.context.salt == sequence.context.salt and not leader.context.shifts
        if not alike or self._uncomputed_tokens(leader) <= 1:
            return 0
        prompt = len(leader.request.prompt)
        return common_prefix_length(leader.context.prefix_keys(prompt), sequence.context.prefix_keys(prompt))

    def _schedule_running(self) -> list[ScheduledSequence]:
        """A row for everyone who lacks just one, and rows of prompts as far as the budget allows, those due first."""
        grants = []
        for sequence in self.running:
            if self._uncomputed_tokens(sequence) == 1:
                grants.append(self._scheduled(sequence, len(sequence.tokens) - 1, 1))
        if len(grants) < len(self.running):
            grants += self._schedule_prefill(grants)
        return grants

    def _schedule_prefill(self, decoding: Iterable[ScheduledSequence]) -> list[ScheduledSequence]:
        """What prompts get beside the grants of others."""
        grants: list[ScheduledSequence] = []
        allowance = self._budget.allow(Work.of(grant.span for grant in decoding))
        scored = max(self._max_scored - sum(len(grant.scored_positions) for grant in decoding), 0)
        for sequence in self._prefill_order():
            start = len(sequence.tokens) - self._uncomputed_tokens(sequence)
            # A mutual range comes whole, whatever it costs.
            least = 0 if grants else sum(stop - start for _, stop in sequence.context.bidirectional(start, start + 1))
            length = self._chunk_length(sequence, start, max(allowance.rows(start), least), scored)
            if length:
                grants.append(self._scheduled(sequence, start, length))
                allowance.take(Work.of([grants[-1].span]))
                scored = max(scored - len(grants[-1].scored_positions), 0)
        return grants

    def _scheduled(self, sequence: Sequence, start: int, length: int) -> ScheduledSequence:
        """The next rows of a sequence, whose slot stands at `start`."""
        assert sequence.slot is not None, "a waiting sequence has no slot"
        mutual = sequence.context.bidirectional(start, start + length)
        return ScheduledSequence(
            sequence, Span(sequence.slot, start, length, mutual, long_factors=sequence.long_factors)
        )

    def _prefill_order(self) -> list[Sequence]:
        """Those who lack more than one row and wait for nobody, those due first; one is due when its followers are."""
        due = {
            one: (one.rank, self._admitted_at[one] + _DEADLINE_FACTOR * self._uncomputed_tokens(one))
            for one in self.running
        }
        held = {one for one in self.running if self._waits_for_leader(one)}
        for follower in reversed(self.running):
            if follower in held:
                leader = self._leaders[follower].sequence
                due[leader] = min(due[leader], due[follower])
        free = [one for one in self.running if one not in held and self._uncomputed_tokens(one) > 1]
        return sorted(free, key=lambda one: due[one])

    def _chunk_length(self, sequence: Sequence, start: int, max_tokens: int, max_scored: int) -> int:
        """Rows that one forward may bring, up to `max_tokens`: not past the capacity, nor past a mark that needs a state.

        scored  of them, those that score a token at most
        A mutual range comes whole, or not yet.
        """
        if sequence.scores is not None and not sequence.request.bidirectional:
            max_tokens = min(max_tokens, max(sequence.scores.next_position - start, 0) + max_scored)
        stop = sequence.context.align_down(min(start + max_tokens, len(sequence.tokens), self._cache.capacity))
        # A recurrent state exists only where a span ends.
        marks = sequence.checkpoints(start, stop) if self._cache.recurrent_states is not None else []
        return (marks[0] if marks else stop) - start

    def _preempt(self) -> None:
        """Send the sequence that is served last back in line, because cells ran out."""
        assert len(self.running) > 1, "one sequence alone always fits: its capacity is at most the pool"
        last = self._fairness.preemption_victim(self.running)
        self._requeue(last)
        self._fairness.slot_lost(last)

    def _requeue(self, sequence: Sequence) -> None:
        """Send a sequence back in line, before its like.

        What it computed is remembered, until somebody needs its cells.
        """
        self._slots.insert_prefix(sequence)
        self._release_slot(sequence)
        self.waiting.insert(bisect_left([other.rank for other in self.waiting], sequence.rank), sequence)
        self.preemptions += 1
        # Others may have waited for it. They do not any more: it may come back behind them, and wait for them.
        self._update_followers()

    def _shift(self, sequence: Sequence) -> None:
        """Drop what the sequence drops at a full context, in the cache and in the sequence."""
        cut, states = sequence.context.next_drop(), sequence.request.recurrent_shift
        assert cut is not None, "a sequence with nothing to drop has ended"
        while sequence.slot is not None:
            try:
                standing = cut.start
                if sequence.has_uniform_factors:
                    standing = self._cache.shift(sequence.slot, cut.start, cut.length, states=states)
            except OutOfCells:
                self._free_cells_for_copies()
            else:
                if standing <= cut.start:
                    # Nothing moved. How much of what earlier shifts moved is left may depend on chunks: none shall be.
                    standing = self._slots.rewind(sequence, min(standing, sequence.context.recomputable_length))
                sequence.context.shift(cut, standing)
                return

    def _free_cells_for_copies(self) -> None:
        """Free cells for copies of shared ones; a sequence that shares with the memory alone gets its cells back."""
        if len(self.running) > 1:
            self._preempt()
        else:
            self._cache.reset_prefix_cache()
