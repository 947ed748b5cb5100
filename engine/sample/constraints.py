"""Constraints of a request on the next token: masks that depend on the text so far, so that drafts obey them.

They apply in this order: grammar, allowed tokens, bad words, minimum length, reasoning budget, timestamps; the mask of
timestamps depends on the logits too. Where the grammar allows
end tokens only, the text ends and the other constraints do not apply.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.grammar import bitmask
from engine.grammar.matcher import GrammarMatcher
from engine.sample.timestamps import Timestamps
from engine.types.request import ReasoningLimit, Request


class Constraint(Protocol):
    """One constraint at one position of a text; immutable."""

    def after(self, token: int) -> Constraint:
        """The constraint one token later."""

    def mask(self, logits: Tensor) -> None:
        """Set forbidden tokens to minus infinity in place [vocabulary]."""


class Constraints:
    """All constraints of one request at one position of its text.

    reads_logits  whether the allowed tokens depend on the logits: `allowed_bits` is not defined then
    """

    def __init__(
        self, constraints: Iterable[Constraint], matcher: GrammarMatcher | None, *, end_tokens: Iterable[int]
    ) -> None:
        self._constraints = tuple(constraints)
        self.reads_logits = any(isinstance(constraint, Timestamps) for constraint in self._constraints)
        self._matcher, self._end_tokens = matcher, tuple(end_tokens)
        # Draft tokens after the text of the matcher.
        self._draft_tokens: tuple[int, ...] = ()

    @classmethod
    def for_request(
        cls,
        request: Request,
        prompt: Sequence[int],
        *,
        vocabulary: int,
        end_tokens: Iterable[int],
        matcher: GrammarMatcher | None,
    ) -> Constraints | None:
        """The constraints of a request; None if it has none.

        prompt      its tokens, without those outside the vocabulary
        end_tokens  of the model
        matcher     of the request's grammar
        """
        params, constraints = request.sampling, list[Constraint]()
        if params.allowed_tokens is not None:
            constraints.append(_AllowedTokens(params.allowed_tokens, vocabulary))
        if params.bad_words:
            longest = max(map(len, params.bad_words))
            constraints.append(_BadWords(params.bad_words, tuple(prompt[-longest:])))
        if request.min_tokens:
            constraints.append(_MinTokens(tuple({*end_tokens, *request.stop_token_ids}), request.min_tokens))
        if request.reasoning_limit is not None:
            constraints.append(_ReasoningBudget(request.reasoning_limit, request.reasoning_limit.start_token is None))
        if request.timestamps is not None:
            constraints.append(Timestamps(request.timestamps))
        return cls(constraints, matcher, end_tokens=end_tokens) if constraints or matcher is not None else None

    def append(self, token: int) -> None:
        """Advance by one token of the text."""
        self._constraints = tuple(constraint.after(token) for constraint in self._constraints)
        if self._matcher is not None:
            self._matcher.append(token)

    @property
    def matches_grammar(self) -> bool:
        """Whether the grammar permits the text so far."""
        return self._matcher is None or self._matcher.matches

    def after(self, tokens: Sequence[int]) -> Constraints:
        """The constraints after draft tokens; `self` is unchanged."""
        if not tokens:
            return self
        later = copy.copy(self)
        for token in tokens:
            later._constraints = tuple(constraint.after(token) for constraint in later._constraints)
        later._draft_tokens = (*self._draft_tokens, *tokens)
        return later

    def forced_tokens(self, limit: int) -> list[int]:
        """Up to `limit` tokens that the grammar forces next; other constraints may forbid them."""
        return [] if self._matcher is None else self._matcher.forced_tokens(limit)

    def masked(self, logits: Tensor) -> Tensor:
        """A copy of the logits [vocabulary] with forbidden tokens at minus infinity."""
        return self._masked(logits, self._grammar_bits())

    def allowed_bits(self, vocabulary: int) -> bytes:
        """The bitmask (bitmask.py) of the tokens that `masked` leaves of finite logits, `vocabulary` bits or more."""
        allowed = self._grammar_bits()
        if allowed is not None and not self._constraints:
            return allowed
        return bitmask.pack_mask(self._masked(torch.zeros(vocabulary), allowed).numpy() == 0)

    def _grammar_bits(self) -> bytes | None:
        return None if self._matcher is None else self._matcher.allowed_bits(self._draft_tokens)

    def _masked(self, logits: Tensor, allowed: bytes | None) -> Tensor:
        masked = logits.clone() if allowed is None else bitmask.mask_logits(logits, allowed)
        if allowed is None or not self._only_end_tokens(allowed, len(logits)):
            for constraint in self._constraints:
                constraint.mask(masked)
        return masked

    def deadlock_reason(self, vocabulary: int) -> str | None:
        """Why no token is allowed; None if one is."""
        row = self.masked(torch.zeros(vocabulary))
        if row.amax() > -torch.inf:
            return None
        if self._matcher is not None and self._matcher.error:
            return f"the grammar is too complex to be followed here: {self._matcher.error.splitlines()[0]}"
        return "the request's grammar, allowed tokens and bad words leave no token for this position"

    def _only_end_tokens(self, allowed: bytes, vocabulary: int) -> bool:
        ends = sum(bitmask.contains(allowed, end) for end in self._end_tokens)
        return bitmask.count(allowed, vocabulary) == ends


class _AllowedTokens:
    """Forbids all other tokens."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self._bits = bitmask.pack(tokens, vocabulary)

    def after(self, token: int) -> _AllowedTokens:
        return self

    def mask(self, logits: Tensor) -> None:
        logits.copy_(bitmask.mask_logits(logits, self._bits))


