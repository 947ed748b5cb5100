"""The state of a grammar along one text: which tokens may come next, also behind tokens that are only guessed.

llguidance walks the grammar. To go back costs it a microsecond, a copy 35 of them for every 1,000 tokens of the text
(measured), so one matcher serves all rows of a sequence: it goes to where it is asked about.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from engine.grammar.bitmask import bits_of, unpacked
from engine.grammar.sandbox import LIMITS, SILENT, TOO_SLOW, UNFORCED
from engine.text.prefix import common_prefix

# A limit that is met so few tokens after a new beginning was met by this text alone.
_OWN_TOKENS = 32
# Of processor time. A grammar is compiled anew on the engine's thread only where that takes no longer.
_RENEWED_SECONDS = 0.05
# So long may a step of one text take; and so much longer may all its steps together, before it is given up.
_STEP_SECONDS, _EXCESS_SECONDS = 0.1, 0.5
# A token has fewer letters, so it has fewer beginnings.
_BEGINNINGS = 64


class Compiled:
    """A grammar for one vocabulary, at the beginning of a text. May be shared between threads.

    error  why llguidance refuses it, in its words; "": it does not
    spent  what its texts share has met a limit: who begins another text had better compile it again
    """

    def __init__(self, vocabulary: LLTokenizer, source: str) -> None:
        self._vocabulary, self.source = vocabulary, source
        self.spent = False
        began = time.thread_time()
        self._state = self._compile()
        self._seconds = time.thread_time() - began
        self.error = self._state.get_error()

    def begin(self) -> LLMatcher:
        """A state of one's own. It shares what its lexer has learnt with all others that began here."""
        return self._state.deep_copy()

    def begin_anew(self) -> LLMatcher:
        """A state of one's own that shares nothing with those that began before: limits count what all of them use.

        Where it took long to compile, it shares what they share, and the grammar is spent.
        """
        if self._seconds <= _RENEWED_SECONDS:
            self._state = self._compile()
        else:
            self.spent = True
        return self.begin()

    def longest(self, tokens: Sequence[int]) -> int | None:
        """The token whose text begins with those of all others; None: there is none."""
        texts = [self._vocabulary.decode_bytes([token]) for token in tokens]
        longest = max(texts, key=len)
        return tokens[texts.index(longest)] if all(map(longest.startswith, texts)) else None

    def spelt(self, tokens: list[int]) -> list[int]:
        """Tokens for the same text, as a model would rather choose them."""
        if len(tokens) < 2 or any(map(self._vocabulary.is_special_token, tokens)):
            return tokens
        text = self._vocabulary.decode_bytes(tokens)
        others = self._vocabulary.tokenize_bytes(text)
        return others if self._vocabulary.decode_bytes(others) == text else tokens

    def _compile(self) -> LLMatcher:
        grammar = LLMatcher.grammar_from_lark(self.source + UNFORCED)
        return LLMatcher(self._vocabulary, grammar, limits=LIMITS, log_level=SILENT)


class Matcher:
    """Follows one text. Belongs to whoever draws its tokens.

    size   tokens of the vocabulary that masks are for
    error  what went wrong where it was last asked for a mask, in llguidance's words; "": nothing
    """

    def __init__(self, compiled: Compiled, size: int) -> None:
        self._compiled, self._size, self._nothing = compiled, size, bits_of((), size)
        self._state = compiled.begin()
        self._said: list[int] = []
        # What the state has taken behind the text.
        self._ahead: list[int] = []
        # Where it began anew, in tokens of the text; and the guesses behind which a limit was met.
        self._renewed = -_OWN_TOKENS
        self._limit: tuple[int, ...] | None = None
        self.error, self._excess = "", 0.0

    def append(self, token: int) -> None:
        """The text goes on with a token."""
        if self._ahead[:1] != [token]:
            with self._watched():
                self._go((token,))
        del self._ahead[:1]
        self._said.append(token)
        self._limit = None

    def allowed(self, guessed: Sequence[int]) -> Tensor | None:
        """Which tokens may come behind the text and `guessed` [size]; None where the grammar forbids the guesses."""
        bits = self.bits(guessed)
        return None if bits is None else torch.from_numpy(unpacked(bits, self._size))

    def bits(self, guessed: Sequence[int]) -> bytes | None:
        """The same as a set with one bit a token (bitmask.py), of at least `size` tokens.

        None at all where a limit is met. It must not be somebody else's use of the grammar that meets it, so that is
        tried with a grammar of its own first.
        """
        if self._slow or (self._limit is not None and tuple(guessed[: len(self._limit)]) == self._limit):
            self.error = TOO_SLOW if self._slow else self.error
            return self._nothing
        with self._watched():
            mask = self._mask(guessed)
            if self.error and len(self._said) - self._renewed >= _OWN_TOKENS:
                self._restart()
                mask = self._mask(guessed)
            if self.error:
                # Whatever lies behind these guesses meets it too, and to find that out would cost as much again.
                self._limit = tuple(guessed)
                self._restart()
                return self._nothing
        return mask

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens of the text that comes next, where it looks as if there were only one.

        llguidance's own are not asked for, since it may find them without end (`UNFORCED`).
        """
        found: list[int] = []
        with self._watched():
            while not self._slow and len(found) < most and (token := self._only(found)) is not None:
                found.append(token)
        return self._compiled.spelt(found)

    def _only(self, guessed: Sequence[int]) -> int | None:
        """The longest of the tokens that may come next, where all others are how it begins; None: they are not."""
        mask = self._mask(guessed)
        if mask is None or self.error or self._state.is_accepting():
            return None
        tokens = np.flatnonzero(unpacked(mask, self._size))
        return self._compiled.longest(tokens.tolist()) if 0 < len(tokens) <= _BEGINNINGS else None

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """See that this text does not hold up all others."""
        began = time.thread_time()
        yield
        self._excess += max(time.thread_time() - began - _STEP_SECONDS, 0.0)

    @property
    def _slow(self) -> bool:
        return self._excess > _EXCESS_SECONDS

    def _mask(self, guessed: Sequence[int]) -> bytes | None:
        mask = self._state.compute_bitmask() if self._go(guessed) else None
        self.error = self._state.get_error()
        return mask

    def _go(self, guessed: Sequence[int]) -> bool:
        """Stand behind the text and so much of `guessed` as the grammar allows; whether that is all."""
        if self._slow:
            return False
        wanted = list(guessed)
        common = common_prefix(self._ahead, wanted)
        if common < len(self._ahead):
            self._state.rollback(len(self._ahead) - common)
            # llguidance keeps its latest mask, and would give it for other guesses that leave its lexer as these did.
            self._state.compute_bitmask()
        taken = self._state.try_consume_tokens(wanted[common:])
        self._ahead = wanted[: common + taken]
        return len(self._ahead) == len(wanted)

    def _restart(self) -> None:
        """An error is for ever: begin anew, and read the text again."""
        self._renewed = len(self._said)
        self._state = self._compiled.begin_anew()
        self._state.try_consume_tokens(self._said)
        self._ahead = []
