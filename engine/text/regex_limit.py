"""Regular expressions of a tokenizer that backtrack: limits of the tokenizers library as errors of a request or a load.

The library matches the expressions of tokenizer.json with Oniguruma and panics at its limit of 10,000,000 retries,
0.4 s after the start of a match.
"""

from __future__ import annotations

import string
import time
from types import TracebackType
from typing import Any

from engine.errors import InvalidRequest

REASON = "the tokenizer of this model cannot split this text: a regular expression of it backtracks too often"
# Each is repeated, followed by another character: the usual text on which an expression backtracks.
_PROBE_CHARACTERS = string.printable + "é中"
_PROBE_LENGTH = 32
# Processor time of all probes, which take 2 ms with the expressions of published models.
_MAX_PROBE_SECONDS = 2.0


class RegexLimit:
    """Raises InvalidRequest for a field in place of a panic of the library. Used in `with`."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No Exception, and no module has it: only its name tells it apart.
        if kind is not None and kind.__name__ == "PanicException":
            raise InvalidRequest(self._field, REASON) from error


def check_repetitions(tokenizer: Any) -> None:
    """Raise InvalidRequest for a tokenizer that needs too long for a short text of one repeated character.

    A long text of several such parts, each below the limit of retries, would take minutes.
    """
    if not getattr(tokenizer, "is_fast", False):
        return
    began = time.thread_time()
    with RegexLimit("prompt"):
        for character in _PROBE_CHARACTERS:
            for end in ("", "!", "a"):
                tokenizer.backend_tokenizer.encode(character * _PROBE_LENGTH + end)
                if time.thread_time() - began > _MAX_PROBE_SECONDS:
                    raise InvalidRequest("prompt", REASON)
