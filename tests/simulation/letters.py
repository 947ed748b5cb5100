"""A tokenizer with a letter for each token, and a grammar of it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.grammar import bitmask
from engine.types.events import Logprob
from tests.simulation.faults import Faults, InjectedError

END = 1
VOCABULARY = 32
SPECIAL = frozenset({0, END})


def letter(token: int) -> str:
    """The text of a token."""
    return "" if token in SPECIAL else chr(0x61 + token)


class LetterDetokenizer:
    """Implements Detokenizer."""

    skipped_tokens = SPECIAL

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def push(self, token: int) -> str:
        self._faults.raise_if("detokenizer")
        return letter(token)

    def flush(self) -> str:
        return ""


class LetterTokenizer:
    """The part of Tokenizer that the core reads."""

    special_tokens = SPECIAL

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def detokenizer(self, prompt: Sequence[int], *, special: bool = False) -> LetterDetokenizer:
        self._faults.raise_if("request")
        return LetterDetokenizer(self._faults)

    def describe_token(self, token: int, logprob: float) -> Logprob:
        return Logprob(token, letter(token), letter(token).encode(), logprob)


def allowed_tokens(output: Sequence[int]) -> list[int]:
    """The tokens that the grammar allows after an output: now and then one alone, else every second, later the end."""
    index = len(output)
    if index % 4 == 3:
        return [2 + (7 * output[-1] + index) % (VOCABULARY - 2)]
    return [*range(2 + index % 2, VOCABULARY, 2), *([END] if index > 5 else [])]


class LetterMatcher:
    """The grammar above; the part of GrammarMatcher that sequences read. After a fault every call fails."""

    error = ""

    def __init__(self, faults: Faults) -> None:
        self._faults, self._is_broken = faults, False
        self._output: list[int] = []

    def append(self, token: int) -> None:
        self._fail_if_due()
        assert token in allowed_tokens(self._output), "a token that the grammar forbids"
        self._output.append(token)

    def allowed_bits(self, draft: Sequence[int]) -> bytes:
        self._fail_if_due()
        return bitmask.pack(allowed_tokens([*self._output, *draft]), VOCABULARY)

    def forced_tokens(self, limit: int) -> list[int]:
        forced: list[int] = []
        while len(forced) < limit and len(only := allowed_tokens([*self._output, *forced])) == 1:
            forced += only
        return forced

    def _fail_if_due(self) -> None:
        self._is_broken = self._is_broken or self._faults.is_due("matcher")
        if self._is_broken:
            raise InjectedError("matcher")
