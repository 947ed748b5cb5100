"""Image files for a message, as data URLs."""

from __future__ import annotations

import base64
from pathlib import Path

# Of a file, as the server reads at most.
MAX_BYTES = 20 * 2**20
# Type by the first bytes, and by bytes 8 to 12 of a RIFF file.
_STARTS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif"}


class ImageError(ValueError):
    """The file is no image that can be sent; the text is for the user."""


def data_url(path: Path) -> str:
    """The image of a file. Raises ImageError."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ImageError(f"{path} has {size / 2**20:.1f} MiB, and at most {MAX_BYTES / 2**20:.1f} MiB can be sent")
        content = path.read_bytes()
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror}") from error
    kind = image_type(content)
    if kind is None:
        raise ImageError(f"{path} is no PNG, JPEG, WebP or GIF image")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image_type(content: bytes) -> str | None:
    """png, jpeg, gif, webp or None, by the content."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    return next((kind for start, kind in _STARTS.items() if content.startswith(start)), None)
