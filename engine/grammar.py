"""The state of a grammar along one text: which tokens may come next, also behind tokens that are only guessed.

llguidance walks the grammar. To go back costs it a microsecond, a copy 35 of them for every 1,000 tokens of the text
(measured), so one matcher serves all rows of a sequence: it goes to where it is asked about.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from engine.prefix import common_prefix

# A lexer's state has 1 to 2 kB. Of a grammar only a few hundred are ever met, unless it is made to have many. The rest
# are llguidance's defaults: each bounds a compile or a mask to some tens of milliseconds.
LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    # Less than the default, which lets nested repetitions compute for seconds.
    initial_lexer_fuel=400_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
SILENT = 0
# A limit that is met so few tokens after a new beginning was met by this text alone.
_OWN_TOKENS = 32


class Compiled:
    """A grammar for one vocabulary, at the beginning of a text. May be shared between threads.

    error  why llguidance refuses it, in its words; "": it does not
    """

    def __init__(self, vocabulary: LLTokenizer, source: str) -> None:
        self._vocabulary, self.source = vocabulary, source
        self._state = self._compile()
        self.error = self._state.get_error()

    def begin(self) -> LLMatcher:
        """A state of one's own. It shares what its lexer has learnt with all others that began here."""
        return self._state.deep_copy()

    def begin_anew(self) -> LLMatcher:
        """A state of one's own that shares nothing with those that began before: limits count what all of them use."""
        self._state = self._compile()
        return self._state.deep_copy()

    def _compile(self) -> LLMatcher:
        grammar = LLMatcher.grammar_from_lark(self.source)
        return LLMatcher(self._vocabulary, grammar, limits=LIMITS, log_level=SILENT)


class Matcher:
    """Follows one text. Belongs to whoever draws its tokens.

    size   tokens of the vocabulary that masks are for
    error  what went wrong where it was last asked for a mask, in llguidance's words; "": nothing
    """

    def __init__(self, compiled: Compiled, size: int) -> None:
        self._compiled, self._size = compiled, size
        self._state = compiled.begin()
        self._said: list[int] = []
        # What the state has taken behind the text.
        self._ahead: list[int] = []
        # Where it began anew, in tokens of the text; and the guesses behind which a limit was met.
        self._renewed = -_OWN_TOKENS
        self._limit: tuple[int, ...] | None = None
        self.error = ""

    def append(self, token: int) -> None:
        """The text goes on with a token."""
        if self._ahead[:1] != [token]:
            self._go((token,))
        del self._ahead[:1]
        self._said.append(token)
        self._limit = None

    def allowed(self, guessed: Sequence[int]) -> Tensor | None:
        """Which tokens may come behind the text and `guessed` [size]; None where the grammar forbids the guesses.

        None at all where a limit is met. It must not be somebody else's use of the grammar that meets it, so that is
        tried with a grammar of its own first.
        """
        if self._limit is not None and tuple(guessed[: len(self._limit)]) == self._limit:
            return torch.zeros(self._size, dtype=torch.bool)
        mask = self._mask(guessed)
        self.error = self._state.get_error()
        if self.error and len(self._said) - self._renewed >= _OWN_TOKENS:
            self._restart()
            mask = self._mask(guessed)
            self.error = self._state.get_error()
        if self.error:
            # Whatever lies behind these guesses meets it too, and to find that out would cost as much again.
            self._limit = tuple(guessed)
            self._restart()
            return torch.zeros(self._size, dtype=torch.bool)
        return None if mask is None else _unpacked(mask, self._size)

    def forced(self) -> list[int]:
        """Tokens of the only text that may come next, as far as there is only one."""
        return list(self._state.compute_ff_tokens()) if self._go(()) else []

    def _mask(self, guessed: Sequence[int]) -> bytes | None:
        return self._state.compute_bitmask() if self._go(guessed) else None

    def _go(self, guessed: Sequence[int]) -> bool:
        """Stand behind the text and so much of `guessed` as the grammar allows; whether that is all."""
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


def _unpacked(mask: bytes, size: int) -> Tensor:
    """A mask of one bit a token as one truth value a token."""
    return torch.from_numpy(np.unpackbits(np.frombuffer(mask, np.uint8), count=size, bitorder="little").view(np.bool_))
