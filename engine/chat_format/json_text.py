"""JSON as a model writes it, passed on piece by piece as far as it is valid (RFC 8259)."""

from __future__ import annotations

import json
import re
from typing import Protocol

from engine.chat_format.source import SPACE, Emit, Steps, TextSource

_LETTERS = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = re.compile(r"[\x00-\x1f]+")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_CLOSING = {"{": "}", "[": "]"}


class JsonSyntax(Protocol):
    """How strings and keys are written where it is not quite JSON; both are passed on as JSON."""

    @property
    def quote(self) -> str:
        """What strings begin with."""
        ...

    def key(self, source: TextSource, emit: Emit) -> Steps[bool]:
        """Read the key of a member; whether it was one."""
        ...

    def string(self, source: TextSource, emit: Emit) -> Steps[bool]:
        """Read a string; whether it was whole."""
        ...


class StrictJsonSyntax:
    """JSON itself."""

    quote = '"'

    def key(self, source: TextSource, emit: Emit) -> Steps[bool]:
        """A string."""
        return (yield from source.peek()) == self.quote and (yield from self.string(source, emit))

    def string(self, source: TextSource, emit: Emit) -> Steps[bool]:
        """A string, its control characters escaped."""
        emit((yield from source.take(1)))
        while True:
            yield from source.match(_LETTERS, emit)
            following = yield from source.peek()
            if following == self.quote:
                emit((yield from source.take(1)))
                return True
            if following == "\\":
                if not (yield from _escape(source, emit)):
                    return False
            elif not following:
                return False
            else:
                yield from source.match(_CONTROL, lambda text: emit(json_escaped(text)))


_STRICT_JSON = StrictJsonSyntax()


def stream_json(source: TextSource, emit: Emit, syntax: JsonSyntax = _STRICT_JSON) -> Steps[bool]:
    """Pass one JSON value on to `emit`, as it comes; whether it was whole and valid.

    Where it is not, the source stands before the first letter that is wrong. Line breaks and other control characters
    in strings, which JSON forbids and models write, are passed on as escapes.
    """
    open_: list[str] = []
    while True:
        yield from source.match(SPACE, emit)
        first = yield from source.peek()
        if first in _CLOSING:
            emit((yield from source.take(1)))
            yield from source.match(SPACE, emit)
            open_.append(_CLOSING[first])
            if not (yield from source.accept(open_[-1])):
                if first == "{" and not (yield from _key(source, emit, syntax)):
                    return False
                continue
            emit(open_.pop())
        elif not (yield from (syntax.string if syntax.quote.startswith(first or " ") else _scalar)(source, emit)):
            return False
        more = yield from _after_value(source, emit, open_, syntax)
        if not more:
            return more is not None


def _after_value(source: TextSource, emit: Emit, open_: list[str], syntax: JsonSyntax) -> Steps[bool | None]:
    """What follows a value: whether another one does; None: neither that nor the end."""
    while open_:
        yield from source.match(SPACE, emit)
        if (yield from source.accept(open_[-1])):
            emit(open_.pop())
        elif (yield from source.accept(",")):
            emit(",")
            yield from source.match(SPACE, emit)
            return True if open_[-1] == "]" or (yield from _key(source, emit, syntax)) else None
        else:
            return None
    return False


def _key(source: TextSource, emit: Emit, syntax: JsonSyntax) -> Steps[bool]:
    if not (yield from syntax.key(source, emit)):
        return False
    yield from source.match(SPACE, emit)
    if not (yield from source.accept(":")):
        return False
    emit(":")
    return True


def _escape(source: TextSource, emit: Emit) -> Steps[bool]:
    text = yield from source.take(2)
    if text == "\\u":
        text += yield from source.take(4)
    emit(text)
    return _ESCAPE.fullmatch(text) is not None


def _scalar(source: TextSource, emit: Emit) -> Steps[bool]:
    word = yield from source.match(_WORD)
    emit(word)
    return _SCALAR.fullmatch(word) is not None


def json_escaped(text: str) -> str:
    """A text as the inside of a JSON string; joined pieces are what the joined text gives."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
