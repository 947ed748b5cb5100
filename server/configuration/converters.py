"""Options with text that is more than a plain value: counts and sizes with a unit, lists of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cyclopts import Token


def split_keys(text: str) -> tuple[str, ...]:
    """The keys of a list separated by commas or lines."""
    return tuple(key for part in text.splitlines() for key in (piece.strip() for piece in part.split(",")) if key)


def convert_keys(_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    """The keys of all lists."""
    return tuple(key for token in tokens for key in split_keys(token.value))


def parse_by(parse: Callable[[str], object]) -> Callable[[object, Sequence[Token]], object]:
    """A converter of one text. It raises the ValueError of `parse`."""
    return lambda _, tokens: parse(tokens[0].value)
