"""One forward over the scheduled sequences, and its results: sampled tokens, logprobs, prompt scores, hidden states.

The batch tokens of a sequence are its span followed by its draft; the cache keeps the accepted draft tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from engine.load.load import LoadedModel
from engine.run.runner import runners_of
from engine.sample.logprobs import SAMPLED, LogprobQuery
from engine.sample.verify import VerifyTokens, contexts_of, verify
from engine.schedule.contents import content_inputs
from engine.schedule.scheduled import ScheduledSequence
from engine.step.input import FINAL_NORM, HiddenRows, Sampling, StepFeatures, StepInput
from engine.step.output import StepOutput
from engine.types.events import Logprob, TokenLogprob
from kvcache.cache import Cache
from kvcache.forward import Forward
from kvcache.spec import Span


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step for one sequence; None stands for logits without a finite maximum.

    tokens         sampled; none while its prompt is in prefill, or if the request generates none
    logprobs       of the tokens up to a None, if the request asks for them
    scores         of the next tokens of the prompt, in order
    hidden_states  [tokens, width] of the next tokens of the prompt, if the request pools them
    batch_states   [tokens, width] hidden states of its batch tokens, if a drafter reads them
    """

    scheduled: ScheduledSequence
    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprob | None, ...] = ()
    scores: tuple[TokenLogprob | None, ...] = ()
    hidden_states: Tensor | None = None
    batch_states: Tensor | None = None

    @property
    def is_broken(self) -> bool:
        """Whether logits or hidden states are not finite."""
        is_finite = self.hidden_states is None or bool(self.hidden_states.isfinite().all())
        return None in self.tokens or None in self.scores or not is_finite


@dataclass(slots=True)
class _BatchSlice:
    """The part of one sequence in the batch and in the outputs of a forward.

    first_logit_row  of its rows of logits
    batch_tokens     of its span and its draft
    logit_tokens     batch tokens with logits: the scored ones, then those to sample after
    pooled_tokens    batch tokens whose hidden states are pooled
    sampled_rows     rows of logits to sample from
    """

    scheduled: ScheduledSequence
    first_logit_row: int
    batch_tokens: range
    logit_tokens: Sequence[int]
    pooled_tokens: Sequence[int]
    sampled_rows: range


