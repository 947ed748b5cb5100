"""The one text of a custom tool's call: formats carry it as `{"input": text}`, and clients get the text itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from engine.chat_format.message import INPUT_FIELD
from engine.chat_format.source import Emit, Steps, TextSource

_LETTERS = re.compile(r'[^"\\]+')
_ALL = re.compile(r"(?s:.)+")
_HIGH = re.compile(r"\\u[dD][89abAB]..")


class ToolInputDecoder:
    """Reads the arguments of one call as they come; how they are cut does not change the text.

    Arguments of another shape are the text themselves.
    """

    def __init__(self) -> None:
        self._decoded: list[str] = []
        self._source = TextSource()
        self._steps = _decode(self._source, self._decoded.append)

    def push(self, arguments: str) -> str:
        """More of the arguments; what they add to the text."""
        self._source.push(arguments)
        return self._next()

    def finish(self) -> str:
        """The arguments are over; what was still held back."""
        self._source.end()
        return self._next()

    def _next(self) -> str:
        next(self._steps, None)
        text = "".join(self._decoded)
        self._decoded.clear()
        return text


def _decode(source: TextSource, emit: Callable[[str], None]) -> Steps[None]:
    if not (yield from source.attempt(source.expect("", "{", json.dumps(INPUT_FIELD), ":", '"'))):
        yield from source.match(_ALL, emit)
        return
    while True:
        yield from source.match(_LETTERS, emit)
        if (yield from source.peek()) != "\\":
            # The quote, and whatever stands behind it.
            yield from source.match(_ALL, lambda _: None)
            return
        yield from _escape(source, emit)


def _escape(source: TextSource, emit: Emit) -> Steps[None]:
    """One escape, or the two of a character that takes two. Half of one, where the text was cut, is nothing."""
    text = yield from source.take(2)
    if text == "\\u":
        text += yield from source.take(4)
    if _HIGH.fullmatch(text) and (yield from source.accept("\\u")):
        text += "\\u" + (yield from source.take(4))
    try:
        emit(json.loads(f'"{text}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except ValueError:
        return
