"""Image and sound files for a message."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

# Of a file, as the server reads at most.
MAX_BYTES = 20 * 2**20
# Of the API, by the ends of file names.
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "webm", "m4a", "mp4", "mpeg", "mpga")
# Type by the first bytes, and by bytes 8 to 12 of a RIFF file.
_STARTS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif"}


class MediaFileError(ValueError):
    """The file is no image or sound that can be sent; the text is for the user."""


def data_url(path: Path) -> str:
    """The image of a file. Raises MediaFileError."""
    content = _read(path)
    kind = image_type(content)
    if kind is None:
        raise MediaFileError(f"{path} is no PNG, JPEG, WebP or GIF image")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image_type(content: bytes) -> str | None:
    """png, jpeg, gif, webp or None, by the content."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    return next((kind for start, kind in _STARTS.items() if content.startswith(start)), None)


def image_part(path: Path) -> dict[str, Any]:
    """The image of a file as a part of a chat message. Raises MediaFileError."""
    return {"type": "image_url", "image_url": {"url": data_url(path)}}


def audio_part(path: Path) -> dict[str, Any]:
    """The sound of a file as a part of a chat message. Raises MediaFileError."""
    audio_format = path.suffix.lower().removeprefix(".")
    if audio_format not in AUDIO_FORMATS:
        raise MediaFileError(f"{path} has no name of a sound: {', '.join(AUDIO_FORMATS)}")
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(_read(path)).decode(), "format": audio_format},
    }


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise MediaFileError(
                f"{path} has {size / 2**20:.1f} MiB, and at most {MAX_BYTES / 2**20:.1f} MiB can be sent"
            )
        return path.read_bytes()
    except OSError as error:
        raise MediaFileError(f"{path} cannot be read: {error.strerror}") from error
