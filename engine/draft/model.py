"""Draft model: a smaller model of the same tokenizer, which samples with the noise of the model's own tokens.

It has a cache of its own (slots.py), so it may lag by any length and works with every kind of cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

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
from engine.native.sampler import is_native
from engine.run.runner import DraftLoopRunner, ModelRunner
from engine.schedule.draft import DraftRequest
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.spec import Span


class ModelDrafter:
    """Implements Drafter.

    cache             of the draft model's layers, with a slot for each sequence that runs at once
    vocabulary        of the model; the draft model's logits may be padded beyond it
    draft_vocabulary  of the draft model, where it is smaller: further tokens are computed as token 0, and not proposed
    chunk             maximum context tokens per call; a sequence that lacks more gets no draft in this call
    """

    kind = "model"

    def __init__(
        self,
        cache: Cache,
        runner: ModelRunner,
        *,
        vocabulary: int,
        chunk: int,
        draft_vocabulary: int | None = None,
    ) -> None:
        self._cache, self._runner, self._slots = cache, runner, SlotsBySequence(cache)
        self._vocabulary, self._chunk = vocabulary, chunk
        self._draft_vocabulary = vocabulary if draft_vocabulary is None else draft_vocabulary

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The draft model's continuation of each request; none where most of the context is not computed yet."""
        slots = self._slots.follow(requests)
        missing = missing_tokens(requests, slots, capacity=self._cache.capacity, max_tokens=self._chunk)
        native = {index: tokens for index, tokens in missing.items() if is_native(requests[index].draw)}
        looped = self._run_draft_loop(requests, slots, native)
        others = {index: tokens for index, tokens in missing.items() if index not in looped}
        drafts = draft_loop(requests, slots, others, lambda tokens: self._compute(slots, tokens), self._runner.sampler)
        return [looped.get(index, draft) for index, draft in enumerate(drafts)]

    def forget(self, sequence_id: str, output: Sequence[int]) -> None:
        """Enter the cached tokens of a finished sequence into the prefix tree."""
        self._slots.forget(sequence_id, output)

    def flush(self, budget_bytes: int) -> bool:
        """Write cached prefixes to the disk cache; False: nothing is left to write."""
        return self._cache.flush_to_disk(budget_bytes) > 0

    def _run_draft_loop(
        self, requests: Sequence[DraftRequest], slots: Sequence[DraftSlot], missing: NextTokens
    ) -> dict[int, list[int]]:
        """Drafts by the number of the request, all positions in one call of the runner; empty without a loop."""
        if not missing or not isinstance(self._runner, DraftLoopRunner):
            return {}
        inputs = [
            replace(loop_input, tokens=self._input_tokens(loop_input.tokens))
            for loop_input in loop_inputs(requests, slots, missing)
        ]
        spans = loop_spans(slots, missing, inputs)
        forward, first_tokens = self._cache.forward(spans), sum(len(loop_input.tokens) for loop_input in inputs)
        if not self._runner.supports_draft_loop(forward, first_tokens) or self._cache.evict_for(spans):
            return {}
        with forward:
            vocabulary = min(self._draft_vocabulary, self._vocabulary)
            drafts = self._runner.run_draft_loop(forward, inputs, vocabulary)
            return keep_drafts(forward, requests, slots, missing, drafts)

    def _input_tokens(self, tokens: Sequence[int]) -> list[int]:
        return [token if token < self._draft_vocabulary else 0 for token in tokens]

    def _compute(self, slots: Sequence[DraftSlot], tokens: NextTokens) -> Tensor | None:
        """Logits [slots, vocabulary] after the tokens of each slot; None: too few free cells."""
        spans = [Span(slots[index].slot, len(slots[index].tokens), len(added)) for index, added in tokens.items()]
        if self._cache.evict_for(spans):
            return None
        logit_rows, last = [], -1
        for span in spans:
            last += span.length
            logit_rows.append(last)
        with self._cache.forward(spans) as forward:
            batch = [token for added in tokens.values() for token in added]
            logits = self._runner.run(StepInput(forward, self._input_tokens(batch), logit_rows)).logits
        for index, added in tokens.items():
            slots[index].tokens += added
        missing = self._vocabulary - logits.shape[-1]
        return pad(logits, (0, missing), value=-torch.inf) if missing else logits
