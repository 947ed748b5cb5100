"""Speculative decoding: which sequences get draft tokens in a step, from which drafter and how many; counts of them.

Draft tokens are further tokens of the batch (sample/verify.py decides which are emitted). They take free cells,
and those of cached prefixes, which are evicted for them; no sequence is preempted for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from torch import Tensor

from engine.draft.depth import Candidate, Depth, DraftCall, StepOutcome, VerifiedDraft
from engine.schedule.draft import ComputedTokens, Draft, Drafter, DraftRequest, HiddenStateDrafter
from engine.schedule.sequence import Sequence as Running
from engine.schedule.step_cost import StepCost
from engine.types.request import MAX_DRAFT_TOKENS
from engine.types.status import DraftCounts

# A proposal of the quick or the forced drafter with fewer tokens is not taken where the slow one could draft.
_LEAST_PROPOSAL = 4

# Steps before the end of a drafter's cooldown in which it reads hidden states, so that its drafts have some context.
_READ_STEPS = 16

# Sequences that each drafter is asked for, by its kind.
_Asked: TypeAlias = Mapping[str, frozenset[Running]]


class _DraftCandidate(NamedTuple):
    """A sequence with its drafter: `tokens` are proposed already, or up to `limit` are drafted after the choice."""

    sequence: Running
    drafter: Drafter
    limit: int
    tokens: tuple[int, ...] | None = None


class _Eligible(NamedTuple):
    """Sequences that may have drafts of a kind; `fixed`: the ones with a depth in their request."""

    kind: str
    sequences: frozenset[Running]
    fixed: frozenset[Running]


class Speculation:
    """The drafters, and the depth of their drafts. Belongs to the engine thread.

    quick    proposes at little cost, so it is asked before the depth is chosen (n-gram lookup); None: there is none
    slow     computes each draft token, so it drafts at the chosen depth (draft model, MTP head); None: there is none
    forced   proposes what a grammar forces, in place of the quick one's; None: there is none
    deepest  maximum tokens of a draft
    reader   the slow drafter, if it reads the hidden states that steps compute; None: it does not
    """

    def __init__(
        self,
        quick: Drafter | None,
        slow: Drafter | None,
        depth: Depth,
        clock: Callable[[], float],
        *,
        deepest: int = MAX_DRAFT_TOKENS,
        forced: Drafter | None = None,
        reader: HiddenStateDrafter | None = None,
    ) -> None:
        self._quick, self._slow, self._forced, self._reader = quick, slow, forced, reader
        self._depth, self._clock, self._deepest = depth, clock, deepest
        self._drafters = tuple(drafter for drafter in (quick, slow, forced) if drafter is not None)
        self._drafted = {drafter.kind: [0] * deepest for drafter in self._drafters}
        self._accepted = {drafter.kind: [0] * deepest for drafter in self._drafters}
        # Of the latest step; `_idle_steps`: further ones in which all drafters are in their cooldowns.
        self._sequences: list[Running] = []
        self._eligible: list[_Eligible] = []
        self._batch_tokens = self._idle_steps = 0
        # Steps until the reader may draft.
        self._reader_cooldown = 0 if reader is None else depth.cooldown(reader.kind, 1)
        # Of this step; seconds of choosing depths and of the slow drafter.
        self._outcome, self._drafting_seconds = StepOutcome(), 0.0
        # Tokens of each text that the slow drafter has computed, and the time to release finished ones.
        self._computed: dict[str, int] = {}
        self._release_seconds = 0.0

    @property
    def reads_hidden_states(self) -> bool:
        """Whether a drafter reads the hidden states of this step (`computed`): not during a longer cooldown."""
        return self._reader is not None and self._reader_cooldown <= _READ_STEPS

    @property
    def cost(self) -> StepCost:
        """Step costs, measured by `stepped`."""
        return self._depth.cost

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of drafters that a request may choose from."""
        return tuple(drafter.kind for drafter in self._drafters if drafter is not self._forced)

    def counts(self) -> tuple[DraftCounts, ...]:
        """Drafted and accepted tokens of all verified drafts, by drafter."""
        return tuple(
            DraftCounts(kind, tuple(self._drafted[kind]), tuple(self._accepted[kind])) for kind in self._drafted
        )

    def draft(
        self, sequences: Sequence[Running], *, batch_tokens: int, free_cells: Callable[[int], int]
    ) -> dict[Running, Draft]:
        """Drafts for sequences that emit a token in this step, where they are expected to gain time.

        batch_tokens  of the step without drafts
        free_cells    for a number of draft tokens, or fewer
        """
        self._outcome, self._drafting_seconds = StepOutcome(batch_tokens), 0.0
        are_new = sequences != self._sequences
        if are_new:
            self._sequences, self._eligible = list(sequences), self._find_eligible(sequences)
        if self._reader is not None and sequences:
            self._update_reader_cooldown(self._reader.kind)
        if not are_new and self._idle_steps and batch_tokens == self._batch_tokens:
            self._idle_steps -= 1
            return {}
        self._batch_tokens = batch_tokens
        asked, cooldown = self._asked(batch_tokens)
        self._idle_steps = 0 if asked else cooldown - 1
        if not asked:
            return {}
        candidates = self._candidates(sequences, asked)
        return self._drafts(candidates, self._depths(candidates, batch_tokens), free_cells)

    def verified(self, draft: Draft, tokens: Sequence[int]) -> int:
        """Count a draft, given the tokens that were emitted in its place; how many of the draft were accepted."""
        accepted = sum(token == drafted for token, drafted in zip(tokens, draft.tokens, strict=False))
        # After a rejected token, or the end of the text, nothing was compared.
        compared = min(len(draft.tokens), len(tokens))
        self._outcome.verified.append(VerifiedDraft(draft.kind, compared, accepted))
        for index in range(len(draft.tokens)):
            self._drafted[draft.kind][index] += 1
            self._accepted[draft.kind][index] += index < accepted
        return accepted

    def stepped(self, batch_tokens: int, seconds: float) -> None:
        """Measure a step of `batch_tokens`, drafts included; `seconds` includes drafting."""
        outcome = self._outcome
        outcome.draft_tokens = batch_tokens - outcome.batch_tokens
        outcome.seconds = seconds - self._drafting_seconds
        self._depth.observe(outcome)

    def computed(self, sequence: Running, start: int, hidden_states: Tensor) -> None:
        """Give a drafter the hidden states [tokens, width] of tokens from `start` on."""
        if self._reader is not None and sequence.allows_drafter(self._reader.kind):
            request = _draft_request(sequence, self._limit(sequence))
            self._reader.read_hidden_states([ComputedTokens(request, start, hidden_states)])

    def forget(self, sequence: Running) -> None:
        """Release what drafters keep of a finished sequence."""
        began = self._clock()
        for drafter in self._drafters:
            drafter.forget(sequence.request.id, sequence.output)
        if self._computed.pop(sequence.request.id, None) is not None:
            self._release_seconds += self._clock() - began

    def flush(self, budget_bytes: int) -> bool:
        """Write up to `budget_bytes` of the drafters' caches to disk; False: nothing is left to write."""
        return any(drafter.flush(budget_bytes) for drafter in self._drafters)

    def _find_eligible(self, sequences: Sequence[Running]) -> list[_Eligible]:
        eligible = list[_Eligible]()
        for drafter in self._drafters:
            allowed = [sequence for sequence in sequences if sequence.allows_drafter(drafter.kind)]
            if drafter is self._forced:
                allowed = [sequence for sequence in allowed if sequence.request.grammar is not None]
            if allowed:
                eligible.append(
                    _Eligible(drafter.kind, frozenset(allowed), frozenset(filter(_has_fixed_depth, allowed)))
                )
        return eligible

    def _update_reader_cooldown(self, kind: str) -> None:
        """Find the steps until the reader may draft for the sequences; prefill does not change them."""
        if any(candidate.kind == kind and candidate.fixed for candidate in self._eligible):
            self._reader_cooldown = 0
        elif not self._depth.cost.work.has_prefill:
            self._reader_cooldown = self._depth.cooldown(kind, len(self._sequences))

    def _asked(self, batch_tokens: int) -> tuple[_Asked, int]:
        """The sequences that drafters are asked for, and the steps until the first cooldown of the others ends."""
        asked, least = dict[str, frozenset[Running]](), sys.maxsize
        for kind, eligible, fixed in self._eligible:
            cooldown = self._depth.cooldown(kind, batch_tokens)
            if sequences := fixed if cooldown else eligible:
                asked[kind] = sequences
            least = min(least, cooldown or least)
        return asked, least

    def _candidates(self, sequences: Sequence[Running], asked: _Asked) -> list[_DraftCandidate]:
        """For each sequence its proposal, or else the slow drafter."""
        eligible = set().union(*asked.values())
        limits = {
            sequence: limit for sequence in sequences if sequence in eligible and (limit := self._limit(sequence)) > 0
        }
        proposals, candidates, slow = self._proposals(limits, asked), list[_DraftCandidate](), self._slow
        for sequence, limit in limits.items():
            drafter, tokens = proposals.get(sequence, (None, ()))
            other = slow if slow is not None and sequence in asked.get(slow.kind, ()) else None
            if drafter is not None and (other is None or self._prefers(drafter, tokens, other)):
                candidates.append(_DraftCandidate(sequence, drafter, len(tokens), tokens))
            elif other is not None:
                candidates.append(_DraftCandidate(sequence, other, limit))
        if any(candidate.drafter is self._quick for candidate in candidates):
            self._outcome.unused.clear()
        return candidates

    def _prefers(self, drafter: Drafter, tokens: Sequence[int], slow: Drafter) -> bool:
        return len(tokens) >= _LEAST_PROPOSAL and self._depth.prefers(drafter.kind, slow.kind)

    def _proposals(
        self, limits: Mapping[Running, int], asked: _Asked
    ) -> dict[Running, tuple[Drafter, tuple[int, ...]]]:
        """Cheap drafts, of a grammar before those of a lookup. Lookups without a candidate count as unused."""
        proposals: dict[Running, tuple[Drafter, tuple[int, ...]]] = {}
        for drafter in (self._quick, self._forced):
            if drafter is None or drafter.kind not in asked:
                continue
            began = self._clock()
            asking = [sequence for sequence in limits if sequence in asked[drafter.kind]]
            drafts = drafter.propose([_draft_request(sequence, limits[sequence]) for sequence in asking])
            proposals |= {
                sequence: (drafter, tuple(draft)) for sequence, draft in zip(asking, drafts, strict=True) if draft
            }
            if drafter is self._quick and asking:
                self._outcome.unused[drafter.kind] = self._clock() - began
        return proposals

    def _limit(self, sequence: Running) -> int:
        """Maximum draft tokens: one token less than the sequence may still emit."""
        asked = sequence.request.speculation.tokens
        return min(sequence.remaining_tokens - 1, self._deepest if asked is None else min(asked, self._deepest))

    def _depths(self, candidates: Sequence[_DraftCandidate], batch_tokens: int) -> list[int]:
        """The depth of each candidate: that of its request, or else the chosen one."""
        fixed = [candidate.limit if _has_fixed_depth(candidate.sequence) else 0 for candidate in candidates]
        others = [
            Candidate(candidate.drafter.kind, candidate.limit)
            for candidate, depth in zip(candidates, fixed, strict=True)
            if not depth
        ]
        if not others:
            return fixed
        began = self._clock()
        chosen = iter(self._depth.choose(others, batch_tokens=batch_tokens + sum(fixed)))
        self._drafting_seconds += self._clock() - began
        return [depth or next(chosen) for depth in fixed]

    def _drafts(
        self, candidates: Sequence[_DraftCandidate], depths: list[int], free_cells: Callable[[int], int]
    ) -> dict[Running, Draft]:
        """The drafts of candidates at these depths, or shorter ones for lack of free cells."""
        max_tokens = sum(depths)
        left = free_cells(max_tokens) if max_tokens else 0
        if left < max_tokens:
            before = accumulate(depths[:-1], initial=0)
            depths = [max(min(depth, left - used), 0) for depth, used in zip(depths, before, strict=True)]
        drafts, slow = dict[Running, Draft](), list[tuple[Running, int]]()
        for (sequence, drafter, _, tokens), depth in zip(candidates, depths, strict=True):
            if depth and tokens is None:
                slow.append((sequence, depth))
            elif depth and tokens:
                drafts[sequence] = Draft(drafter.kind, tokens[:depth])
        return drafts | self._call(slow) if slow else drafts

    def _call(self, chosen: Sequence[tuple[Running, int]]) -> dict[Running, Draft]:
        """Drafts of the slow drafter. Measures the call."""
        slow, began = self._slow, self._clock()
        assert slow is not None, "there is no slow drafter"
        catches_up = any(self._missing(sequence) > depth + 1 for sequence, depth in chosen)
        tokens = slow.propose([_draft_request(sequence, depth) for sequence, depth in chosen])
        seconds = self._clock() - began
        self._drafting_seconds += seconds
        if catches_up:
            seconds, self._release_seconds = seconds + self._release_seconds, 0.0
        self._outcome.calls.append(DraftCall(slow.kind, max(map(len, tokens)), seconds, catches_up))
        drafts = {
            sequence: Draft(slow.kind, tuple(draft))
            for (sequence, _), draft in zip(chosen, tokens, strict=True)
            if draft
        }
        self._computed |= {sequence.request.id: _length(sequence) for sequence in drafts}
        return drafts

    def _missing(self, sequence: Running) -> int:
        """Tokens that the slow drafter computes before it drafts; 0 if it reads hidden states of the model."""
        missing = _length(sequence) - self._computed.get(sequence.request.id, 0)
        return 0 if self._reader else min(missing, len(sequence.tokens))


def _length(sequence: Running) -> int:
    """Tokens of the text, dropped ones among them."""
    return len(sequence.request.prompt) + len(sequence.output)


def _has_fixed_depth(sequence: Running) -> bool:
    return sequence.request.speculation.tokens is not None


def _draft_request(sequence: Running, limit: int) -> DraftRequest:
    return DraftRequest(
        sequence_id=sequence.request.id,
        tokens=sequence.tokens,
        limit=limit,
        draw=sequence.sampling_context(),
        salt=sequence.request.salt,
        prediction=sequence.request.prediction,
        emitted=len(sequence.output),
        cacheable=sequence.request.cacheable,
    )
