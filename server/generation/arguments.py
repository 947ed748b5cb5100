"""What a model calls a function with, for APIs whose clients read an object and not its text."""

from __future__ import annotations

import json
import sys

from pydantic_core import from_json


def read_arguments(text: str) -> dict[str, object]:
    """The arguments as an object; of those that were cut, the members that are whole; of what is no object, nothing.

    Anthropic's clients read the pieces of a stream with the same reader, so they find the same there. A number too
    large for a float is the largest.
    """
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return json.loads(json.dumps(found), parse_constant=_largest) if isinstance(found, dict) else {}


def _largest(name: str) -> float:
    return -sys.float_info.max if name.startswith("-") else sys.float_info.max
