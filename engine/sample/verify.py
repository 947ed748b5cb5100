"""What a step says: one token a sequence, and further ones where drafts turn out to be what would be said anyway.

A draft is no more than a row of the batch. Row j of a sequence stands behind its drafts 0 to j - 1, and `emit` picks
the token that follows there, with the noise of its own position. As long as that token is the draft, the row behind
the draft tells the next one too; the first token that is no draft ends it. So drafts decide how many tokens a step
says, never which (design notes, algorithms 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from engine.sample.sampler import SamplingContext

# Draws the next token behind each row: `emit` of its logits, or what says the same sooner.
SampleTokens: TypeAlias = Callable[[Sequence[SamplingContext]], list[int | None]]


@dataclass(frozen=True, slots=True)
class VerifyTokens:
    """The rows of one sequence that tell tokens: behind its last token, and behind each draft.

    context  how to draw the token behind the last one
    is_end  whether a token is the last of its text, whatever was drafted behind it
    """

    drafts: tuple[int, ...]
    context: SamplingContext
    is_end: Callable[[int], bool]

    @property
    def logit_rows(self) -> int:
        """Rows of logits: one more than drafts."""
        return len(self.drafts) + 1


def verify(sequences: Sequence[VerifyTokens], sample: SampleTokens) -> list[list[int | None]]:
    """What each trial says, at least one token each; None in the place of a token whose row has no finite maximum.

    choose  of the rows of the first trial, then those of the second, ...

    Every row is drawn as if all drafts before it were right. Where one is not, what was drawn behind it is not used, so
    penalties that look at the text are exact on all that is.
    """
    draws = [draw for trial in sequences for draw in trial.context.after_each(trial.drafts)]
    tokens = sample(draws)
    said, at = [], 0
    for trial in sequences:
        stop = at + trial.logit_rows
        said.append(_accepted(trial, tokens[at:stop]))
        at = stop
    return said


def _accepted(trial: VerifyTokens, tokens: list[int | None]) -> list[int | None]:
    """The tokens up to the first that is not the draft at its place, or that ends the text."""
    for row, draft in enumerate(trial.drafts):
        token = tokens[row]
        if token is None or token != draft or trial.is_end(token):
            return tokens[: row + 1]
    return tokens
