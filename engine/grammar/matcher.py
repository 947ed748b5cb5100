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

from engine.grammar.bitmask import pack, unpack
from engine.grammar.sandbox import LIMITS, LOG_LEVEL, NO_FORCING, STEP_LIMIT_EXCEEDED
from engine.text.prefix import common_prefix_length

# A limit that is met so few tokens after a new beginning was met by this text alone.
_RESTART_INTERVAL_TOKENS = 32
# Of processor time. A grammar is compiled anew on the engine's thread only where that takes no longer.
_RECOMPILE_SECONDS = 0.05
# So long may a step of one text take; and so much longer may all its steps together, before it is given up.
_STEP_SECONDS, _MAX_EXCESS_SECONDS = 0.1, 0.5
# A token has fewer letters, so it has fewer beginnings.
_MAX_PREFIX_TOKENS = 64


class CompiledGrammar:
    """A grammar for one vocabulary, at the beginning of a text. May be shared between threads.

    error  why llguidance refuses it, in its words; "": it does not
    exhausted  what its texts share has met a limit: who begins another text had better compile it again
    """

    def __init__(self, vocabulary: LLTokenizer, source: str) -> None:
        self._vocabulary, self.source = vocabulary, source
        self.exhausted = False
        began = time.thread_time()
        self._state = self._compile()
        self._compile_seconds = time.thread_time() - began
        self.error = self._state.get_error()

    def new_state(self) -> LLMatcher:
        """A state of one's own. It shares what its lexer has learnt with all others that began here."""
        return self._state.deep_copy()

    def new_isolated_state(self) -> LLMatcher:
        """A state of one's own that shares nothing with those that began before: limits count what all of them use.

        Where it took long to compile, it shares what they share, and the grammar is spent.
        """
        if self._compile_seconds <= _RECOMPILE_SECONDS:
            self._state = self._compile()
        else:
            self.exhausted = True
        return self.new_state()

    def covering_token(self, tokens: Sequence[int]) -> int | None:
        """The token whose text begins with those of all others; None: there is none."""
        texts = [self._vocabulary.decode_bytes([token]) for token in tokens]
        longest = max(texts, key=len)
        return tokens[texts.index(longest)] if all(map(longest.startswith, texts)) else None

    def retokenize(self, tokens: list[int]) -> list[int]:
        """Tokens for the same text, as a model would rather choose them."""
        if len(tokens) < 2 or any(map(self._vocabulary.is_special_token, tokens)):
            return tokens
        text = self._vocabulary.decode_bytes(tokens)
        others = self._vocabulary.tokenize_bytes(text)
        return others if self._vocabulary.decode_bytes(others) == text else tokens

    def _compile(self) -> LLMatcher:
        grammar = LLMatcher.grammar_from_lark(self.source + NO_FORCING)
        return LLMatcher(self._vocabulary, grammar, limits=LIMITS, log_level=LOG_LEVEL)


class GrammarMatcher:
    """Follows one text. Belongs to whoever draws its tokens.

    size   tokens of the vocabulary that masks are for
    error  what went wrong where it was last asked for a mask, in llguidance's words; "": nothing
    """

    def __init__(self, compiled: CompiledGrammar, vocabulary_size: int) -> None:
        self._compiled, self._vocabulary_size, self._empty_mask = compiled, vocabulary_size, pack((), vocabulary_size)
        self._state = compiled.new_state()
        self._tokens: list[int] = []
        # What the state has taken behind the text.
        self._lookahead: list[int] = []
        # Where it began anew, in tokens of the text; and the guesses behind which a limit was met.
        self._restarted_at = -_RESTART_INTERVAL_TOKENS
        self._rejected_draft: tuple[int, ...] | None = None
        self.error, self._excess_seconds = "", 0.0

    def append(self, token: int) -> None:
        """The text goes on with a token."""
        if self._lookahead[:1] != [token]:
            with self._measure_time():
                self._move_to((token,))
        del self._lookahead[:1]
        self._tokens.append(token)
        self._rejected_draft = None

    def allowed_mask(self, draft: Sequence[int]) -> Tensor | None:
        """Which tokens may come behind the text and `draft` [size]; None where the grammar forbids the guesses."""
        bits = self.allowed_bits(draft)
        return None if bits is None else torch.from_numpy(unpack(bits, self._vocabulary_size))

    def allowed_bits(self, draft: Sequence[int]) -> bytes | None:
        """The same as a set with one bit a token (bitmask.py), of at least `size` tokens.

        None at all where a limit is met. It must not be somebody else's use of the grammar that meets it, so that is
        tried with a grammar of its own first.
        """
        if self._is_too_slow or (
            self._rejected_draft is not None and tuple(draft[: len(self._rejected_draft)]) == self._rejected_draft
        ):
            self.error = STEP_LIMIT_EXCEEDED if self._is_too_slow else self.error
            return self._empty_mask
        with self._measure_time():
            mask = self._compute_mask(draft)
            if self.error and len(self._tokens) - self._restarted_at >= _RESTART_INTERVAL_TOKENS:
                self._restart()
                mask = self._compute_mask(draft)
            if self.error:
                # Whatever lies behind these guesses meets it too, and to find that out would cost as much again.
                self._rejected_draft = tuple(draft)
                self._restart()
                return self._empty_mask
        return mask

    def forced_tokens(self, limit: int) -> list[int]:
        """Up to `limit` tokens of the text that comes next, where it looks as if there were only one.

        llguidance's own are not asked for, since it may find them without end (`NO_FORCING`).
        """
        found: list[int] = []
        with self._measure_time():
            while not self._is_too_slow and len(found) < limit and (token := self._only_token(found)) is not None:
                found.append(token)
        return self._compiled.retokenize(found)

    def _only_token(self, draft: Sequence[int]) -> int | None:
        """The longest of the tokens that may come next, where all others are how it begins; None: they are not."""
        mask = self._compute_mask(draft)
        if mask is None or self.error or self._state.is_accepting():
            return None
        tokens = np.flatnonzero(unpack(mask, self._vocabulary_size))
        return self._compiled.covering_token(tokens.tolist()) if 0 < len(tokens) <= _MAX_PREFIX_TOKENS else None

    @contextmanager
    def _measure_time(self) -> Iterator[None]:
        """See that this text does not hold up all others."""
        began = time.thread_time()
        yield
        self._excess_seconds += max(time.thread_time() - began - _STEP_SECONDS, 0.0)

    @property
    def _is_too_slow(self) -> bool:
        return self._excess_seconds > _MAX_EXCESS_SECONDS

    def _compute_mask(self, draft: Sequence[int]) -> bytes | None:
        mask = self._state.compute_bitmask() if self._move_to(draft) else None
        self.error = self._state.get_error()
        return mask

    def _move_to(self, draft: Sequence[int]) -> bool:
        """Stand behind the text and so much of `draft` as the grammar allows; whether that is all."""
        if self._is_too_slow:
            return False
        wanted = list(draft)
        common = common_prefix_length(self._lookahead, wanted)
        if common < len(self._lookahead):
            self._state.rollback(len(self._lookahead) - common)
            # llguidance keeps its latest mask, and would give it for other guesses that leave its lexer as these did.
            self._state.compute_bitmask()
        taken = self._state.try_consume_tokens(wanted[common:])
        self._lookahead = wanted[: common + taken]
        return len(self._lookahead) == len(wanted)

    def _restart(self) -> None:
        """An error is for ever: begin anew, and read the text again."""
        self._restarted_at = len(self._tokens)
        self._state = self._compiled.new_isolated_state()
        self._state.try_consume_tokens(self._tokens)
        self._lookahead = []
