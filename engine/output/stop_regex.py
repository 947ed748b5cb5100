"""Stop expressions: a text ends with the first match of a regular expression.

All expressions become one automaton (llguidance's, without backtracking): a byte takes microseconds, the number of
states is bounded, and the end does not depend on how the text is cut into deltas.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from engine.errors import InvalidRequest
from engine.grammar.sandbox import LIMITS, LOG_LEVEL

# Characters of an expression in an error message.
_MAX_SHOWN_CHARACTERS = 80


class StopRegex:
    """The matcher of one text. Raises InvalidRequest for expressions that are too complex or match the empty text.

    error  why the matcher stopped (too many states); "" while it works
    """

    def __init__(self, expressions: Sequence[str]) -> None:
        either = "|".join(f"(?:{expression})" for expression in expressions)
        self._matcher: LLMatcher | None = _matcher(_unanchored(either)) if expressions else None
        self.error = ""
        if self._matcher is not None and self._matcher.is_accepting():
            raise InvalidRequest("stop_regex", "it matches the empty text")

    def push(self, text: str, *, ignoring_matches: bool = False) -> int | None:
        """Add text; the number of its characters up to the end of the first match, None without a match.

        ignoring_matches  matches that end in this text do not count
        """
        if self._matcher is None or self.error:
            return None
        for index, character in enumerate(text):
            for byte in character.encode():
                if not self._matcher.consume_token(byte):
                    self.error = "'stop_regex' has too many states for this text"
                    return None
            if not ignoring_matches and self._matcher.is_accepting():
                return index + 1
        return None


def check_stop_regex(expressions: Sequence[str]) -> None:
    """Raise InvalidRequest for the first invalid expression, or if all together are too complex.

    Takes up to 0.1 s: call it outside the engine thread.
    """
    for expression in expressions:
        if reason := _error_message(_compiled(expression)) or _error_message(_compiled(_unanchored(expression))):
            fits = len(expression) <= _MAX_SHOWN_CHARACTERS
            shown = expression if fits else f"{expression[:_MAX_SHOWN_CHARACTERS]}..."
            raise InvalidRequest("stop_regex", f"'{shown}' cannot be followed: {reason}")
    StopRegex(expressions)


def _unanchored(expression: str) -> str:
    return f"(?s:.)*({expression})"


def _matcher(expression: str) -> LLMatcher:
    matcher = _compiled(expression)
    if reason := _error_message(matcher):
        raise InvalidRequest("stop_regex", f"the expressions cannot be followed together: {reason}")
    return matcher


def _compiled(expression: str) -> LLMatcher:
    try:
        grammar = LLMatcher.grammar_from_regex(expression)
        return LLMatcher(_byte_tokenizer(), grammar, limits=LIMITS, log_level=LOG_LEVEL)
    except UnicodeEncodeError as error:
        raise InvalidRequest("stop_regex", "it contains half of a surrogate pair, which is no character") from error


def _error_message(matcher: LLMatcher) -> str:
    """llguidance's error without the expression; "" if there is none."""
    _, _, error = matcher.get_error().rpartition("(in regex): ")
    return error.split("error: ")[-1].partition(" in regex /")[0].strip().split("\n")[0][:200]


@functools.lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
