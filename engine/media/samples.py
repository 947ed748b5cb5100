"""Random images and sounds as files: a model is measured and checked with them at load."""

from __future__ import annotations

import io
import random
import struct
import wave
import zlib

from engine.types.content import ContentKind, Upload

# Of an image: tall enough for several tiles of small processors.
_WIDTH, _HEIGHT = 64, 96
_SAMPLE_RATE, _SECONDS = 16_000, 1


def sample_upload(kind: ContentKind, seed: int = 0) -> Upload:
    """An image of random pixels, or a second of noise."""
    generator = random.Random(seed)  # noqa: S311
    return Upload(kind, _png(generator) if kind == "image" else _wav(generator), kind)


def _png(generator: random.Random) -> bytes:
    """A PNG of 8-bit RGB."""
    rows = b"".join(b"\0" + generator.randbytes(3 * _WIDTH) for _ in range(_HEIGHT))
    header = struct.pack(">IIBBBBB", _WIDTH, _HEIGHT, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
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
