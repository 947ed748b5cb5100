"""Draft slots: for each sequence a slot of a drafter's cache, which follows the sequence's context; and the draft loop.

A slot may lag behind its sequence by any length. Its content enters the prefix tree when its sequence ends, so that a
later sequence with the same tokens resumes there. A context shift of the sequence shifts its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from engine.run.runner import DraftLoopInput
from engine.sample.sampler import Sampler
from engine.schedule.draft import DraftRequest
from engine.schedule.slots import Slots
from engine.text.prefix import common_prefix_length
from kvcache.cache import Cache
from kvcache.errors import OutOfCells
from kvcache.forward import Forward
from kvcache.spec import Span

# Missing tokens from which the prefix tree is searched.
_RESUME_TOKENS = 16

# Tokens to compute next, by the number of the request.
NextTokens: TypeAlias = Mapping[int, list[int]]


@dataclass(slots=True)
class DraftSlot:
    """A slot of the drafter's cache, and the context that it caches. Implements CachedContext.

    last_used  time of the latest request
    tokens     cached tokens
    reusable   leading cached tokens that no shift moved, which other sequences may reuse; None: all
    dropped    context tokens that shifts had dropped at the latest request
    compared   leading context tokens that were equal to the cached ones at the latest request
    emitted    output tokens at the latest request
    cacheable  whether its content enters the prefix tree
    """

    slot: int
    salt: bytes
    last_used: int
    tokens: list[int] = field(default_factory=list)
    reusable: int | None = None
    dropped: int = 0
    compared: int = 0
    emitted: int = 0
    cacheable: bool = True

    def prefix_keys(self, length: int) -> list[int]:
        return self.tokens[:length] if self.reusable is None else self.tokens[: min(length, self.reusable)]

    def align_down(self, length: int) -> int:
        return length


class SlotsBySequence:
    """The slots of a drafter's cache, by sequence."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._slots = cache, Slots(cache)
        self._by_sequence: dict[str, DraftSlot] = {}
        self._clock = 0

    def follow(self, requests: Sequence[DraftRequest]) -> list[DraftSlot]:
        """The slot of each request. Its cached tokens are a prefix of the context without its last token."""
        self._clock += 1
        return [self._follow(request) for request in requests]

    def rewind(self, slot: DraftSlot, length: int) -> None:
        """Keep the first `length` cached tokens, or fewer."""
        del slot.tokens[self._slots.rewind(slot.slot, slot, length) :]

    def insert_prefix(self, slot: DraftSlot) -> None:
        """Enter the cached tokens into the prefix tree, unless the request is uncached."""
        if slot.cacheable:
            self._slots.insert_prefix(slot.slot, slot)

    def forget(self, sequence_id: str, output: Sequence[int] = ()) -> None:
        """Release a finished sequence. Its cached tokens enter the prefix tree, without rejected draft tokens."""
        slot = self._by_sequence.get(sequence_id)
        if slot is None:
            return
        context = slot.compared + 1
        later = list(output[slot.emitted :]) if slot.emitted >= 0 else []
        self.rewind(slot, context + common_prefix_length(slot.tokens[context:], later))
        self.insert_prefix(slot)
        self.release(sequence_id)

    def release(self, sequence_id: str) -> None:
        """Free a sequence's slot and drop its cached tokens."""
        self._slots.release(self._by_sequence.pop(sequence_id).slot)

    def _follow(self, request: DraftRequest) -> DraftSlot:
        slot = self._by_sequence.get(request.sequence_id)
        if slot is None:
            slot = DraftSlot(self._acquire(), request.salt, self._clock, cacheable=request.cacheable)
            self._by_sequence[request.sequence_id] = slot
        slot.last_used = self._clock
        common, dropped = self._common(slot, request), _dropped(request) - slot.dropped
        if dropped > 0:
            common = self._shift(slot, request, common, dropped)
        slot.dropped, slot.compared, slot.emitted = slot.dropped + dropped, len(request.tokens) - 1, request.emitted
        if common < len(slot.tokens):
            self.rewind(slot, common)
        if len(slot.tokens) + _RESUME_TOKENS < len(request.tokens) - 1:
            cached_length = self._cache.reuse_prefix(slot.slot, request.tokens[:-1], salt=slot.salt)
            slot.tokens += request.tokens[len(slot.tokens) : cached_length]
        return slot

    def _common(self, slot: DraftSlot, request: DraftRequest) -> int:
        """The common prefix of cached tokens and context; tokens compared before are skipped."""
        end = len(request.tokens) - 1
        start = min(slot.compared, len(slot.tokens)) if _dropped(request) == slot.dropped else 0
        return start + common_prefix_length(slot.tokens[start:end], list(request.tokens[start:end]))

    def _shift(self, slot: DraftSlot, request: DraftRequest, keep: int, drop: int) -> int:
        """Drop `drop` cached tokens after `keep`, as the sequence did; the common prefix afterwards."""
        if not 0 < drop <= len(slot.tokens) - keep:
            return keep
        try:
            cached_length = self._cache.shift(slot.slot, keep, drop)
        except OutOfCells:
            return keep
        del slot.tokens[keep : keep + drop]
        del slot.tokens[cached_length:]
        slot.reusable = keep if slot.reusable is None else min(keep, slot.reusable)
        end = len(request.tokens) - 1
        return common_prefix_length(slot.tokens[:end], list(request.tokens[:end]))

    def _acquire(self) -> int:
        """A free slot, or the least recently used one."""
        if not self._slots.free_count:
            self.forget(min(self._by_sequence, key=lambda name: self._by_sequence[name].last_used))
        return self._slots.acquire()


