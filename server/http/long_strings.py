"""Takes long strings out of a JSON text before it is parsed.

Python's parser holds the interpreter lock for its whole text, and so do searches of a whole text: for 60 MB of images
both stopped every thread for 50 ms at a time. Here no call takes longer than a piece, or a copy of one string.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping

# Shorter strings are left to the parser.
LONG_BYTES = 2**16
# Quotes and escapes before the last long string that is taken out, so that the search takes 0.1 s at most.
MAX_STEPS = 2**17
# Bytes checked in one call, about 0.4 ms.
_PIECE_BYTES = 2**20
_PRINTABLE = bytes(range(0x20, 0x7F))
_may_be_key = re.compile(rb"[ \t\n\r]{64}|[ \t\n\r]{0,63}:")


def take_long_strings(body: bytes, least_bytes: int = LONG_BYTES) -> tuple[bytes, dict[str, str]]:
    """The JSON text with a placeholder for each long string of printable ASCII without escapes, and those strings.

    No client can write a placeholder: it is random.
    """
    strings: dict[str, str] = {}
    if len(body) < least_bytes:
        return body, strings
    kept: list[bytes] = []
    token, position = secrets.token_hex(16), 0
    for start, end in _long_strings(body, least_bytes):
        text = _printable(body, start, end)
        if text is not None:
            placeholder = f"{token}{len(strings)}"
            strings[placeholder] = text
            kept += (body[position:start], placeholder.encode())
            position = end
    return (b"".join((*kept, body[position:])), strings) if strings else (body, strings)


def put_back(value: object, strings: Mapping[str, str]) -> object:
    """The value with its long strings."""
    match value:
        case str():
            return strings.get(value, value)
        case list():
            return [put_back(item, strings) for item in value]
        case dict():
            return {name: put_back(item, strings) for name, item in value.items()}
    return value


def _long_strings(body: bytes, least_bytes: int) -> Iterator[tuple[int, int]]:
    """The positions of long strings without escapes, between their quotes."""
    steps, position = 0, 0
    while start := body.find(b'"', position) + 1:
        end, position = body.find(b'"', start), start
        while (escape := body.find(b"\\", position, max(end, 0))) >= 0 and steps < MAX_STEPS:
            position, steps = escape + 2, steps + 1
            if position > end:
                end = body.find(b'"', position)
        if end < 0 or steps >= MAX_STEPS:
            return
        # The parser has to see keys, as two equal ones are an error.
        if position == start and end - start >= least_bytes and not _may_be_key.match(body, end + 1):
            yield start, end
        position, steps = end + 1, steps + 1


def _printable(body: bytes, start: int, end: int) -> str | None:
    """The text of these bytes; None if it has other characters than printable ASCII."""
    for begin in range(start, end, _PIECE_BYTES):
        if body[begin : min(begin + _PIECE_BYTES, end)].translate(None, _PRINTABLE):
            return None
    with memoryview(body) as view:
        return str(view[start:end], "ascii")
