"""The strings of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.errors import InvalidRequest


def strings_in(value: object) -> Iterator[str]:
    """All strings inside a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings_in(item)


def checked_text(text: str, field: str) -> str:
    """The text itself; InvalidRequest for an unpaired surrogate, on which tokenizers crash."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, "the text contains an unpaired surrogate, which is not a character") from error
    return text
