"""Chooses the tokens of each step. Prefill and decoding are one: a step computes a span of the uncomputed tokens.

Owns the queues. When cells run out, cached prefixes are evicted; then the youngest sequence of the last tier,
of the owner and the request with the most slots, is preempted. It resumes later with the same text, since a sampled
token depends on its own past only. Sequences whose output is not read let the others decode first. Slots are shared
fairly by owner and by request (fairness.py). Of sequences with a shared prefix the youngest wait while the oldest
computes it. prefill_budget.py limits the prompt tokens of a step; prompts are ordered by deadline.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from engine.schedule.fairness import Fairness
from engine.schedule.prefill_budget import Budget
from engine.schedule.scheduled import ScheduledSequence
from engine.schedule.sequence import Sequence
from engine.schedule.slots import Slots
from engine.schedule.step_cost import Work
from engine.text.prefix import common_prefix_length
from kvcache.cache import Cache
from kvcache.errors import OutOfCells
from kvcache.spec import Span

# The deadline of a prompt, on a clock of prefilled tokens: this factor times its uncomputed tokens after admission. In
# simulated mixes of long and short prompts the median time to first token is 0.4 of first come, first served, the mean
# 0.6 of it; the last long prompt takes up to 2.4 times as long (shortest first: 5 times).
_DEADLINE_FACTOR = 4


@dataclass(frozen=True, slots=True)
class _Leader:
    """An older sequence that computes the first `shared_length` tokens of a follower."""

    sequence: Sequence
    shared_length: int


class ShiftFailed(Exception):
    """The context shift of a running sequence failed, perhaps in the middle: only `discard` is possible."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__("a context shift failed")
        self.sequence = sequence


