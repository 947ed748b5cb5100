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
from engine.grammar.matcher import Matcher
from engine.types.request import Request, Thinking


class Rule(Protocol):
    """One rule at one place in a text. It never changes."""

    def after(self, token: int) -> Rule:
        """The rule one token later."""

    def forbid(self, logits: Tensor) -> None:
        """Set what may not be said here to minus infinity [vocabulary]."""


class Rules:
    """All rules of one request, at one place in its text."""

    def __init__(self, rules: Iterable[Rule], matcher: Matcher | None, *, ends: Iterable[int]) -> None:
        self._rules = tuple(rules)
        self._matcher, self._ends = matcher, tuple(ends)
        # Behind the matcher's text, what is only guessed.
        self._guessed: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, request: Request, prompt: Sequence[int], *, vocabulary: int, ends: Iterable[int], matcher: Matcher | None
    ) -> Rules | None:
        """The rules that a request asks for; None: there are none.

        prompt   of the request, as far as tokens are in the vocabulary
        ends     the tokens that end any text of the model
        matcher  of the request's grammar
        """
        params, rules = request.sampling, list[Rule]()
        if params.allowed_tokens is not None:
            rules.append(_Allowed(params.allowed_tokens, vocabulary))
        if params.bad_words:
            longest = max(map(len, params.bad_words))
            rules.append(_BadWords(params.bad_words, tuple(prompt[-longest:])))
        if request.min_tokens:
            rules.append(_Shortest(tuple({*ends, *request.stop_token_ids}), request.min_tokens))
        if request.thinking is not None:
            rules.append(_Thinking(request.thinking, request.thinking.opens is None))
        return cls(rules, matcher, ends=ends) if rules or matcher is not None else None

    def append(self, token: int) -> None:
        """The text goes on with a token."""
        self._rules = tuple(rule.after(token) for rule in self._rules)
        if self._matcher is not None:
            self._matcher.append(token)

    def after(self, tokens: Sequence[int]) -> Rules:
        """The rules if the text went on with `tokens`; these stay as they are."""
        if not tokens:
            return self
        later = copy.copy(self)
        for token in tokens:
            later._rules = tuple(rule.after(token) for rule in later._rules)
        later._guessed = (*self._guessed, *tokens)
        return later

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that the grammar makes come next, as it seems. Other rules may forbid them."""
        return [] if self._matcher is None else self._matcher.forced(most)

    def limited(self, logits: Tensor) -> Tensor:
        """New logits [vocabulary], those of what may not be said here minus infinity."""
        allowed = None if self._matcher is None else self._matcher.bits(self._guessed)
        limited = logits.clone() if allowed is None else bitmask.limited(logits, allowed)
        if allowed is None or not self._ending(allowed, len(logits)):
            for rule in self._rules:
                rule.forbid(limited)
        return limited

    def deadlock(self, vocabulary: int) -> str | None:
        """Why nothing at all may be said here; None: something may."""
        row = self.limited(torch.zeros(vocabulary))
        if row.amax() > -torch.inf:
            return None
        if self._matcher is not None and self._matcher.error:
            return f"the grammar is too complex to be followed here: {self._matcher.error.splitlines()[0]}"
        return "nothing may be said here: the request's grammar, allowed tokens and bad words leave no token"

    def _ending(self, allowed: bytes, vocabulary: int) -> bool:
        """Whether only ends are allowed."""
        return bitmask.count(allowed, vocabulary) == sum(bitmask.contains(allowed, end) for end in self._ends)


class _Allowed:
    """Nothing else is ever said."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self._bits = bitmask.bits_of(tokens, vocabulary)

    def after(self, token: int) -> _Allowed:
        return self

    def forbid(self, logits: Tensor) -> None:
        logits.copy_(bitmask.limited(logits, self._bits))


@dataclass(frozen=True, slots=True)
class _BadWords:
    """The last token of a bad word is not said behind its others. `tail`: the latest tokens, prompt and output."""

    words: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]

    def after(self, token: int) -> _BadWords:
        longest = max(map(len, self.words))
        return replace(self, tail=(*self.tail, token)[-longest:])

    def forbid(self, logits: Tensor) -> None:
        last = [word[-1] for word in self.words if len(word) == 1 or self.tail[1 - len(word) :] == word[:-1]]
        logits[last] = -torch.inf


@dataclass(frozen=True, slots=True)
class _Shortest:
    """For `left` more tokens none of `ends` is said."""

    ends: tuple[int, ...]
    left: int

    def after(self, token: int) -> _Shortest:
        return replace(self, left=max(self.left - 1, 0))

    def forbid(self, logits: Tensor) -> None:
        if self.left:
            logits[list(self.ends)] = -torch.inf


@dataclass(frozen=True, slots=True)
class _Thinking:
    """Where the budget is spent, the tokens come that end the thoughts, as soon as nothing else forbids them.

    said  tokens of thoughts, of all together
    tail  the latest of them, as many as end thoughts
    """

    limit: Thinking
    inside: bool
    said: int = 0
    tail: tuple[int, ...] = ()

    def after(self, token: int) -> _Thinking:
        if not self.inside:
            return replace(self, inside=token == self.limit.opens, tail=())
        tail = (*self.tail, token)[-len(self.limit.closes) :]
        return replace(self, inside=tail != self.limit.closes, said=self.said + 1, tail=tail)

    def forbid(self, logits: Tensor) -> None:
        if not self.inside or self.said < self.limit.budget:
            return
        token = self.limit.closes[self._begun()]
        if (value := logits[token].clone()) > -torch.inf:
            logits.fill_(-torch.inf)
            logits[token] = value

    def _begun(self) -> int:
        """How many of the tokens that end thoughts have just been said."""
        closes = self.limit.closes
        lengths = range(min(len(closes) - 1, len(self.tail)), 0, -1)
        return next((length for length in lengths if self.tail[-length:] == closes[:length]), 0)
