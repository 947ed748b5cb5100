"""`encrypted_content` of reasoning and compaction items for stateless clients: base64 text, not a secret.

The same text is in `content`, but some clients, such as Codex, send only this field back.
"""

from __future__ import annotations

import base64
import binascii

PREFIX = "cellar."


def encode_content(text: str) -> str:
    """The encoded text."""
    return PREFIX + base64.urlsafe_b64encode(text.encode()).decode("ascii")


def decode_content(sealed: str) -> str:
    """The decoded text; ValueError if another server encoded it or it is damaged."""
    if not sealed.startswith(PREFIX):
        raise ValueError("another server encoded it")
    try:
        return base64.b64decode(sealed.removeprefix(PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("it is damaged") from error
