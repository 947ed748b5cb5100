"""JSON as a model writes it, passed on piece by piece as far as it is valid (RFC 8259)."""

from __future__ import annotations

import json
import re

from engine.dialect.source import SPACE, Emit, Source, Steps

_LETTERS = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = re.compile(r"[\x00-\x1f]+")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_CLOSING = {"{": "}", "[": "]"}


def read_json(source: Source, emit: Emit) -> Steps[bool]:
    """Pass one JSON value on to `emit`, as it comes; whether it was whole and valid.

    Where it is not, the source stands before the first letter that is wrong. Line breaks and other control characters
    in strings, which JSON forbids and models write, are passed on as escapes.
    """
    open_: list[str] = []
    while True:
        yield from source.run(SPACE, emit)
        first = yield from source.peek()
        if first in _CLOSING:
            emit((yield from source.take(1)))
            yield from source.run(SPACE, emit)
            open_.append(_CLOSING[first])
            if not (yield from source.accept(open_[-1])):
                if first == "{" and not (yield from _key(source, emit)):
                    return False
                continue
            emit(open_.pop())
        elif not (yield from (_string(source, emit) if first == '"' else _scalar(source, emit))):
            return False
        more = yield from _behind(source, emit, open_)
        if not more:
            return more is not None


def _behind(source: Source, emit: Emit, open_: list[str]) -> Steps[bool | None]:
    """What follows a value: whether another one does; None: neither that nor the end."""
    while open_:
        yield from source.run(SPACE, emit)
        if (yield from source.accept(open_[-1])):
            emit(open_.pop())
        elif (yield from source.accept(",")):
            emit(",")
            yield from source.run(SPACE, emit)
            return True if open_[-1] == "]" or (yield from _key(source, emit)) else None
        else:
            return None
    return False


def _key(source: Source, emit: Emit) -> Steps[bool]:
    if (yield from source.peek()) != '"' or not (yield from _string(source, emit)):
        return False
    yield from source.run(SPACE, emit)
    if not (yield from source.accept(":")):
        return False
    emit(":")
    return True


def _string(source: Source, emit: Emit) -> Steps[bool]:
    emit((yield from source.take(1)))
    while True:
        yield from source.run(_LETTERS, emit)
        following = yield from source.peek()
        if following == '"':
            emit((yield from source.take(1)))
            return True
        if following == "\\":
            if not (yield from _escape(source, emit)):
                return False
        elif not following:
            return False
        else:
            yield from source.run(_CONTROL, lambda text: emit(json.dumps(text)[1:-1]))


def _escape(source: Source, emit: Emit) -> Steps[bool]:
    text = yield from source.take(2)
    if text == "\\u":
        text += yield from source.take(4)
    emit(text)
    return _ESCAPE.fullmatch(text) is not None


def _scalar(source: Source, emit: Emit) -> Steps[bool]:
    word = yield from source.run(_WORD)
    emit(word)
    return _SCALAR.fullmatch(word) is not None


def quoted(text: str) -> str:
    """A text as the inside of a JSON string; joined pieces are what the joined text gives."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