class Stepper:
    """Computes steps of one model over one cache. Belongs to the engine thread."""

    def __init__(self, loaded: LoadedModel, cache: Cache) -> None:
        self._runner, self._cache = loaded.runner, cache
        describe = loaded.tokenizer.describe_token
        # To decode a token takes 30 microseconds, and top tokens repeat.
        self._describe_token = lru_cache(maxsize=8192)(lambda token: describe(token, 0.0))

    def computes_together(self, batch: Sequence[ScheduledSequence]) -> bool:
        """Whether tokens of contents and of text run in the same runner, and may be in one step."""
        spans = [scheduled.span for scheduled in batch]
        rows, positions = content_inputs([scheduled.sequence.contents for scheduled in batch], spans)
        features = StepFeatures.of_contents(rows, positions, spans, self._cache.capacity)
        return runners_of(self._runner)[0].supports(features) is None

    def run(self, batch: Sequence[ScheduledSequence], *, returns_states: bool = False) -> list[StepResult]:
        """Compute the step; a result for each scheduled sequence, in order. An exception leaves the cache unchanged.

        returns_states  whether results have the hidden states of all batch tokens
        """
        compute = self._sample_only if all([scheduled.samples_only for scheduled in batch]) else self._sample_and_report
        with self._cache.forward([scheduled.batch_span for scheduled in batch]) as forward:
            results = compute(forward, batch, returns_states)
            for result in results:
                if result.scheduled.draft is not None:
                    # Accepted draft tokens stay; the last sampled token is not computed yet.
                    span = result.scheduled.span
                    forward.keep(span.slot, span.stop + len(result.tokens) - 1)
        return results

    def _sample_only(
        self, forward: Forward, batch: Sequence[ScheduledSequence], returns_states: bool
    ) -> list[StepResult]:
        """A step without logprobs, prompt scores and pooled states: logits stay inside the runner."""
        tokens: list[int] = []
        logit_rows: list[int] = []
        for scheduled in batch:
            tokens += scheduled.batch_tokens
            logit_rows += range(len(tokens) - scheduled.sample_count, len(tokens))
        verified = _tokens_to_verify(batch)
        hidden = HiddenRows(range(len(tokens))) if returns_states else None
        sampling = Sampling(contexts_of(verified))
        output = self._runner.run(_step_input(batch, forward, tokens, logit_rows, hidden, sampling))
        sampled = _verify_drafts(batch, verified, output.tokens)
        if not returns_states:
            return [StepResult(scheduled, tuple(emitted)) for scheduled, emitted in zip(batch, sampled, strict=True)]
        states = torch.split(output.hidden_states[FINAL_NORM], [span.length for span in forward.spans])
        return [
            StepResult(scheduled, tuple(emitted), batch_states=rows)
            for scheduled, emitted, rows in zip(batch, sampled, states, strict=True)
        ]

    def _sample_and_report(
        self, forward: Forward, batch: Sequence[ScheduledSequence], returns_states: bool
    ) -> list[StepResult]:
        """A step with logprobs, prompt scores or pooled states."""
        slices, verified = _batch_slices(batch, forward.spans), _tokens_to_verify(batch)
        tokens = [token for scheduled in batch for token in scheduled.batch_tokens]
        rows = [row for batch_slice in slices for row in batch_slice.sampled_rows]
        queries = [
            query
            for batch_slice in slices
            for query in (*_score_queries(batch_slice), *_sampled_row_queries(batch_slice))
        ]
        pooled = [row for batch_slice in slices for row in batch_slice.pooled_tokens]
        hidden_rows = range(len(tokens)) if returns_states else pooled
        step = _step_input(
            batch,
            forward,
            tokens,
            [row for batch_slice in slices for row in batch_slice.logit_tokens],
            HiddenRows(hidden_rows) if hidden_rows else None,
            Sampling(contexts_of(verified), rows, queries),
        )
        output = self._runner.run(step)
        sampled = _verify_drafts(batch, verified, output.tokens)
        return list(self._step_results(slices, sampled, step, output, returns_states))

    def _logprob(self, token: int, logprob: float) -> Logprob:
        described = self._describe_token(token)
        return Logprob(token, described.text, described.bytes, logprob)

    def _step_results(
        self,
        slices: Sequence[_BatchSlice],
        sampled: Sequence[Sequence[int | None]],
        step: StepInput,
        output: StepOutput,
        returns_states: bool,
    ) -> Iterator[StepResult]:
        """A result for each slice; logprobs of all slices are computed at once."""
        assert output.report is not None, "the step has queries"
        queries = [
            (_score_queries(batch_slice), _logprob_queries(batch_slice, emitted))
            for batch_slice, emitted in zip(slices, sampled, strict=True)
        ]
        asked = [query for pair in queries for group in pair for query in group]
        entries = output.report.token_logprobs(asked, self._logprob)
        state_rows = {} if step.hidden is None else {token: row for row, token in enumerate(step.hidden.rows)}
        states = output.hidden_states.get(FINAL_NORM)
        for batch_slice, emitted, (score_queries, logprob_queries) in zip(slices, sampled, queries, strict=True):
            scores = tuple(next(entries) for _ in score_queries)
            logprobs = tuple(next(entries) for _ in logprob_queries)
            # Pooled tokens are consecutive; on a device a slice needs no upload.
            first = state_rows[batch_slice.pooled_tokens[0]] if batch_slice.pooled_tokens else 0
            yield StepResult(
                batch_slice.scheduled,
                tuple(emitted),
                logprobs,
                scores,
                states[first : first + len(batch_slice.pooled_tokens)]
                if states is not None and batch_slice.pooled_tokens
                else None,
                states[batch_slice.batch_tokens.start : batch_slice.batch_tokens.stop]
                if states is not None and returns_states
                else None,
            )


