"""Random images and sounds as files: a model is measured and checked with them at load."""

from __future__ import annotations

import io
import random
import struct
import wave
import zlib
from collections.abc import Sequence

from engine.types.content import ContentKind, Upload

# Of an image: tall enough for several tiles of small processors.
_WIDTH, _HEIGHT = 64, 96
_SAMPLE_RATE, _SECONDS = 16_000, 1


# Sides of images of the most pixels that processors use, in the shapes of photographs and screens.
_SHAPES = ((1024, 1024), (1024, 1536), (1536, 1024), (512, 2048), (2048, 512))


def sample_shapes() -> list[Upload]:
    """Black images of several shapes."""
    return [Upload("image", _png_of(width, [bytes(3 * width)] * height), "image") for width, height in _SHAPES]


def sample_upload(kind: ContentKind, seed: int = 0) -> Upload:
    """An image of random pixels, or a second of noise."""
    generator = random.Random(seed)  # noqa: S311
    return Upload(kind, _png(generator) if kind == "image" else _wav(generator), kind)


def _png(generator: random.Random) -> bytes:
    return _png_of(_WIDTH, [generator.randbytes(3 * _WIDTH) for _ in range(_HEIGHT)])


def _png_of(width: int, rows: Sequence[bytes]) -> bytes:
    """A PNG of rows of 8-bit RGB."""
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 2, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = (b"IHDR", header), (b"IDAT", data), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _wav(generator: random.Random) -> bytes:
    """A WAV of 16-bit samples of one channel."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, _SAMPLE_RATE, 0, "NONE", ""))
        writer.writeframes(generator.randbytes(2 * _SAMPLE_RATE * _SECONDS))
    return file.getvalue()
