"""Token masks of a grammar along one text, also after draft tokens.

Based on llguidance. A rollback takes a microsecond, a copy 35 for each 1,000 tokens of text (measured), so one matcher
moves between the positions of a draft.
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

# A limit that is exceeded within this many tokens after a restart was exceeded by this text alone.
_RESTART_INTERVAL_TOKENS = 32
# Processor time: grammars that compile faster are recompiled on the engine thread.
_RECOMPILE_SECONDS = 0.05
# Processor time of one operation, and the sum of excess times after which the text fails.
_STEP_SECONDS, _MAX_EXCESS_SECONDS = 0.1, 0.5
# Tokens that can be prefixes of one token: no token has as many characters.
_MAX_PREFIX_TOKENS = 64


class CompiledGrammar:
    """A grammar for one vocabulary, at the start of a text. May be shared between threads.

    error      of llguidance, or ""
    exhausted  whether the lexer that its texts share exceeded a limit: it should be recompiled for other texts
    """

    def __init__(self, vocabulary: LLTokenizer, source: str) -> None:
        self._vocabulary, self.source = vocabulary, source
        self.exhausted = False
        began = time.thread_time()
        self._state = self._compile()
        self._compile_seconds = time.thread_time() - began
        self.error = self._state.get_error()

    def new_state(self) -> LLMatcher:
        """A state at the start of a text; all states of the grammar share the lexer."""
        return self._state.deep_copy()

    def new_isolated_state(self) -> LLMatcher:
        """A state with a new lexer: the limits of llguidance count all states of a lexer.

        A grammar that compiles slowly keeps its lexer and becomes `exhausted`.
        """
        if self._compile_seconds <= _RECOMPILE_SECONDS:
            self._state = self._compile()
        else:
            self.exhausted = True
        return self.new_state()

    def covering_token(self, tokens: Sequence[int]) -> int | None:
        """The token that has the texts of all others as prefixes, if there is one."""
        texts = [self._vocabulary.decode_bytes([token]) for token in tokens]
        longest = max(texts, key=len)
        return tokens[texts.index(longest)] if all(map(longest.startswith, texts)) else None

    def retokenize(self, tokens: list[int]) -> list[int]:
        """The canonical tokens of the same text."""
        if len(tokens) < 2 or any(map(self._vocabulary.is_special_token, tokens)):
            return tokens
        text = self._vocabulary.decode_bytes(tokens)
        canonical = self._vocabulary.tokenize_bytes(text)
        return canonical if self._vocabulary.decode_bytes(canonical) == text else tokens

    def _compile(self) -> LLMatcher:
        grammar = LLMatcher.grammar_from_lark(self.source + NO_FORCING)
        return LLMatcher(self._vocabulary, grammar, limits=LIMITS, log_level=LOG_LEVEL)


class GrammarMatcher:
    """Matches one text. Belongs to the thread that samples its tokens.

    vocabulary_size  length of the masks
    error            of llguidance for the last mask, or ""
    matches          whether the grammar permits the text, as far as its limits let it be followed
    """

    def __init__(self, compiled: CompiledGrammar, vocabulary_size: int) -> None:
        self._compiled, self._vocabulary_size, self._empty_mask = compiled, vocabulary_size, pack((), vocabulary_size)
        self._state = compiled.new_state()
        self._tokens: list[int] = []
        # Tokens after the text that the state has consumed.
        self._lookahead: list[int] = []
        # Length of the text at the last restart, and the draft that exceeded a limit.
        self._restarted_at = -_RESTART_INTERVAL_TOKENS
        self._rejected_draft: tuple[int, ...] | None = None
        self.error, self._excess_seconds = "", 0.0
        self.matches = True

    def append(self, token: int) -> None:
        """Add a token to the text."""
        if self._lookahead[:1] != [token]:
            with self._measure_time():
                if not self._move_to((token,)) and not self._is_too_slow and not self._state.get_error():
                    self.matches = False
        del self._lookahead[:1]
        self._tokens.append(token)
        self._rejected_draft = None

    def allowed_mask(self, draft: Sequence[int]) -> Tensor | None:
        """A boolean mask of the tokens permitted after the text and a draft; None for a draft that does not match."""
        bits = self.allowed_bits(draft)
        return None if bits is None else torch.from_numpy(unpack(bits, self._vocabulary_size))

    def allowed_bits(self, draft: Sequence[int]) -> bytes | None:
        """The same as a bitmask (bitmask.py), of `vocabulary_size` bits or more.

        No token is permitted after an exceeded limit. Other texts may have used up the limits of the shared lexer, so
        the mask is computed again with a new one first.
        """
        if self._is_too_slow or self._was_rejected(draft):
            self.error = STEP_LIMIT_EXCEEDED if self._is_too_slow else self.error
            return self._empty_mask
        with self._measure_time():
            mask = self._compute_mask(draft)
            if self.error and len(self._tokens) - self._restarted_at >= _RESTART_INTERVAL_TOKENS:
                self._restart()
                mask = self._compute_mask(draft)
            if self.error:
                # Longer drafts would exceed it too, at the same cost.
                self._rejected_draft = tuple(draft)
                self._restart()
                return self._empty_mask
        return mask

    def forced_tokens(self, limit: int) -> list[int]:
        """Up to `limit` next tokens, while the grammar permits only one text.

        llguidance's own forced tokens are switched off, since it computes all of them, without a limit (`NO_FORCING`).
        """
        forced: list[int] = []
        with self._measure_time():
            while not self._is_too_slow and len(forced) < limit and (token := self._only_token(forced)) is not None:
                forced.append(token)
        return self._compiled.retokenize(forced)

    def _was_rejected(self, draft: Sequence[int]) -> bool:
        rejected = self._rejected_draft
        return rejected is not None and tuple(draft[: len(rejected)]) == rejected

    def _only_token(self, draft: Sequence[int]) -> int | None:
        """The longest permitted token, if all other permitted ones are prefixes of it."""
        mask = self._compute_mask(draft)
        if mask is None or self.error or self._state.is_accepting():
            return None
        tokens = np.flatnonzero(unpack(mask, self._vocabulary_size))
        return self._compiled.covering_token(tokens.tolist()) if 0 < len(tokens) <= _MAX_PREFIX_TOKENS else None

    @contextmanager
    def _measure_time(self) -> Iterator[None]:
        """Add the processor time beyond the limit of one operation to the excess time."""
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
        """Move the state after the text and the matching part of a draft; whether all of it matches."""
        if self._is_too_slow:
            return False
        target = list(draft)
        common = common_prefix_length(self._lookahead, target)
        if common < len(self._lookahead):
            self._state.rollback(len(self._lookahead) - common)
            # llguidance caches its last mask by the state of the lexer, and would return it for another draft.
            self._state.compute_bitmask()
        consumed = self._state.try_consume_tokens(target[common:])
        self._lookahead = target[: common + consumed]
        return len(self._lookahead) == len(target)

    def _restart(self) -> None:
        """Replace the state (its error is permanent) and consume the text again."""
        self._restarted_at = len(self._tokens)
        self._state = self._compiled.new_isolated_state()
        self._state.try_consume_tokens(self._tokens)
        self._lookahead = []
