"""JSON output: compact, finite, ASCII only.

In ASCII no character is split over two packets, and clients that split a stream with str.splitlines cannot break at
U+2028 or U+0085.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii

import anyio.to_thread
from starlette.responses import Response

_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
# Items of a list in one call of the encoder: scalars, and objects or vectors.
SCALAR_SLICE, NESTED_SLICE = 1024, 4
# Longest list of objects, such as choices, with items that are sliced themselves.
MAX_SLICED_OBJECTS = 64
# The text of a template; no name or id has this value.
PLACEHOLDER = "\0"


def dumps(value: object) -> bytes:
    """The JSON text of `value`; ValueError for NaN and Infinity."""
    return _encoder.encode(value).encode("ascii")


def dumps_sliced(value: object) -> bytes:
    """The same as `dumps`, encoded in slices: one call for a million items would hold the interpreter lock."""
    if isinstance(value, dict):
        return b"{" + b",".join(dumps(key) + b":" + dumps_sliced(item) for key, item in value.items()) + b"}"
    if not isinstance(value, list) or not value:
        return dumps(value)
    if len(value) <= MAX_SLICED_OBJECTS and isinstance(value[0], dict):
        return b"[" + b",".join(map(dumps_sliced, value)) + b"]"
    size = NESTED_SLICE if isinstance(value[0], dict | list) else SCALAR_SLICE
    slices = (value[start : start + size] for start in range(0, len(value), size))
    return b"[" + b",".join(dumps(part)[1:-1] for part in slices) + b"]"


async def large_json_response(content: object) -> Response:
    """A JSON response, encoded in a worker thread."""
    return Response(await anyio.to_thread.run_sync(dumps_sliced, content), media_type=JsonResponse.media_type)


class JsonTemplate:
    """JSON with one variable string: everything else is encoded once.

    pattern  the JSON text with PLACEHOLDER in place of the string
    """

    def __init__(self, pattern: bytes) -> None:
        self._parts = pattern.split(dumps(PLACEHOLDER))

    def fill(self, text: str) -> bytes:
        """The JSON text with `text` as the string."""
        return encode_basestring_ascii(text).encode("ascii").join(self._parts)


class JsonResponse(Response):
    """A response with compact JSON."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """The body."""
        return dumps(content)