def missing_tokens(
    requests: Sequence[DraftRequest], slots: Sequence[DraftSlot], *, capacity: int, max_tokens: int
) -> dict[int, list[int]]:
    """The context tokens that are not cached yet, `max_tokens` of all requests at most; none beyond the capacity."""
    missing, left = {}, max_tokens
    for index, (request, slot) in enumerate(zip(requests, slots, strict=True)):
        tokens = list(request.tokens[len(slot.tokens) : len(slot.tokens) + left])
        if tokens and len(request.tokens) + request.limit <= capacity:
            missing[index] = tokens
            left -= len(tokens)
    return missing


def loop_inputs(
    requests: Sequence[DraftRequest], slots: Sequence[DraftSlot], tokens: NextTokens
) -> list[DraftLoopInput]:
    """Tokens to compute, and the draft tokens after them: none while more of the context is missing."""
    return [
        DraftLoopInput(
            added,
            requests[index].limit if len(slots[index].tokens) + len(added) == len(requests[index].tokens) else 0,
            requests[index].draw,
        )
        for index, added in tokens.items()
    ]


def loop_spans(slots: Sequence[DraftSlot], tokens: NextTokens, inputs: Sequence[DraftLoopInput]) -> list[Span]:
    """The spans of all steps of a draft loop in one call."""
    return [
        Span(slots[index].slot, len(slots[index].tokens), loop_input.batch_tokens)
        for index, loop_input in zip(tokens, inputs, strict=True)
    ]


def keep_drafts(
    forward: Forward,
    requests: Sequence[DraftRequest],
    slots: Sequence[DraftSlot],
    tokens: NextTokens,
    drafts: Sequence[list[int]],
) -> dict[int, list[int]]:
    """Cache what a draft loop in one call computed; its drafts by the number of the request."""
    for (index, added), draft in zip(tokens.items(), drafts, strict=True):
        slot = slots[index]
        # The last draft token is not computed: that would only serve the next one.
        slot.tokens += [*added, *draft[: max(requests[index].limit - 1, 0)]]
        forward.keep(slot.slot, len(slot.tokens))
    return dict(zip(tokens, drafts, strict=True))


def draft_loop(
    requests: Sequence[DraftRequest],
    slots: Sequence[DraftSlot],
    tokens: NextTokens,
    compute: Callable[[NextTokens], Tensor | None],
    sampler: Sampler,
) -> list[list[int]]:
    """Drafts of all requests, a token at a time, sampled with the noise of the model's own tokens.

    tokens   what each slot computes first; a slot that lacks more of its context gets no draft
    compute  caches tokens and returns logits after each slot's last one; None: too few free cells
    """
    drafts: list[list[int]] = [[] for _ in requests]
    while tokens:
        logits = compute(tokens)
        drafting = [index for index in tokens if _is_drafting(requests[index], slots[index], drafts[index])]
        if logits is None or not drafting:
            break
        rows = [row for row, index in enumerate(tokens) if index in drafting]
        contexts = [requests[index].draw.after(drafts[index]) for index in drafting]
        sampled = sampler.report(logits, rows, ()).sample(contexts)
        sampled_tokens = {index: token for index, token in zip(drafting, sampled, strict=True) if token is not None}
        for index, token in sampled_tokens.items():
            drafts[index].append(token)
        # The last draft token is not computed: that would only serve the next one.
        tokens = {
            index: [token] for index, token in sampled_tokens.items() if len(drafts[index]) < requests[index].limit
        }
    return drafts


def _is_drafting(request: DraftRequest, slot: DraftSlot, draft: Sequence[int]) -> bool:
    """Whether the slot has its whole context and draft cached, so that its logits give the next draft token."""
    return len(draft) < request.limit and len(slot.tokens) == len(request.tokens) + len(draft)


def _dropped(request: DraftRequest) -> int:
    """Context tokens that shifts have dropped."""
    return request.draw.position - len(request.tokens)
