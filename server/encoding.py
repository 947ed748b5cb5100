"""JSON as it leaves the server: compact, finite, and ASCII only.

ASCII, because a character never splits over two packets then, and because clients that cut a stream with
str.splitlines break at U+2028 and U+0085, which other escapings leave in place.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii

from starlette.responses import Response

_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
# The text of a template: nothing that a server or a client is called by has this value.
HOLE = "\0"


def dumps(value: object) -> bytes:
    """The JSON text of `value`; ValueError at NaN or Infinity."""
    return _encoder.encode(value).encode("ascii")


class Template:
    """What is written again and again with another text in it: all but the text is encoded once.

    pattern  with HOLE, as JSON, wherever the text goes
    """

    def __init__(self, pattern: bytes) -> None:
        self._parts = pattern.split(dumps(HOLE))

    def fill(self, text: str) -> bytes:
        """The pattern with `text` in it."""
        return encode_basestring_ascii(text).encode("ascii").join(self._parts)


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """The body."""
        return dumps(content)
