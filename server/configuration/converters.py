"""Options whose text is more than a plain value: counts and sizes with a unit, lists of keys."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import Token

from engine.config import parse_count, parse_size


def split_keys(text: str) -> tuple[str, ...]:
    """The keys of a list separated by commas or lines."""
    return tuple(key for part in text.splitlines() for key in (piece.strip() for piece in part.split(",")) if key)


def convert_keys(_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    """The keys of all lists."""
    return tuple(key for token in tokens for key in split_keys(token.value))


def convert_count(_: object, tokens: Sequence[Token]) -> int:
    """A count such as 4096 or 4k. Raises ValueError."""
    return parse_count(tokens[0].value)


def convert_size(_: object, tokens: Sequence[Token]) -> int:
    """Bytes of a size such as 8GiB. Raises ValueError."""
    return parse_size(tokens[0].value)
