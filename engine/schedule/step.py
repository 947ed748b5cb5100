"""One forward over what a plan grants, and what becomes known after it: what sequences say, scores, states.

The rows of a grant are its span of the sequence and, behind it, a draft. Of the draft the cache keeps what was said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Tensor

from engine.load.load import LoadedModel
from engine.model.encoder_mask import EncoderMask
from engine.sample.logprobs import LogprobQuery, token_logprobs
from engine.sample.verify import SampleTokens, VerifyTokens, verify
from engine.schedule.scheduler import ScheduledSequence
from engine.types.events import Logprob, TokenLogprob
from kvcache.cache import Cache
from kvcache.forward import Forward
from kvcache.spec import Span


@dataclass(frozen=True, slots=True)
class StepResult:
    """What is known of one sequence after a step; None is where its output was not finite.

    tokens    what it says; none where its prompt is not computed yet, or nothing is to follow it
    logprobs  of these before a None; none where the request did not ask for them
    scores    of further tokens of the prompt, in order
    hidden_states    [rows, width] of further tokens of the prompt; None where none are asked for
    """

    scheduled: ScheduledSequence
    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprob | None, ...] = ()
    scores: tuple[TokenLogprob | None, ...] = ()
    hidden_states: Tensor | None = None

    @property
    def is_broken(self) -> bool:
        """Whether some of its output was not finite."""
        sound = self.hidden_states is None or bool(self.hidden_states.isfinite().all())
        return None in self.tokens or None in self.scores or not sound


@dataclass(slots=True)
class _BatchSlice:
    """What one grant has of a batch.

    first_logit_row  the first of its rows of logits
    first_state_row  the first of its rows of states
    logit_tokens  the rows of the batch whose logits are asked for, those last behind which something is said
    pooled_tokens  the rows whose states are asked for
    sampled_rows    of the logits those behind which something is said
    """

    scheduled: ScheduledSequence
    first_logit_row: int
    first_state_row: int
    logit_tokens: Sequence[int]
    pooled_tokens: Sequence[int]
    sampled_rows: range


class Stepper:
    """Computes steps of one model over one cache. Belongs to the engine thread."""

    def __init__(self, loaded: LoadedModel, cache: Cache) -> None:
        self._runner, self._cache = loaded.runner, cache
        describe = loaded.tokenizer.describe_token
        # To read a token costs 30 microseconds, and the likeliest tokens are often the same ones.
        self._describe_token = lru_cache(maxsize=8192)(lambda token: describe(token, 0.0))

    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[StepResult]:
        """What becomes known of each grant, in order. What raises keeps no row of the step."""
        compute = self._sample_only if all([grant.samples_only for grant in scheduled]) else self._sample_and_report
        with self._cache.forward([grant.batch_span for grant in scheduled]) as forward:
            said = compute(forward, scheduled)
            for each in said:
                if each.scheduled.draft is not None:
                    # The last token that was said has no row yet, and neither has anything drafted behind it.
                    forward.keep(each.scheduled.span.slot, each.scheduled.span.stop + len(each.tokens) - 1)
        return said

    def _sample_only(self, forward: Forward, scheduled: Sequence[ScheduledSequence]) -> list[StepResult]:
        """What is said, where nobody asks for logits or states."""
        tokens: list[int] = []
        wanted: list[int] = []
        for grant in scheduled:
            tokens += grant.batch_tokens
            wanted += range(len(tokens) - grant.sample_count, len(tokens))
        said = _verify_drafts(
            scheduled, partial(self._runner.run_and_sample, forward, tokens, wanted, _encoder_masks(scheduled))
        )
        return [StepResult(grant, tuple(own)) for grant, own in zip(scheduled, said, strict=True)]

    def _sample_and_report(self, forward: Forward, scheduled: Sequence[ScheduledSequence]) -> list[StepResult]:
        """What is said, and all that is asked for besides."""
        shares, sights = _batch_slices(scheduled, forward.spans), _encoder_masks(scheduled)
        tokens = [token for grant in scheduled for token in grant.batch_tokens]
        wanted = [row for share in shares for row in share.logit_tokens]
        pooled = [row for share in shares for row in share.pooled_tokens]
        states = None
        if pooled:
            logits, states = self._runner.run_with_hidden_states(forward, tokens, wanted, pooled, sights)
        else:
            logits = self._runner.run(forward, tokens, wanted, sights)
        rows = [row for share in shares for row in share.sampled_rows]
        telling = logits[rows] if len(rows) < len(wanted) else logits
        said = _verify_drafts(scheduled, partial(self._runner.sample, telling))
        return list(self._step_results(shares, said, logits, states))

    def _describe(self, token: int, logprob: float) -> Logprob:
        known = self._describe_token(token)
        return Logprob(token, known.text, known.bytes, logprob)

    def _step_results(
        self,
        slices: Sequence[_BatchSlice],
        tokens: Sequence[Sequence[int | None]],
        logits: Tensor,
        states: Tensor | None,
    ) -> Iterator[StepResult]:
        """Everything by grant; log-probabilities are computed for all at once."""
        asked = [
            (_score_queries(share), _logprob_queries(share, own)) for share, own in zip(slices, tokens, strict=True)
        ]
        entries = token_logprobs(logits, [ask for some in asked for asks in some for ask in asks], self._describe)
        for share, own, (scores, said) in zip(slices, tokens, asked, strict=True):
            scored = tuple(next(entries) for _ in scores)
            described = tuple(next(entries) for _ in said)
            pooled = (
                None
                if states is None
                else states[share.first_state_row : share.first_state_row + len(share.pooled_tokens)]
            )
            yield StepResult(share.scheduled, tuple(own), described, scored, pooled)


def _batch_slices(scheduled: Sequence[ScheduledSequence], spans: Sequence[Span]) -> list[_BatchSlice]:
    """How the grants share a batch, one after the other."""
    shares: list[_BatchSlice] = []
    row = logits = states = 0
    for grant, span in zip(scheduled, spans, strict=True):
        scored, pooled = grant.scored_positions, grant.pooled_positions
        stop = row + span.length
        before = row - span.start
        wanted = [*(before + position for position in scored), *range(stop - grant.sample_count, stop)]
        said = range(logits + len(scored), logits + len(wanted))
        shares.append(_BatchSlice(grant, logits, states, wanted, [before + position for position in pooled], said))
        row = stop
        logits += len(wanted)
        states += len(pooled)
    return shares


def _encoder_masks(scheduled: Sequence[ScheduledSequence]) -> list[EncoderMask | None]:
    """What each sequence sees of its media."""
    return [grant.sequence.encoder_mask for grant in scheduled]


def _verify_drafts(scheduled: Sequence[ScheduledSequence], choose: SampleTokens) -> list[list[int | None]]:
    """What each grant says; nothing where nothing is to be said."""
    speaking = [grant for grant in scheduled if grant.is_sampled]
    trials = [
        VerifyTokens(grant.draft_tokens, grant.sequence.draw(), grant.sequence.is_stop_token) for grant in speaking
    ]
    said = verify(trials, choose)
    if len(speaking) == len(scheduled):
        return said
    told = iter(said)
    return [next(told) if grant.is_sampled else [] for grant in scheduled]


def _score_queries(batch_slice: _BatchSlice) -> list[LogprobQuery]:
    """What is asked of the rows that score a token of the prompt: each tells of the one behind it."""
    request = batch_slice.scheduled.sequence.request
    scored = enumerate(batch_slice.scheduled.scored_positions, batch_slice.first_logit_row)
    return [LogprobQuery.for_request(request, row, request.prompt[position + 1]) for row, position in scored]


def _logprob_queries(batch_slice: _BatchSlice, tokens: Sequence[int | None]) -> list[LogprobQuery]:
    """What is asked of the rows behind which something was said."""
    request = batch_slice.scheduled.sequence.request
    if request.logprobs is None:
        return []
    return [
        LogprobQuery.for_request(request, row, token)
        for row, token in zip(batch_slice.sampled_rows, tokens, strict=False)
        if token is not None
    ]
