"""JSON as it leaves the server: compact, finite, and ASCII only.

ASCII, because a character never splits over two packets then, and because clients that cut a stream with
str.splitlines break at U+2028 and U+0085, which other escapings leave in place.
"""

from __future__ import annotations

import json

from starlette.responses import Response


def dumps(value: object) -> bytes:
    """The JSON text of `value`; ValueError at NaN or Infinity."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """The body."""
        return dumps(content)
