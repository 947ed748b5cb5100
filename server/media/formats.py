"""The format of an image or a sound by its first bytes."""

from __future__ import annotations

import re

# First bytes and the media type; more formats of sounds have frames without a fixed start.
_SIGNATURES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"RIFF....WAVE", re.DOTALL), "audio/wav"),
    (re.compile(rb"fLaC"), "audio/flac"),
    (re.compile(rb"OggS"), "audio/ogg"),
    (re.compile(rb"\x1a\x45\xdf\xa3"), "audio/webm"),
    (re.compile(rb"....ftyp", re.DOTALL), "audio/mp4"),
    (re.compile(rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]"), "audio/mpeg"),
)
_ALIASES = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-png": "image/png"}
IMAGE_FORMATS = "PNG, JPEG, WebP or GIF image"
AUDIO_FORMATS = "WAV, MP3, FLAC, Ogg, WebM or MP4 sound"


def media_type_of(data: bytes) -> str | None:
    """The media type of the bytes; None: no format that is read."""
    return next((name for signature, name in _SIGNATURES if signature.match(data)), None)


def plain_media_type(media_type: str) -> str:
    """A media type under its registered name."""
    return _ALIASES.get(media_type, media_type)