def _batch_slices(batch: Sequence[ScheduledSequence], spans: Sequence[Span]) -> list[_BatchSlice]:
    """The slices of the scheduled sequences, one after the other in the batch."""
    slices: list[_BatchSlice] = []
    row = logits = 0
    for scheduled, span in zip(batch, spans, strict=True):
        scored, pooled = scheduled.scored_positions, scheduled.pooled_positions
        stop = row + span.length
        offset = row - span.start
        logit_tokens = [*(offset + position for position in scored), *range(stop - scheduled.sample_count, stop)]
        sampled_rows = range(logits + len(scored), logits + len(logit_tokens))
        pooled_tokens = [offset + position for position in pooled]
        slices.append(_BatchSlice(scheduled, logits, range(row, stop), logit_tokens, pooled_tokens, sampled_rows))
        row = stop
        logits += len(logit_tokens)
    return slices


def _step_input(
    batch: Sequence[ScheduledSequence],
    forward: Forward,
    tokens: Sequence[int],
    logit_rows: Sequence[int],
    hidden: HiddenRows | None,
    sampling: Sampling,
) -> StepInput:
    """A step with the encoder masks, the adapters and the contents of its sequences."""
    masks = [scheduled.sequence.encoder_mask for scheduled in batch]
    adapters = [scheduled.sequence.adapter for scheduled in batch]
    rows, positions = content_inputs([scheduled.sequence.contents for scheduled in batch], forward.spans)
    return StepInput(forward, tokens, logit_rows, hidden, masks, sampling, adapters, rows, positions)


def _tokens_to_verify(batch: Sequence[ScheduledSequence]) -> list[VerifyTokens]:
    """Of the sequences that are sampled."""
    return [
        VerifyTokens(
            scheduled.draft_tokens, scheduled.sequence.sampling_context(), scheduled.sequence.sampling.is_stop_token
        )
        for scheduled in batch
        if scheduled.is_sampled
    ]


def _verify_drafts(
    batch: Sequence[ScheduledSequence], verified: Sequence[VerifyTokens], tokens: Sequence[int | None]
) -> list[list[int | None]]:
    """The emitted tokens of each scheduled sequence; none for sequences in prefill."""
    emitted = verify(verified, tokens)
    if len(verified) == len(batch):
        return emitted
    remaining = iter(emitted)
    return [next(remaining) if scheduled.is_sampled else [] for scheduled in batch]


def _score_queries(batch_slice: _BatchSlice) -> list[LogprobQuery]:
    """Queries for the scored prompt tokens; the logits at a position score the token after it."""
    request = batch_slice.scheduled.sequence.request
    scored = enumerate(batch_slice.scheduled.scored_positions, batch_slice.first_logit_row)
    return [LogprobQuery.for_request(request, row, request.prompt[position + 1]) for row, position in scored]


def _sampled_row_queries(batch_slice: _BatchSlice) -> list[LogprobQuery]:
    """Queries for the rows to sample from, if the request asks for logprobs."""
    return _logprob_queries(batch_slice, [SAMPLED] * len(batch_slice.sampled_rows))


def _logprob_queries(batch_slice: _BatchSlice, tokens: Sequence[int | None]) -> list[LogprobQuery]:
    """Queries for the sampled tokens, if the request asks for logprobs."""
    request = batch_slice.scheduled.sequence.request
    if request.logprobs is None:
        return []
    return [
        LogprobQuery.for_request(request, row, token)
        for row, token in zip(batch_slice.sampled_rows, tokens, strict=False)
        if token is not None
    ]
