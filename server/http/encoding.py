"""JSON as it leaves the server: compact, finite, and ASCII only.

ASCII, because a character never splits over two packets then, and because clients that cut a stream with
str.splitlines break at U+2028 and U+0085, which other escapings leave in place.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii

import anyio.to_thread
from starlette.responses import Response

_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
# Items of a list that are encoded in one call: numbers or texts, and objects or vectors.
SCALAR_SLICE, NESTED_SLICE = 1024, 4
# Objects of a list that are encoded in slices themselves, such as choices.
MAX_SLICED_OBJECTS = 64
# The text of a template: nothing that a server or a client is called by has this value.
PLACEHOLDER = "\0"


def dumps(value: object) -> bytes:
    """The JSON text of `value`; ValueError at NaN or Infinity."""
    return _encoder.encode(value).encode("ascii")


def dumps_sliced(value: object) -> bytes:
    """The same text, encoded in slices: the encoder would hold the interpreter for all of a list of a million."""
    if isinstance(value, dict):
        return b"{" + b",".join(dumps(key) + b":" + dumps_sliced(item) for key, item in value.items()) + b"}"
    if not isinstance(value, list) or not value:
        return dumps(value)
    if len(value) <= MAX_SLICED_OBJECTS and isinstance(value[0], dict):
        return b"[" + b",".join(map(dumps_sliced, value)) + b"]"
    size = NESTED_SLICE if isinstance(value[0], dict | list) else SCALAR_SLICE
    slices = (value[start : start + size] for start in range(0, len(value), size))
    return b"[" + b",".join(dumps(some)[1:-1] for some in slices) + b"]"


async def large_json_response(content: object) -> Response:
    """A JSON answer that is encoded in a worker thread."""
    return Response(await anyio.to_thread.run_sync(dumps_sliced, content), media_type=JsonResponse.media_type)


class JsonTemplate:
    """What is written again and again with another text in it: all but the text is encoded once.

    pattern  with HOLE, as JSON, wherever the text goes
    """

    def __init__(self, pattern: bytes) -> None:
        self._parts = pattern.split(dumps(PLACEHOLDER))

    def fill(self, text: str) -> bytes:
        """The pattern with `text` in it."""
        return encode_basestring_ascii(text).encode("ascii").join(self._parts)


class JsonResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """The body."""
        return dumps(content)
