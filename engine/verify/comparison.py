"""Compares two answers to one request: bit for bit, or by tokens and up to rounding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from engine.types.events import TokenLogprob

# The largest difference of a log-probability that counts as rounding, by the dtype of the computation.
ROUNDING_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}

Verdict = Literal["equal", "tie", "different", "failed"]


@dataclass(slots=True)
class Answer:
    """The tokens of a request with their log-probabilities, and what the engine did for it.

    failure  the reason of a failed request; empty: it did not fail
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    context_shifts: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between the expected answer and another one.

    position  index of the generated token
    expected  token of the expected answer; None: it has ended
    actual    token of the other answer; None: it has ended
    gap       between the two top log-probabilities of the expected answer; None: unknown
    error     largest difference of a log-probability of the same token at this position; None: no token in common
    """

    position: int
    expected: int | None
    actual: int | None
    gap: float | None
    error: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of one request: "tie" is another token where all log-probabilities are equal up to rounding.

    max_error  largest difference of a log-probability up to the first difference of tokens
    """

    request: str
    verdict: Verdict
    max_error: float = 0.0
    difference: Difference | None = None
    failure: str = ""


def compare(name: str, expected: Answer, actual: Answer, *, bitwise: bool, rounding_limit: float) -> Comparison:
    """Compare two answers: log-probabilities bit for bit, or else tokens."""
    failure = expected.failure or actual.failure
    if failure:
        return Comparison(name, "failed", failure=failure)
    max_error = 0.0
    for position in range(max(len(expected.tokens), len(actual.tokens))):
        difference = _difference(expected, actual, position)
        error = difference.error or 0.0
        max_error = max(max_error, error)
        if difference.expected != difference.actual:
            is_tie = difference.error is not None and error <= rounding_limit and not bitwise
            return Comparison(name, "tie" if is_tie else "different", max_error, difference)
        if bitwise and error != 0:
            return Comparison(name, "different", max_error, difference)
    return Comparison(name, "equal", max_error)


def _difference(expected: Answer, actual: Answer, position: int) -> Difference:
    before, after = _logprobs(expected, position), _logprobs(actual, position)
    top = sorted(before.values(), reverse=True)
    errors = [abs(before[token] - after[token]) for token in before.keys() & after.keys()]
    return Difference(
        position,
        _token(expected, position),
        _token(actual, position),
        top[0] - top[1] if len(top) > 1 else None,
        max(errors, default=None),
    )


def _token(answer: Answer, position: int) -> int | None:
    return answer.tokens[position] if position < len(answer.tokens) else None


def _logprobs(answer: Answer, position: int) -> dict[int, float]:
    """The known log-probabilities at a position, by token."""
    if position >= len(answer.logprobs):
        return {}
    entry = answer.logprobs[position]
    return {logprob.token: logprob.logprob for logprob in (*entry.top, entry.chosen)}
