"""Text of other programs for a terminal: it must not move the cursor or change the terminal."""

from __future__ import annotations

import re

# Control characters except tab and line feed.
_control = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text without control characters of terminals."""
    return _control.sub("", text)
