"""Where a text ends that is to end with the first match of a regular expression.

The expressions become one automaton (llguidance's, without backtracking): each byte costs microseconds, whatever they
are, and its states are bounded. So the end is a function of the text, however it comes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from engine.errors import InvalidRequest
from engine.grammar.sandbox import LIMITS, LOG_LEVEL

# Letters of an expression that an error shows.
_MAX_SHOWN_CHARACTERS = 80


class StopRegex:
    """Follows one text. Raises InvalidRequest for what cannot be followed, or matches the empty text.

    error  why it cannot be followed any more: it would take too many states; "": it can
    """

    def __init__(self, expressions: Sequence[str]) -> None:
        either = "|".join(f"(?:{expression})" for expression in expressions)
        self._matcher: LLMatcher | None = _matcher(_unanchored(either)) if expressions else None
        self.error = ""
        if self._matcher is not None and self._matcher.is_accepting():
            raise InvalidRequest("stop_regex", "it matches the empty text, which stands everywhere")

    def push(self, text: str) -> int | None:
        """More of the text: the letters up to the end of the first match, if one is complete."""
        if self._matcher is None or self.error:
            return None
        for at, letter in enumerate(text):
            for byte in letter.encode():
                if not self._matcher.consume_token(byte):
                    self.error = "'stop_regex' has too many states to be followed in this text"
                    return None
            if self._matcher.is_accepting():
                return at + 1
        return None


def check_stop_regex(expressions: Sequence[str]) -> None:
    """Raise InvalidRequest for the first that is no regular expression by itself, or for all that cannot be followed.

    It takes up to a tenth of a second, so it is not for the engine's thread.
    """
    for expression in expressions:
        if reason := _error_message(_compiled(expression)) or _error_message(_compiled(_unanchored(expression))):
            shown = (
                expression if len(expression) <= _MAX_SHOWN_CHARACTERS else f"{expression[:_MAX_SHOWN_CHARACTERS]}..."
            )
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
        return LLMatcher(
            _byte_tokenizer(), LLMatcher.grammar_from_regex(expression), limits=LIMITS, log_level=LOG_LEVEL
        )
    except UnicodeEncodeError as error:
        raise InvalidRequest("stop_regex", "it holds half of a surrogate pair, which is no character") from error


def _error_message(matcher: LLMatcher) -> str:
    """What llguidance has against an expression, without the expression; "": nothing."""
    _, _, wrong = matcher.get_error().rpartition("(in regex): ")
    return wrong.split("error: ")[-1].partition(" in regex /")[0].strip().split("\n")[0][:200]


@functools.lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
