"""Streams JSON as a model writes it, up to the first invalid character (RFC 8259)."""

from __future__ import annotations

import json
import re
from typing import Protocol

from engine.chat_format.source import SPACE, Emit, Parser, TextSource

_UNESCAPED = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = re.compile(r"[\x00-\x1f]+")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_CLOSING = {"{": "}", "[": "]"}


class JsonSyntax(Protocol):
    """Syntax of strings and keys in a JSON-like notation; both are emitted as JSON."""

    @property
    def quote(self) -> str:
        """The opening quote of strings."""
        ...

    def key(self, source: TextSource, emit: Emit) -> Parser[bool]:
        """Parse the key of a member; whether there was one."""
        ...

    def string(self, source: TextSource, emit: Emit) -> Parser[bool]:
        """Parse a string; whether it was complete."""
        ...


class StrictJsonSyntax:
    """JSON itself."""

    quote = '"'

    def key(self, source: TextSource, emit: Emit) -> Parser[bool]:
        return (yield from source.peek()) == self.quote and (yield from self.string(source, emit))

    def string(self, source: TextSource, emit: Emit) -> Parser[bool]:
        """A string with its control characters escaped."""
        emit((yield from source.take(1)))
        while True:
            yield from source.match(_UNESCAPED, emit)
            next_character = yield from source.peek()
            if next_character == self.quote:
                emit((yield from source.take(1)))
                return True
            if next_character == "\\":
                if not (yield from _escape(source, emit)):
                    return False
            elif not next_character:
                return False
            else:
                yield from source.match(_CONTROL, lambda text: emit(json_escaped(text)))


_STRICT_JSON = StrictJsonSyntax()


def stream_json(source: TextSource, emit: Emit, syntax: JsonSyntax = _STRICT_JSON) -> Parser[bool]:
    """Emit one JSON value while it is parsed; whether it was complete and valid.

    After an invalid value, the source is at its first invalid character. Line breaks and other control characters in
    strings, which models write although JSON forbids them, are emitted as escapes.
    """
    closing_brackets: list[str] = []
    while True:
        yield from source.match(SPACE, emit)
        first = yield from source.peek()
        if first in _CLOSING:
            emit((yield from source.take(1)))
            yield from source.match(SPACE, emit)
            closing_brackets.append(_CLOSING[first])
            if not (yield from source.accept(closing_brackets[-1])):
                if first == "{" and not (yield from _key(source, emit, syntax)):
                    return False
                continue
            emit(closing_brackets.pop())
        elif not (yield from (syntax.string if syntax.quote.startswith(first or " ") else _scalar)(source, emit)):
            return False
        more = yield from _after_value(source, emit, closing_brackets, syntax)
        if not more:
            return more is not None


def _after_value(
    source: TextSource, emit: Emit, closing_brackets: list[str], syntax: JsonSyntax
) -> Parser[bool | None]:
    """Parse what follows a value: True: another value; False: the end; None: invalid."""
    while closing_brackets:
        yield from source.match(SPACE, emit)
        if (yield from source.accept(closing_brackets[-1])):
            emit(closing_brackets.pop())
        elif (yield from source.accept(",")):
            emit(",")
            yield from source.match(SPACE, emit)
            return True if closing_brackets[-1] == "]" or (yield from _key(source, emit, syntax)) else None
        else:
            return None
    return False


def _key(source: TextSource, emit: Emit, syntax: JsonSyntax) -> Parser[bool]:
    if not (yield from syntax.key(source, emit)):
        return False
    yield from source.match(SPACE, emit)
    if not (yield from source.accept(":")):
        return False
    emit(":")
    return True


def _escape(source: TextSource, emit: Emit) -> Parser[bool]:
    text = yield from source.take(2)
    if text == "\\u":
        text += yield from source.take(4)
    emit(text)
    return _ESCAPE.fullmatch(text) is not None


def _scalar(source: TextSource, emit: Emit) -> Parser[bool]:
    word = yield from source.match(_WORD)
    emit(word)
    return _SCALAR.fullmatch(word) is not None


def json_escaped(text: str) -> str:
    """The inside of a JSON string for `text`; escaped parts may be concatenated."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
