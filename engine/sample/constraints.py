"""What may be said next, whatever the logits are: a function of the text so far, so no draft can change it.

Rules are asked in this order: the grammar, then what is allowed at all, bad words, the shortest length, and the limit
to what is said before the answer. Where the grammar leaves nothing but ends, the text ends: the others are not asked.
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
from engine.types.request import ReasoningLimit, Request


class Constraint(Protocol):
    """One rule at one place in a text. It never changes."""

    def after(self, token: int) -> Constraint:
        """The rule one token later."""

    def mask(self, logits: Tensor) -> None:
        """Set what may not be said here to minus infinity [vocabulary]."""


class Constraints:
    """All rules of one request, at one place in its text."""

    def __init__(
        self, constraints: Iterable[Constraint], matcher: GrammarMatcher | None, *, end_tokens: Iterable[int]
    ) -> None:
        self._constraints = tuple(constraints)
        self._matcher, self._end_tokens = matcher, tuple(end_tokens)
        # Behind the matcher's text, what is only guessed.
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
        """The rules that a request asks for; None: there are none.

        prompt   of the request, as far as tokens are in the vocabulary
        ends     the tokens that end any text of the model
        matcher  of the request's grammar
        """
        params, rules = request.sampling, list[Constraint]()
        if params.allowed_tokens is not None:
            rules.append(_AllowedTokens(params.allowed_tokens, vocabulary))
        if params.bad_words:
            longest = max(map(len, params.bad_words))
            rules.append(_BadWords(params.bad_words, tuple(prompt[-longest:])))
        if request.min_tokens:
            rules.append(_MinTokens(tuple({*end_tokens, *request.stop_token_ids}), request.min_tokens))
        if request.reasoning_limit is not None:
            rules.append(_ReasoningBudget(request.reasoning_limit, request.reasoning_limit.start_token is None))
        return cls(rules, matcher, end_tokens=end_tokens) if rules or matcher is not None else None

    def append(self, token: int) -> None:
        """The text goes on with a token."""
        self._constraints = tuple(rule.after(token) for rule in self._constraints)
        if self._matcher is not None:
            self._matcher.append(token)

    def after(self, tokens: Sequence[int]) -> Constraints:
        """The rules if the text went on with `tokens`; these stay as they are."""
        if not tokens:
            return self
        later = copy.copy(self)
        for token in tokens:
            later._constraints = tuple(rule.after(token) for rule in later._constraints)
        later._draft_tokens = (*self._draft_tokens, *tokens)
        return later

    def forced_tokens(self, limit: int) -> list[int]:
        """Up to `limit` tokens that the grammar makes come next, as it seems. Other rules may forbid them."""
        return [] if self._matcher is None else self._matcher.forced_tokens(limit)

    def masked(self, logits: Tensor) -> Tensor:
        """New logits [vocabulary], those of what may not be said here minus infinity."""
        allowed = None if self._matcher is None else self._matcher.allowed_bits(self._draft_tokens)
        limited = logits.clone() if allowed is None else bitmask.mask_logits(logits, allowed)
        if allowed is None or not self._only_end_tokens(allowed, len(logits)):
            for rule in self._constraints:
                rule.mask(limited)
        return limited

    def deadlock_reason(self, vocabulary: int) -> str | None:
        """Why nothing at all may be said here; None: something may."""
        row = self.masked(torch.zeros(vocabulary))
        if row.amax() > -torch.inf:
            return None
        if self._matcher is not None and self._matcher.error:
            return f"the grammar is too complex to be followed here: {self._matcher.error.splitlines()[0]}"
        return "nothing may be said here: the request's grammar, allowed tokens and bad words leave no token"

    def _only_end_tokens(self, allowed: bytes, vocabulary: int) -> bool:
        """Whether only ends are allowed."""
        return bitmask.count(allowed, vocabulary) == sum(bitmask.contains(allowed, end) for end in self._end_tokens)


class _AllowedTokens:
    """Nothing else is ever said."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self._bits = bitmask.pack(tokens, vocabulary)

    def after(self, token: int) -> _AllowedTokens:
        return self

    def mask(self, logits: Tensor) -> None:
        logits.copy_(bitmask.mask_logits(logits, self._bits))


@dataclass(frozen=True, slots=True)
class _BadWords:
    """The last token of a bad word is not said behind its others. `tail`: the latest tokens, prompt and output."""

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
    """For `left` more tokens none of `ends` is said."""

    end_tokens: tuple[int, ...]
    remaining: int

    def after(self, token: int) -> _MinTokens:
        return replace(self, remaining=max(self.remaining - 1, 0))

    def mask(self, logits: Tensor) -> None:
        if self.remaining:
            logits[list(self.end_tokens)] = -torch.inf


@dataclass(frozen=True, slots=True)
class _ReasoningBudget:
    """Where the budget is spent, the tokens come that end the thoughts, as soon as nothing else forbids them.

    reasoning_tokens  tokens of thoughts, of all together
    tail  the latest of them, as many as end thoughts
    """

    limit: ReasoningLimit
    inside: bool
    reasoning_tokens: int = 0
    tail: tuple[int, ...] = ()

    def after(self, token: int) -> _ReasoningBudget:
        if not self.inside:
            return replace(self, inside=token == self.limit.start_token, tail=())
        tail = (*self.tail, token)[-len(self.limit.end_tokens) :]
        return replace(
            self, inside=tail != self.limit.end_tokens, reasoning_tokens=self.reasoning_tokens + 1, tail=tail
        )

    def mask(self, logits: Tensor) -> None:
        if not self.inside or self.reasoning_tokens < self.limit.budget:
            return
        token = self.limit.end_tokens[self._emitted_end_tokens()]
        if (value := logits[token].clone()) > -torch.inf:
            logits.fill_(-torch.inf)
            logits[token] = value

    def _emitted_end_tokens(self) -> int:
        """How many of the tokens that end thoughts have just been said."""
        closes = self.limit.end_tokens
        lengths = range(min(len(closes) - 1, len(self.tail)), 0, -1)
        return next((length for length in lengths if self.tail[-length:] == closes[:length]), 0)
