"""What a step computes for one sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.schedule.draft import Draft
from engine.schedule.sequence import Sequence
from kvcache.spec import Span


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A span of the tokens of a sequence, and draft tokens after it."""

    sequence: Sequence
    span: Span
    draft: Draft | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the span reaches the last token."""
        return self.span.stop == len(self.sequence.tokens)

    @property
    def is_sampled(self) -> bool:
        """Whether the step samples the next token."""
        return self.is_complete and self.sequence.max_new_tokens > 0

    @property
    def sample_count(self) -> int:
        """Positions to sample from: after the span, and after each draft token."""
        return len(self.draft_tokens) + 1 if self.is_sampled else 0

    @property
    def has_content_rows(self) -> bool:
        """Whether the inputs of tokens of the span are rows of a content."""
        contents, span = self.sequence.contents, self.span
        return contents is not None and any(contents.embedded_rows(span.start, span.stop, 0))

    @property
    def samples_only(self) -> bool:
        """Whether neither logprobs, prompt scores nor hidden states are required."""
        sequence = self.sequence
        return sequence.scores is None and sequence.pooler is None and sequence.request.logprobs is None

    @property
    def scored_positions(self) -> range:
        """Positions of the span with logits that score a prompt token."""
        scores = self.sequence.scores
        return range(0) if scores is None else scores.logit_positions(self.span.start, self.span.stop)

    @property
    def pooled_positions(self) -> range:
        """Positions of the span with hidden states that are pooled."""
        pooler = self.sequence.pooler
        return range(0) if pooler is None else pooler.state_positions(self.span.start, self.span.stop)

    @property
    def charged_tokens(self) -> int:
        """Tokens charged to the owner: the computed ones, and one for each position with logprobs."""
        logprobs = self.sample_count if self.sequence.request.logprobs is not None else 0
        return self.batch_span.length + len(self.scored_positions) + logprobs

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        """The draft, or no tokens."""
        return () if self.draft is None else self.draft.tokens

    @property
    def batch_span(self) -> Span:
        """The span with the draft tokens."""
        if self.draft is None:
            return self.span
        count = len(self.draft_tokens)
        return replace(self.span, length=self.span.length + count, draft_tokens=count)

    @property
    def batch_tokens(self) -> list[int]:
        """The tokens of `batch_span`."""
        tokens = self.sequence.tokens[self.span.start : self.span.stop]
        return tokens if self.draft is None else [*tokens, *self.draft.tokens]
