"""Draft verification: one emitted token for each sequence and step, and one more for each accepted draft token.

Row j of a sequence has the logits after its draft tokens 0 to j - 1; the sampling rule gives the token that follows,
with the noise of that token's position. While that token equals the draft token, the next row is valid too; the first
different token ends the step. Drafts therefore decide how many tokens a step emits, never which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.sample.sampler import SamplingContext


@dataclass(frozen=True, slots=True)
class VerifyTokens:
    """The logit rows of one sequence: after its last token, and after each draft token.

    context  of the token after the last one
    is_end   whether a token ends the text, whatever was drafted after it
    """

    drafts: tuple[int, ...]
    context: SamplingContext
    is_end: Callable[[int], bool]

    @property
    def logit_rows(self) -> int:
        """Rows of logits: one more than draft tokens."""
        return len(self.drafts) + 1


def contexts_of(sequences: Sequence[VerifyTokens]) -> list[SamplingContext]:
    """The contexts of all rows, sequence by sequence: each as if all drafts before it were accepted."""
    return [context for sequence in sequences for context in sequence.context.after_each(sequence.drafts)]


def verify(sequences: Sequence[VerifyTokens], tokens: Sequence[int | None]) -> list[list[int | None]]:
    """The tokens that each sequence emits, at least one; None for a token whose row has no finite maximum.

    tokens  sampled from the rows of `contexts_of`

    Tokens after a rejected draft are discarded, so penalties and constraints are exact for all emitted tokens.
    """
    emitted, start = [], 0
    for sequence in sequences:
        stop = start + sequence.logit_rows
        emitted.append(_accepted(sequence, tokens[start:stop]))
        start = stop
    return emitted


def _accepted(sequence: VerifyTokens, tokens: Sequence[int | None]) -> list[int | None]:
    """The tokens up to the first that differs from its draft or ends the text."""
    for row, draft in enumerate(sequence.drafts):
        token = tokens[row]
        if token is None or token != draft or sequence.is_end(token):
            return [*tokens[: row + 1]]
    return [*tokens]
