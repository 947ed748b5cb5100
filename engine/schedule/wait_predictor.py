"""Predicts waits from the state of a scheduler and measured step costs; refuses requests that would time out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from engine.errors import TimeoutTooShort
from engine.schedule.fairness import TIME_SLICE_STEPS
from engine.schedule.predicted_wait import SlotUse, free_place_seconds, slot_seconds
from engine.schedule.prefill_budget import Budget
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence
from engine.schedule.totals import Totals
from engine.text.prefix import common_prefix_length
from kvcache.cache import Cache

# Of a predicted wait, the share that is certain: the machine may be faster than measured.
CERTAINTY = 0.8
# Tokens of all sequences up to which their prefixes are compared, once a step: 65 ns a token (measured).
MAX_COMPARED_TOKENS = 2**17


class WaitPredictor:
    """Reads the scheduler and its cache. Belongs to the engine thread."""

    def __init__(self, cache: Cache, scheduler: Scheduler, budget: Budget, totals: Totals) -> None:
        self._cache, self._scheduler, self._budget, self._totals = cache, scheduler, budget, totals
        # The step and the sequences of the latest comparison, its keys in order, and unshared tokens.
        self._compared: tuple[int, tuple[Sequence, ...]] = 0, ()
        self._ordered: list[tuple[bytes, list[int]]] = []
        self._counts: dict[Sequence, int] = {}

    def free_place_seconds(self) -> float:
        """The predicted time until a place in the queue is free."""
        running = self._scheduler.running
        return free_place_seconds(
            [len(sequence.tokens) - self._scheduler.cached_length(sequence) - 1 for sequence in running],
            [sequence.max_new_tokens - len(sequence.output) for sequence in running],
            mean_output=self._totals.mean_output_tokens,
            token_seconds=self._budget.token_seconds(),
            step_seconds=self._budget.decode_seconds(self._scheduler.decode_work),
        )

    def refusal(self, sequence: Sequence) -> TimeoutTooShort | None:
        """The refusal of a new sequence whose timeout surely ends before its first token; None: it may be in time."""
        timeout = sequence.request.timeout_seconds
        if timeout is None or sequence.request.emitted or not (sequence.max_new_tokens or sequence.pooler):
            return None
        if timeout >= CERTAINTY * self._budget.token_seconds() * self._tokens(sequence):
            # Long enough to compute all prompts, cached or not.
            return None
        seconds = CERTAINTY * self.first_token_seconds(sequence)
        return TimeoutTooShort(timeout, seconds) if timeout < seconds else None

    def first_token_seconds(self, sequence: Sequence) -> float:
        """A lower bound of the time until the first token of a new sequence, unless others are cancelled or fail."""
        token_seconds, scheduler = self._budget.token_seconds(), self._scheduler
        alone = self._uncached(sequence) * token_seconds
        is_costly = self._tokens(sequence) > MAX_COMPARED_TOKENS
        if is_costly or len(scheduler.running) < self._cache.slots or not self._keeps_slots(sequence):
            return alone
        unshared = self._unshared(sequence)
        step_seconds = self._budget.exhausted_seconds()
        running = []
        for other in scheduler.running:
            steps = scheduler.fairness.least_steps(other, sequence, scheduler.running)
            stays = _computes_prompt(other) and _outlasts(other, sequence)
            running.append(SlotUse(unshared[other] if stays else 0, steps * step_seconds))
        ahead = [SlotUse(unshared[other], TIME_SLICE_STEPS * step_seconds) for other in self._ahead(sequence)]
        wait = slot_seconds(running, ahead, slots=self._cache.slots, token_seconds=token_seconds)
        return max(alone, wait + unshared[sequence] * token_seconds)

    def _tokens(self, sequence: Sequence) -> int:
        """Of all sequences, with a new one."""
        return sum(len(other.tokens) for other in (sequence, *self._scheduler.running, *self._scheduler.waiting))

    def _ahead(self, sequence: Sequence) -> Iterable[Sequence]:
        """Waiting sequences that surely get a slot before a new one: of better ranks, or earlier ones of its owner."""
        fairness, groups = self._scheduler.fairness, {other.group for other in self._scheduler.running}
        is_new = fairness.is_new(sequence)
        for other in self._scheduler.waiting:
            if other.rank > sequence.rank:
                return
            is_better = other.rank < sequence.rank
            is_first = other.owner == sequence.owner and fairness.is_new(other) and other.group not in groups
            if (is_better or (is_first and is_new)) and _computes_prompt(other) and _outlasts(other, sequence):
                groups.add(other.group)
                yield other

    def _keeps_slots(self, sequence: Sequence) -> bool:
        """Whether no sequence can lose its slot to a lack of cells, and chunks of prompts end by the budget only."""
        everybody = [sequence, *self._scheduler.running, *self._scheduler.waiting]
        lengths = sorted(len(other.request.prompt) + other.max_new_tokens for other in everybody)
        cells = sum(min(length, self._cache.capacity) for length in lengths[-self._cache.slots :])
        return cells <= self._cache.cells and self._cache.recurrent_states is None

    def _uncached(self, sequence: Sequence) -> int:
        """Tokens that are neither cached nor in the slot of another sequence with the salt."""
        keys, salt = sequence.context.prefix_keys(len(sequence.tokens)), sequence.context.salt
        cached = self._cache.match_prefix(keys, salt=salt).length
        for other in self._scheduler.running:
            if other.context.salt == salt:
                cached = max(cached, common_prefix_length(keys, other.context.prefix_keys(len(other.tokens))))
        return len(keys) - cached

    def _unshared(self, sequence: Sequence) -> dict[Sequence, int]:
        """Tokens of all sequences, and of a new one, that are not cached and that no other of them has in its place."""
        others = (*self._scheduler.running, *self._scheduler.waiting)
        if self._compared != (self._totals.steps, others):
            self._compared = self._totals.steps, others
            self._compare(others)
        salt, keys = sequence.context.salt, sequence.context.prefix_keys(len(sequence.tokens))
        index = bisect_left(self._ordered, (salt, keys))
        neighbours = self._ordered[max(index - 1, 0) : index + 1]
        lengths = [common_prefix_length(keys, other) for other_salt, other in neighbours if other_salt == salt]
        return {**self._counts, sequence: min([self._uncached(sequence), *(len(keys) - shared for shared in lengths)])}

    def _compare(self, sequences: Iterable[Sequence]) -> None:
        """Find the unshared tokens of sequences; valid until the next step or request."""
        keys = {other: (other.context.salt, other.context.prefix_keys(len(other.tokens))) for other in sequences}
        ordered, shared = sorted(keys, key=lambda other: keys[other]), dict.fromkeys(keys, 0)
        for left, right in zip(ordered, ordered[1:], strict=False):
            if keys[left][0] == keys[right][0]:
                common = common_prefix_length(keys[left][1], keys[right][1])
                shared[left], shared[right] = max(shared[left], common), max(shared[right], common)
        for other, (salt, tokens) in keys.items():
            cached = 0 if other.slot is None else self._scheduler.cached_length(other)
            shared[other] = max(shared[other], cached, self._cache.match_prefix(tokens, salt=salt).length)
        self._ordered = [keys[other] for other in ordered]
        self._counts = {other: len(tokens) - shared[other] for other, (_, tokens) in keys.items()}


def _computes_prompt(sequence: Sequence) -> bool:
    """Whether a sequence computes its whole prompt, in chunks that end by the budget only, or leaves no slot before."""
    request = sequence.request
    has_output = sequence.max_new_tokens > 0 or sequence.pooler is not None
    special = request.contents or request.media is not None or request.emitted or sequence.scores is not None
    return has_output and not special


def _outlasts(sequence: Sequence, other: Sequence) -> bool:
    """Whether a sequence does not time out before another one does."""
    return sequence.deadline is None or (other.deadline is not None and sequence.deadline >= other.deadline)
