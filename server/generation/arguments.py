"""Arguments of tool calls as objects, for APIs without JSON text."""

from __future__ import annotations

import json
import sys

from pydantic_core import from_json


def read_arguments(text: str) -> dict[str, object]:
    """The arguments as an object: of truncated JSON its complete members; {} if it is no object.

    Anthropic's client uses the same partial parser, so streamed and non-streamed answers agree. Numbers beyond the
    range of a float become the largest float.
    """
    try:
        arguments = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return json.loads(json.dumps(arguments), parse_constant=_largest) if isinstance(arguments, dict) else {}


def _largest(name: str) -> float:
    return -sys.float_info.max if name.startswith("-") else sys.float_info.max