class Scheduler:
    """The waiting and the running sequences of one cache.

    budget             limits the prompt tokens of a step
    max_scored         limits the scored prompt tokens of a step, each of which needs logits
    on_start           called with a sequence that got a slot, and its cached length
    computes_together  whether tokens of contents may be in one step with others
    """

    def __init__(
        self,
        cache: Cache,
        budget: Budget,
        *,
        max_scored: int,
        on_start: Callable[[Sequence, int], None],
        computes_together: Callable[[Rows[ScheduledSequence]], bool],
    ) -> None:
        self._cache = cache
        self._budget, self._max_scored = budget, max_scored
        self._on_start, self._computes_together = on_start, computes_together
        self._slots = Slots(cache)
        self.fairness = Fairness()
        # Preemption would make no share fairer, until a sequence is queued or leaves its slot.
        self._shares_are_fair = False
        self._leaders: dict[Sequence, _Leader] = {}
        # Prompt tokens computed so far: the clock of deadlines. And its value when each sequence was admitted.
        self._prefilled_tokens = 0
        self._admitted_at: dict[Sequence, int] = {}
        # Whether the last step had tokens of contents.
        self._was_contents = False
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.time_slices = 0

    def cached_length(self, sequence: Sequence) -> int:
        """Tokens with keys and values, of a sequence with a slot."""
        return self._cache.cached_length(_slot(sequence))

    @property
    def decode_work(self) -> Work:
        """The work of the next token of all sequences in decode."""
        decoding = (sequence for sequence in self.running if self._uncomputed_tokens(sequence) == 1)
        return Work.of(Span(_slot(sequence), len(sequence.tokens) - 1, 1) for sequence in decoding)

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.waiting or self.running)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence after all of its rank or a better one."""
        ranks = [other.rank for other in self.waiting]
        self.fairness.add(sequence)
        self.waiting.insert(bisect_right(ranks, sequence.rank), sequence)
        self._shares_are_fair = False

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence, running or waiting, and cache its tokens unless its request is uncached."""
        # Cells that a context shift moved match this sequence only, which does not return.
        if sequence.slot is not None and sequence.request.cacheable and not sequence.context.restore_length:
            self._slots.insert_prefix(sequence.slot, sequence.context)
        self.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Remove a failed sequence, running or waiting, and cache none of its tokens."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._release_slot(sequence)
        self.fairness.remove(sequence)
        if not sequence.request.cacheable:
            self._remove_prefixes(sequence)

    def schedule(self) -> list[ScheduledSequence]:
        """The spans of the next step; there are free cells for all of them. Raises ShiftFailed."""
        self._admit()
        for sequence in tuple(self.running):
            if len(sequence.tokens) > self._cache.capacity and self._is_at_capacity(sequence):
                self._shift(sequence)
        self._update_followers()
        for sequence in self.running:
            if sequence.needs_long_factors:
                self._restart_with_long_factors(sequence)
        scheduled = self._schedule_running()
        while scheduled and self._lacks_cells(scheduled):
            self._preempt()
            scheduled = self._schedule_running()
        return scheduled

    def set_unread(self, sequence: Sequence, is_unread: bool) -> None:
        """Record whether the output of a sequence is not read: then its slot goes to others first."""
        sequence.is_unread = is_unread
        self._shares_are_fair = False

    def record_step(self, batch: Iterable[ScheduledSequence]) -> None:
        """Charge a computed step to the owners of its sequences, and insert its prompt tokens into the prefix cache."""
        for scheduled in batch:
            self._was_contents = scheduled.has_content_rows
            sequence, span = scheduled.sequence, scheduled.span
            self._prefilled_tokens += span.length if span.length > 1 else 0
            if self.fairness.charge(sequence, scheduled.charged_tokens):
                self._shares_are_fair = False
            if sequence.slot is not None and span.start < len(sequence.request.prompt):
                self._insert_span(sequence, span)

    def waits_for_leader(self, sequence: Sequence) -> bool:
        """Whether an older sequence is about to compute the next tokens of this one."""
        leader = self._leaders.get(sequence)
        if leader is None or leader.sequence.slot is None or leader.sequence.context.shifts:
            return False
        computed = self._cache.cached_length(leader.sequence.slot)
        return self._uncomputed_tokens(leader.sequence) > 1 and computed < leader.shared_length

    def _admit(self) -> None:
        """Give slots to waiting sequences: free ones while cells suffice, then by preemption."""
        while self.waiting and (self._slots.free_count or not self._shares_are_fair):
            sequence = self.fairness.next_admission(self.waiting, self.running) if self._slots.free_count else None
            if sequence is not None and self._assign(sequence):
                continue
            preemption = self.fairness.find_preemption(self.waiting, self.running, self._cache.cells)
            if preemption is None:
                # A sequence that becomes ready may change that.
                self._shares_are_fair = all(waiting.is_ready for waiting in self.waiting)
                return
            self._requeue(preemption.victim)
            if preemption.is_time_slice:
                self.time_slices += 1
            else:
                self.preemptions += 1
            self._assign(preemption.sequence)

    def _assign(self, sequence: Sequence) -> bool:
        """Give the sequence a slot unless its tokens would need a preemption; whether it got one."""
        cached_length = self._acquire_slot(sequence)
        self.running.append(sequence)
        self._admitted_at[sequence] = self._prefilled_tokens
        if len(self.running) > 1 and not self._all_fit():
            self._release_slot(sequence)
            return False
        self.waiting.remove(sequence)
        self.fairness.slot_assigned(sequence)
        self._choose_leader(sequence)
        self._on_start(sequence, cached_length)
        return True

    def _acquire_slot(self, sequence: Sequence) -> int:
        """Give the sequence a free slot; the length that the slot reused from the prefix cache.

        A shifted sequence returns to its last stage at which all tokens are found that cannot be recomputed.
        """
        if sequence.needs_long_factors:
            sequence.switch_to_long_factors()
        sequence.slot = self._slots.acquire()
        while (cached_length := self._reuse_prefix(sequence)) < sequence.context.restore_length:
            self._cache.clear(sequence.slot)
            sequence.context.undo_shift()
        return cached_length

    def _release_slot(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.release(_slot(sequence))
        sequence.slot = None
        self._leaders.pop(sequence, None)
        self._shares_are_fair = False
        self.fairness.slot_released(sequence)
        del self._admitted_at[sequence]

    def _all_fit(self) -> bool:
        """Whether all tokens of the running sequences fit into free and evictable cells."""
        slots = [sequence.slot for sequence in self.running if sequence.slot is not None]
        needed = sum(min(len(sequence.tokens), self._cache.capacity) for sequence in self.running)
        needed -= sum(self._cache.cached_length(slot) for slot in slots)
        return needed <= self._cache.free_cells + self._cache.evictable_cells()

    def _uncomputed_tokens(self, sequence: Sequence) -> int:
        """Tokens without keys and values; more than fit the slot where a context shift is due."""
        return len(sequence.tokens) - self._cache.cached_length(_slot(sequence))

    def _is_at_capacity(self, sequence: Sequence) -> bool:
        """Whether it has a slot and the slot is full."""
        return sequence.slot is not None and self._cache.cached_length(sequence.slot) == self._cache.capacity

    def _lacks_cells(self, batch: Collection[ScheduledSequence]) -> bool:
        """Evict cached prefixes for the scheduled tokens; whether cells are missing all the same."""
        if sum([scheduled.span.length for scheduled in batch]) <= self._cache.appendable_tokens:
            return False
        return self._cache.evict_for([scheduled.span for scheduled in batch]) > 0

    def _reuse_prefix(self, sequence: Sequence) -> int:
        """Extend the slot by cells of the prefix cache that hold the next tokens of the sequence; its new length.

        Tokens that need logits or hidden states are not reused, and never the last one. Where the prefix cache matches
        more tokens than a slot can resume at, the end of the match becomes a checkpoint.
        """
        slot, context = _slot(sequence), sequence.context
        length = min(sequence.reusable_length, self._cache.capacity)
        cached_length = self._slots.reuse_prefix(slot, context, length)
        match = self._cache.match_prefix(context.prefix_keys(length), salt=context.salt)
        sequence.record_prefix_match(match.length, diverged=match.diverged)
        return self._slots.rewind(slot, context, cached_length)

    def _insert_span(self, sequence: Sequence, span: Span) -> None:
        """Insert a computed span of the prompt into the prefix cache, with its checkpoints."""
        slot, context = _slot(sequence), sequence.context
        if context.shifts:
            return
        # With the start of the span: a length that was reused, so that no earlier span ended there.
        for position in sequence.checkpoints(span.start - 1, span.stop):
            self._slots.insert_prefix(slot, context, position, checkpoint=True)
        if span.stop <= len(sequence.request.prompt):
            self._slots.insert_prefix(slot, context, span.stop)

    def _remove_prefixes(self, sequence: Sequence) -> None:
        """Remove what its choices shared, and what preemptions kept, under the salts that no other choice has."""
        others = [other.context.salts for other in (*self.running, *self.waiting) if not other.request.cacheable]
        for salt in sequence.context.salts.difference(*others):
            self._cache.remove_prefixes(salt)

    def _restart_with_long_factors(self, sequence: Sequence) -> None:
        """Recompute the sequence with the long rotary factors; its old keys and values stay in the prefix cache."""
        slot = _slot(sequence)
        self._slots.insert_prefix(slot, sequence.context)
        self._cache.clear(slot)
        sequence.switch_to_long_factors()
        self._reuse_prefix(sequence)

    def _update_followers(self) -> None:
        """Let followers reuse the prefixes of leaders that computed them, or that will not any more."""
        for sequence in tuple(self._leaders):
            if not self.waits_for_leader(sequence):
                sequence.update_cached(self._reuse_prefix(sequence))
                self._choose_leader(sequence)

    def _choose_leader(self, sequence: Sequence) -> None:
        """Wait for the older sequence with the longest shared prefix, if that is longer than the cached length."""
        self._leaders.pop(sequence, None)
        if self._uncomputed_tokens(sequence) <= 1:
            return
        computed, best = len(sequence.tokens) - self._uncomputed_tokens(sequence), None
        for other in self.running[: self.running.index(sequence)]:
            shared = sequence.context.align_down(min(self._shared_length(other, sequence), sequence.reusable_length))
            if shared > max(computed, best.shared_length if best else 0):
                best = _Leader(other, shared)
        if best is not None:
            self._leaders[sequence] = best
            best.sequence.add_checkpoint(best.shared_length)

    def _shared_length(self, leader: Sequence, sequence: Sequence) -> int:
        """The length of the common prefix with the prompt of a leader in prefill; 0 for one that is decoding."""
        matches = leader.context.salt == sequence.context.salt and not leader.context.shifts
        if not matches or self._uncomputed_tokens(leader) <= 1:
            return 0
        prompt = len(leader.request.prompt)
        return common_prefix_length(leader.context.prefix_keys(prompt), sequence.context.prefix_keys(prompt))

    def _schedule_running(self) -> list[ScheduledSequence]:
        """The last token of each sequence in decode, and chunks of prompts within the prefill budget.

        A sequence whose output is not read is in decode only while no other sequence has anything to compute.
        """
        decoding = [
            self._scheduled(sequence, len(sequence.tokens) - 1, 1)
            for sequence in self.running
            if self._uncomputed_tokens(sequence) == 1 and self._is_computable(sequence)
        ]
        read = [scheduled for scheduled in decoding if not scheduled.sequence.is_unread]
        scheduled = read if len(decoding) == len(self.running) else [*read, *self._schedule_prefill(read)]
        return self._of_one_kind(scheduled or decoding)

    def _of_one_kind(self, scheduled: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Those with tokens of contents, or the others, in turns, where different runners compute them; else all."""
        contents = [sequence for sequence in scheduled if sequence.has_content_rows]
        if not contents or len(contents) == len(scheduled) or self._computes_together(scheduled):
            return scheduled
        if self._was_contents:
            return [sequence for sequence in scheduled if not sequence.has_content_rows]
        return contents

    def _is_computable(self, sequence: Sequence) -> bool:
        """Whether the next token can be computed: it is text, or its content is encoded."""
        start = self.cached_length(sequence)
        stop = None if sequence.contents is None else sequence.contents.computable_stop(start)
        return stop is None or stop > start

    def _schedule_prefill(self, decoding: Iterable[ScheduledSequence]) -> list[ScheduledSequence]:
        """Chunks of prompts, in a step with `decoding` sequences."""
        chunks: list[ScheduledSequence] = []
        allowance = self._budget.allow(Work.of(scheduled.span for scheduled in decoding))
        scored = max(self._max_scored - sum(len(scheduled.scored_positions) for scheduled in decoding), 0)
        for sequence in self._prefill_order():
            start = len(sequence.tokens) - self._uncomputed_tokens(sequence)
            # A bidirectional range is computed as a whole, whatever it costs.
            least = 0 if chunks else sum(stop - start for _, stop in sequence.context.bidirectional(start, start + 1))
            length = self._chunk_length(sequence, start, max(allowance.tokens(start), least), scored)
            if length:
                chunks.append(self._scheduled(sequence, start, length))
                allowance.take(Work.of([chunks[-1].span]))
                scored = max(scored - len(chunks[-1].scored_positions), 0)
        return chunks

    def _scheduled(self, sequence: Sequence, start: int, length: int) -> ScheduledSequence:
        ranges = sequence.context.bidirectional(start, start + length)
        span = Span(_slot(sequence), start, length, ranges, long_factors=sequence.long_factors)
        return ScheduledSequence(sequence, span)

    def _prefill_order(self) -> list[Sequence]:
        """Sequences in prefill that wait for no leader, by deadline; a leader inherits its followers' deadlines."""
        deadlines = {
            sequence: (
                sequence.rank,
                self._admitted_at[sequence] + _DEADLINE_FACTOR * self._uncomputed_tokens(sequence),
            )
            for sequence in self.running
        }
        followers = {sequence for sequence in self.running if self.waits_for_leader(sequence)}
        for follower in reversed(self.running):
            if follower in followers:
                leader = self._leaders[follower].sequence
                deadlines[leader] = min(deadlines[leader], deadlines[follower])
        prompts = [
            sequence for sequence in self.running if sequence not in followers and self._uncomputed_tokens(sequence) > 1
        ]
        return sorted(prompts, key=lambda sequence: deadlines[sequence])

    def _chunk_length(self, sequence: Sequence, start: int, max_tokens: int, max_scored: int) -> int:
        """Tokens of the next chunk, up to `max_tokens` and the capacity, of which at most `max_scored` are scored.

        It ends at the next checkpoint of recurrent states, and splits no bidirectional range.
        """
        if sequence.scores is not None and not sequence.request.contents:
            max_tokens = min(max_tokens, max(sequence.scores.next_position - start, 0) + max_scored)
        stop = min(start + max_tokens, len(sequence.tokens), self._cache.capacity)
        computable = None if sequence.contents is None else sequence.contents.computable_stop(start)
        stop = sequence.context.align_down(stop if computable is None else min(stop, computable))
        # A recurrent state exists only where a span ends.
        checkpoints = sequence.checkpoints(start, stop) if self._cache.recurrent_states is not None else []
        return (checkpoints[0] if checkpoints else stop) - start

    def _preempt(self) -> None:
        """Preempt a sequence because cells ran out."""
        assert len(self.running) > 1, "one sequence alone always fits: its capacity is at most the pool"
        victim = self.fairness.preemption_victim(self.running)
        self._requeue(victim)
        self.preemptions += 1
        self.fairness.slot_lost(victim)

    def _requeue(self, sequence: Sequence) -> None:
        """Move a running sequence to the queue, before all of its rank, and cache its tokens."""
        self._slots.insert_prefix(_slot(sequence), sequence.context)
        self._release_slot(sequence)
        self.waiting.insert(bisect_left([other.rank for other in self.waiting], sequence.rank), sequence)
        # Its followers stop waiting: it may be admitted after them, and become their follower.
        self._update_followers()

    def _shift(self, sequence: Sequence) -> None:
        """Context shift: drop the next range of a full context in the cache and in the sequence."""
        drop, states = sequence.context.next_drop(), sequence.request.recurrent_shift
        assert drop is not None, "a sequence with nothing to drop has ended"
        while sequence.slot is not None:
            try:
                cached_length = drop.start
                if sequence.has_uniform_factors:
                    cached_length = self._cache.shift(sequence.slot, drop.start, drop.length, states=states)
            except OutOfCells:
                self._free_cells_for_copies()
            except Exception as error:
                raise ShiftFailed(sequence) from error
            else:
                if cached_length <= drop.start:
                    # No key moved. How many keys of earlier shifts are left may depend on chunk sizes: drop them all.
                    length = min(cached_length, sequence.context.recomputable_length)
                    cached_length = self._slots.rewind(sequence.slot, sequence.context, length)
                sequence.context.shift(drop, cached_length)
                return

    def _free_cells_for_copies(self) -> None:
        """Free cells for copies of shared ones: preempt a sequence, or reset the prefix cache for the last one."""
        if len(self.running) > 1:
            self._preempt()
        else:
            self._cache.reset_prefix_cache()


def _slot(sequence: Sequence) -> int:
    """The slot of a running sequence."""
    assert sequence.slot is not None, "a waiting sequence has no slot"
    return sequence.slot
