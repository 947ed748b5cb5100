"""Text input of a custom tool call: models write `{"input": text}`, clients get the text itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from engine.chat_format.message import INPUT_FIELD
from engine.chat_format.source import Emit, Steps, TextSource

_UNESCAPED = re.compile(r'[^"\\]+')
_ALL = re.compile(r"(?s:.)+")
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]..")


class ToolInputDecoder:
    """Decodes the arguments of one call incrementally; the text does not depend on how they are chunked.

    Arguments of another shape are returned unchanged.
    """

    def __init__(self) -> None:
        self._decoded: list[str] = []
        self._source = TextSource()
        self._steps = _decode(self._source, self._decoded.append)

    def push(self, arguments: str) -> str:
        """Add arguments; the text that they complete."""
        self._source.push(arguments)
        return self._next()

    def finish(self) -> str:
        """End of the arguments; the remaining text."""
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
        yield from source.match(_UNESCAPED, emit)
        if (yield from source.peek()) != "\\":
            # The closing quote and everything after it.
            yield from source.match(_ALL, lambda _: None)
            return
        yield from _escape(source, emit)


def _escape(source: TextSource, emit: Emit) -> Steps[None]:
    """Decode one escape, or both of a surrogate pair; an incomplete escape is dropped."""
    text = yield from source.take(2)
    if text == "\\u":
        text += yield from source.take(4)
    if _HIGH_SURROGATE.fullmatch(text) and (yield from source.accept("\\u")):
        text += "\\u" + (yield from source.take(4))
    try:
        emit(json.loads(f'"{text}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except ValueError:
        return