@dataclass(frozen=True, slots=True)
class _BadWords:
    """Forbids the last token of a bad word after its other tokens. `tail`: the latest tokens of prompt and output."""

    words: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]

    def after(self, token: int) -> _BadWords:
        longest = max(map(len, self.words))
        return replace(self, tail=(*self.tail, token)[-longest:])

    def mask(self, logits: Tensor) -> None:
        last = [word[-1] for word in self.words if len(word) == 1 or self.tail[1 - len(word) :] == word[:-1]]
        logits[last] = -torch.inf


@dataclass(frozen=True, slots=True)
class _MinTokens:
    """Forbids end tokens for the next `remaining` tokens."""

    end_tokens: tuple[int, ...]
    remaining: int

    def after(self, token: int) -> _MinTokens:
        return replace(self, remaining=max(self.remaining - 1, 0))

    def mask(self, logits: Tensor) -> None:
        if self.remaining:
            logits[list(self.end_tokens)] = -torch.inf


@dataclass(frozen=True, slots=True)
class _ReasoningBudget:
    """Forces the tokens that end the reasoning once its budget is spent, unless another constraint forbids them.

    inside            the text is inside a reasoning block
    reasoning_tokens  in all blocks so far
    tail              the latest tokens of the block, as many as `limit.end_tokens`
    """

    limit: ReasoningLimit
    inside: bool
    reasoning_tokens: int = 0
    tail: tuple[int, ...] = ()

    def after(self, token: int) -> _ReasoningBudget:
        if not self.inside:
            return replace(self, inside=token == self.limit.start_token, tail=())
        tail = (*self.tail, token)[-len(self.limit.end_tokens) :]
        inside = tail != self.limit.end_tokens
        return replace(self, inside=inside, reasoning_tokens=self.reasoning_tokens + 1, tail=tail)

    def mask(self, logits: Tensor) -> None:
        if not self.inside or self.reasoning_tokens < self.limit.budget:
            return
        token = self.limit.end_tokens[self._emitted_end_tokens()]
        if (value := logits[token].clone()) > -torch.inf:
            logits.fill_(-torch.inf)
            logits[token] = value

    def _emitted_end_tokens(self) -> int:
        """How many of the end tokens the tail ends with."""
        ends = self.limit.end_tokens
        lengths = range(min(len(ends) - 1, len(self.tail)), 0, -1)
        return next((length for length in lengths if self.tail[-length:] == ends[:length]), 0)
