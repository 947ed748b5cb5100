"""Where a text ends that is to end with the first match of a regular expression.

The expressions become one automaton (llguidance's, without backtracking): each byte costs microseconds, whatever they
are, and its states are bounded. So the end is a function of the text, however it comes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from engine.errors import InvalidRequest
from engine.grammar import LIMITS, SILENT


class Pattern:
    """Follows one text. Raises InvalidRequest for what is no regular expression, or matches the empty text.

    fault  why it cannot be followed any more: it would take too many states; "": it can
    """

    def __init__(self, expressions: Sequence[str]) -> None:
        either = "|".join(f"(?:{expression})" for expression in expressions)
        self._matcher: LLMatcher | None = _matcher(f"(?s:.)*({either})") if expressions else None
        self.fault = ""
        if self._matcher is not None and self._matcher.is_accepting():
            raise InvalidRequest("stop_regex", "it matches the empty text, which stands everywhere")

    def push(self, text: str) -> int | None:
        """More of the text: the letters up to the end of the first match, if one is complete."""
        if self._matcher is None or self.fault:
            return None
        for at, letter in enumerate(text):
            for byte in letter.encode():
                if not self._matcher.consume_token(byte):
                    self.fault = "'stop_regex' has too many states to be followed in this text"
                    return None
            if self._matcher.is_accepting():
                return at + 1
        return None


def _matcher(expression: str) -> LLMatcher:
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_regex(expression), limits=LIMITS, log_level=SILENT)
    if error := matcher.get_error():
        _, _, wrong = error.partition("error: ")
        reason = (wrong or error).strip().splitlines()[0][:200]
        raise InvalidRequest("stop_regex", f"it is no regular expression that can be followed: {reason}")
    return matcher


@functools.lru_cache(1)
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")
