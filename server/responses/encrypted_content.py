"""Reasoning in the form that stateless clients send back (`encrypted_content`): encoded, for there is nothing to hide.

The same text stands beside it in `content`; clients such as Codex send only this one back.
"""

from __future__ import annotations

import base64
import binascii

PREFIX = "cellar."


def encode_content(text: str) -> str:
    """The text, encoded."""
    return PREFIX + base64.urlsafe_b64encode(text.encode()).decode("ascii")


def decode_content(sealed: str) -> str:
    """The text that was sealed; ValueError if this server never sealed it."""
    if not sealed.startswith(PREFIX):
        raise ValueError("another server made it")
    try:
        return base64.b64decode(sealed.removeprefix(PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("it is damaged") from error
