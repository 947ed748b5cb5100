"""Drafts of the MTP layer, whose pairs follow the contexts of sequences.

The layer computes only tokens that the model computed in this process: where the model resumed from its prefix tree
and the layer cannot, the layer begins there, with less context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.draft.mtp_head import MtpRunner
from engine.draft.slots import (
    DraftSlot,
    NextTokens,
    SlotsBySequence,
    draft_loop,
    keep_drafts,
    loop_inputs,
    loop_spans,
    missing_tokens,
)
from engine.native.pairs import NativePairRunner
from engine.native.sampler import is_native
from engine.schedule.draft import ComputedTokens, DraftRequest
from kvcache.cache import Cache
from kvcache.spec import Span

# Maximum hidden states of a sequence that are kept before the layer computes their tokens.
_PENDING_STATES = 256
# Rows for later states in a buffer of them.
_SPARE_ROWS = 16


class _PendingStates:
    """Hidden states of a sequence, from the context token `start` on, whose pairs are not computed yet.

    dropped  context tokens that shifts had dropped when they came
    base     context token at which the layer began: its slot has the pairs from there on
    """

    def __init__(self, start: int, dropped: int) -> None:
        self.start, self.dropped, self.base = start, dropped, 0
        # The states are [_first, _first + count) of the rows; a step appends its states to them.
        self._rows, self._first, self.count = torch.empty(0), 0, 0

    @property
    def stop(self) -> int:
        """The first token without a hidden state."""
        return self.start + self.count

    def append(self, start: int, states: Tensor, dropped: int) -> None:
        """Add the hidden states [tokens, width] of computed tokens from `start` on."""
        if dropped != self.dropped:
            # The states move with the context; a layer that had begun later than its start begins again.
            self.start -= dropped - self.dropped
            self.base = 0 if self.base == 0 else self.start
            self.dropped = dropped
        if self.start <= start <= self.stop and self.start >= 0:
            self.count = start - self.start
        else:
            self.start, self.count = start, 0
        stop = self._first + self.count + len(states)
        if stop > len(self._rows):
            rows = states.new_empty(2 * (self.count + len(states)) + _SPARE_ROWS, states.shape[1])
            if self.count:
                rows[: self.count] = self._rows[self._first : self._first + self.count]
            self._rows, self._first, stop = rows, 0, self.count + len(states)
        self._rows[stop - len(states) : stop] = states
        self.count += len(states)

    def after(self, slot: DraftSlot, count: int) -> Tensor:
        """The hidden states [count, width] for the pairs after those of its slot."""
        first = self._first + self.base + len(slot.tokens) - self.start
        return self._rows[first : first + count]

    def release(self, start: int) -> None:
        """Drop the hidden states of tokens before `start`."""
        if start > self.start:
            self._first += start - self.start
            self.count -= start - self.start
            self.start = start


class MtpDrafter:
    """Implements HiddenStateDrafter.

    cache       of the MTP layer, with a slot for each sequence that runs at once
    chunk       maximum pairs per call; a sequence that lacks more gets no draft in this call
    vocabulary  tokens below it are drafted by native calls
    pending     maximum hidden states of a sequence that are kept
    """

    kind = "mtp"

    def __init__(
        self,
        cache: Cache,
        runner: MtpRunner | NativePairRunner,
        *,
        chunk: int,
        vocabulary: int,
        pending: int = _PENDING_STATES,
    ) -> None:
        self._cache, self._runner, self._vocabulary = cache, runner, vocabulary
        self._chunk, self._max_pending = chunk, pending
        self._slots = SlotsBySequence(cache)
        self._pending: dict[str, _PendingStates] = {}

    def read_hidden_states(self, step: Sequence[ComputedTokens]) -> None:
        """Keep the hidden states of a step, and compute pairs where too many are kept."""
        for computed in step:
            request = computed.request
            dropped = request.draw.position - len(request.tokens)
            pending = self._pending.get(request.sequence_id)
            if pending is None:
                pending = self._pending[request.sequence_id] = _PendingStates(computed.start, dropped)
            pending.append(computed.start, computed.hidden_states, dropped)
            if pending.count > self._max_pending:
                self._catch_up(request, pending)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The layer's continuation of each request; none where a state or most of the context is missing."""
        drafts: list[list[int]] = [[] for _ in requests]
        ready = [index for index, request in enumerate(requests) if self._is_ready(request)]
        pairs, slots = self._follow([requests[index] for index in ready])
        missing = missing_tokens(pairs, slots, capacity=self._cache.capacity, max_tokens=self._chunk)
        pending = [self._pending[request.sequence_id] for request in pairs]
        looped = self._run_pair_loop(pairs, slots, pending, missing)
        others = {index: tokens for index, tokens in missing.items() if index not in looped}
        drafted: dict[int, Tensor] = {}
        continuations = draft_loop(
            pairs,
            slots,
            others,
            lambda tokens: self._compute(slots, pending, tokens, drafted),
            self._runner.sampler,
        )
        for request, slot, states in zip(pairs, slots, pending, strict=True):
            # Draft tokens were computed with the layer's own hidden states, not the model's.
            self._slots.rewind(slot, len(request.tokens))
            # The state before the last token stays: the same draft may be requested once more.
            states.release(states.base + len(slot.tokens) - 1)
        for i, index in enumerate(ready):
            drafts[index] = looped.get(i, continuations[i])
        return drafts

    def forget(self, sequence_id: str, output: Sequence[int]) -> None:
        """Enter the cached tokens of a finished sequence into the prefix tree."""
        self._pending.pop(sequence_id, None)
        self._slots.forget(sequence_id, output)

    def flush(self, budget_bytes: int) -> bool:
        """Write cached prefixes to the disk cache; False: nothing is left to write."""
        return self._cache.flush_to_disk(budget_bytes) > 0

    def _is_ready(self, request: DraftRequest) -> bool:
        """Whether there is a hidden state of the second last token."""
        pending = self._pending.get(request.sequence_id)
        return pending is not None and pending.start <= len(request.tokens) - 2 < pending.stop

    def _follow(self, requests: Sequence[DraftRequest]) -> tuple[list[DraftRequest], list[DraftSlot]]:
        """The requests as pairs, and their slots. Where states before the kept ones are missing, pairs begin there."""
        pairs = [self._pairs(request) for request in requests]
        slots = self._slots.follow(pairs)
        for index, request in enumerate(requests):
            pending = self._pending[request.sequence_id]
            if pending.base + len(slots[index].tokens) < pending.start:
                pending.base = pending.start
                self._slots.release(request.sequence_id)
                pairs[index] = self._pairs(request)
                (slots[index],) = self._slots.follow([pairs[index]])
                slots[index].reusable = 0
        return pairs, slots

    def _pairs(self, request: DraftRequest) -> DraftRequest:
        """The second tokens of all pairs. Cached pairs depend on the first context token too, so it is in the salt."""
        base = self._pending[request.sequence_id].base
        salt = b"" if base else request.salt + request.tokens[0].to_bytes(4, "little")
        return replace(request, tokens=request.tokens[base + 1 :], salt=salt)

    def _catch_up(self, request: DraftRequest, pending: _PendingStates) -> None:
        """Compute the pairs of the kept hidden states."""
        tokens = request.tokens[: pending.stop + 1]
        later = len(request.tokens) - len(tokens)
        draw = replace(request.draw, position=request.draw.position - later)
        earlier = replace(request, tokens=tokens, draw=draw, limit=0, emitted=request.emitted - later)
        (pairs,), (slot,) = self._follow([earlier])
        missing = missing_tokens([pairs], [slot], capacity=self._cache.capacity, max_tokens=self._chunk)
        computed = missing and (
            self._run_pair_loop([pairs], [slot], [pending], missing)
            or self._compute([slot], [pending], missing, {}) is not None
        )
        if computed:
            pending.release(pending.base + len(slot.tokens) - 1)
            self._slots.insert_prefix(slot)

    def _run_pair_loop(
        self,
        requests: Sequence[DraftRequest],
        slots: Sequence[DraftSlot],
        pending: Sequence[_PendingStates],
        missing: NextTokens,
    ) -> dict[int, list[int]]:
        """Drafts by the number of the request, all positions in one native call; empty without one."""
        runner = self._runner
        if not isinstance(runner, NativePairRunner):
            return {}
        tokens = {
            index: added
            for index, added in missing.items()
            if requests[index].limit == 0 or is_native(requests[index].draw)
        }
        inputs = loop_inputs(requests, slots, tokens)
        spans = loop_spans(slots, tokens, inputs)
        if not tokens or self._cache.evict_for(spans):
            return {}
        states = torch.cat([pending[index].after(slots[index], len(added)) for index, added in tokens.items()])
        with self._cache.forward(spans) as forward:
            drafts = runner.run_pair_loop(forward, inputs, states, self._vocabulary)
            return keep_drafts(forward, requests, slots, tokens, drafts)

    def _compute(
        self,
        slots: Sequence[DraftSlot],
        pending: Sequence[_PendingStates],
        tokens: NextTokens,
        drafted: dict[int, Tensor],
    ) -> Tensor | None:
        """Logits [slots, vocabulary] after the tokens of each slot; None: too few free cells.

        drafted  the layer's own hidden state of each slot's last token, in place of the model's at draft tokens
        """
        spans = [Span(slots[index].slot, len(slots[index].tokens), len(added)) for index, added in tokens.items()]
        if self._cache.evict_for(spans):
            return None
        logit_rows = [stop - 1 for stop in accumulate(span.length for span in spans)]
        states = [
            drafted[index] if index in drafted else pending[index].after(slots[index], len(added))
            for index, added in tokens.items()
        ]
        with self._cache.forward(spans) as forward:
            batch = [token for added in tokens.values() for token in added]
            output = self._runner.run_pairs(forward, batch, torch.cat(states), logit_rows)
        for (index, added), state in zip(tokens.items(), output.states, strict=True):
            drafted[index] = state[None]
            slots[index].tokens += added
        return output.logits
