"""Limits of a JSON text before it is parsed: depth and number of values.

Parsed values take up to forty times the bytes of their text, and validation takes microseconds a value. The scan stops
at the first exceeded limit, so its work is bounded; no call holds the interpreter lock for longer than one window.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64
# Strings, arrays and objects; keys of objects are strings.
MAX_NODES = 2**17
# Values of every kind; higher than MAX_NODES for prompts of token ids.
MAX_VALUES = 2**19
# Characters in one call of the regular expression engine, about 1 ms.
SCAN_WINDOW = 2**16

_structural = re.compile(r'["\[\]{}]')
# Possessive, so linear for every text.
_string_body = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)


def exceeded_limit(text: str) -> str | None:
    """The limit that a JSON text exceeds, in words, or None. Any result is valid for a text that is not JSON."""
    counting = text.count(",") >= MAX_VALUES
    opened = text.count("[") + text.count("{")
    if opened <= MAX_DEPTH and opened + text.count('"') <= MAX_NODES and not counting:
        return None
    depth = nodes = separators = position = 0
    while (structural := _next_structural(text, position)) >= 0:
        if counting:
            # Commas inside strings do not count.
            separators += text.count(",", position, structural)
        position, character = structural + 1, text[structural]
        if character in "]}":
            depth -= 1
            continue
        nodes += 1
        if character == '"':
            position = _string_end(text, position)
        else:
            depth += 1
        if depth > MAX_DEPTH:
            return f"nested deeper than {MAX_DEPTH} levels"
        if nodes > MAX_NODES:
            return f"more than {MAX_NODES} strings, arrays and objects"
        if separators >= MAX_VALUES:
            break
    if counting and separators + text.count(",", position) >= MAX_VALUES:
        return f"more than {MAX_VALUES} values"
    return None


def _next_structural(text: str, position: int) -> int:
    """The position of the next quote, bracket or brace, or -1."""
    while position < len(text):
        match = _structural.search(text, position, position + SCAN_WINDOW)
        if match:
            return match.start()
        position += SCAN_WINDOW
    return -1


def _string_end(text: str, position: int) -> int:
    """The position after the closing quote of a string with its first character at `position`."""
    quote = text.find('"', position)
    if quote < 0:
        return len(text)
    if text[quote - 1] != "\\":
        return quote + 1
    while position < len(text):
        position = _string_body.match(text, position, position + SCAN_WINDOW).end()  # type: ignore[union-attr]
        if text[position : position + 1] == '"':
            return position + 1
        if position == len(text) - 1:
            break
    return len(text)
