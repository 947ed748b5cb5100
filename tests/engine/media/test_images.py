"""Hard images: decoded within limits, or refused."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache

import numpy as np
import pytest
from PIL import Image

from engine.errors import ContentProblem
from engine.media.decode import DecodeError, image_from
from tests.engine.media.processors import encoded

WIDTH, HEIGHT = 64, 48
WHITE = Image.new("RGB", (WIDTH, HEIGHT), "white")


@cache
def gradient() -> Image.Image:
    """A smooth image, not symmetric in any direction."""
    row, column = np.meshgrid(np.arange(HEIGHT), np.arange(WIDTH), indexing="ij")
    return Image.fromarray(np.stack([column * 4, row * 5, (row + column) * 2], axis=-1).astype(np.uint8))


@cache
def grey16() -> Image.Image:
    return Image.fromarray((np.arange(WIDTH * HEIGHT).reshape(HEIGHT, WIDTH) * 21).astype(np.uint16))


def chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bare_png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG file of greys with any claimed size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def zeros(mebibytes: int) -> bytes:
    """Compressed zeros."""
    compressor = zlib.compressobj(9)
    return b"".join(compressor.compress(bytes(2**20)) for _ in range(mebibytes)) + compressor.flush()


def turned(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, "PNG", exif=exif)


def transparent(alpha: int) -> Image.Image:
    image = gradient().convert("RGBA")
    image.putalpha(alpha)
    return image


def gif_of(width: int, height: int) -> bytes:
    size = struct.pack("<HH", width, height)
    return b"GIF89a" + size + b"\0\0\0" + b",\0\0\0\0" + size + b"\0\2\1\0;"


def animated(kind: str) -> bytes:
    return encoded(gradient(), kind, save_all=True, append_images=[Image.new("RGB", (WIDTH, HEIGHT), "red")] * 5)


# Of files: what is decoded, within the loss of their format.
DECODED = {
    "png": (encoded(gradient()), gradient(), 0),
    "jpeg": (encoded(gradient(), "JPEG", quality=95), gradient(), 12),
    "progressive jpeg": (encoded(gradient(), "JPEG", quality=95, progressive=True), gradient(), 12),
    "webp": (encoded(gradient(), "WEBP", lossless=True), gradient(), 0),
    "gif": (encoded(gradient().convert("L"), "GIF"), gradient().convert("L"), 0),
    "cmyk jpeg": (encoded(gradient().convert("CMYK"), "JPEG", quality=95), gradient(), 12),
    "16 bit": (encoded(grey16()), Image.fromarray(np.round(np.asarray(grey16()) / 257).astype(np.uint8)), 0),
    "opaque": (encoded(transparent(255)), gradient(), 0),
    "half transparent": (
        encoded(transparent(128)),
        Image.blend(Image.new("RGB", (64, 48), "white"), gradient(), 0.5),
        2,
    ),
    "transparent": (encoded(transparent(0)), WHITE, 0),
    "grey with alpha": (encoded(gradient().convert("LA")), gradient().convert("L"), 0),
    "palette": (encoded(gradient().convert("P")), gradient().convert("P").convert("RGB"), 0),
    "transparent palette": (
        encoded(Image.new("RGB", (9, 9), "red").quantize(2), transparency=0),
        Image.new("RGB", (9, 9), "white"),
        0,
    ),
    "transparent colour": (
        encoded(Image.new("RGB", (9, 9), "red"), transparency=(255, 0, 0)),
        Image.new("RGB", (9, 9), "white"),
        0,
    ),
    "1 bit": (encoded(gradient().convert("1")), gradient().convert("1"), 0),
    "animated gif": (animated("GIF"), gradient(), 40),
    "animated webp": (animated("WEBP"), gradient(), 40),
    "1 x 1": (encoded(gradient().crop((5, 5, 6, 6))), gradient().crop((5, 5, 6, 6)), 0),
    "1 x 200": (encoded(Image.new("RGB", (1, 200), "blue")), Image.new("RGB", (1, 200), "blue"), 0),
}
REFUSED: dict[str, tuple[bytes, ContentProblem]] = {
    "truncated jpeg": (encoded(gradient(), "JPEG")[:-200], "damaged"),
    "truncated png": (encoded(gradient())[:-40], "damaged"),
    "truncated webp": (encoded(gradient(), "WEBP")[:-40], "damaged"),
    "wrong crc": (encoded(gradient())[:40] + b"\xff" + encoded(gradient())[41:], "damaged"),
    "png of 30,000 x 30,000": (bare_png(30_000, 30_000, zeros(20)), "too_large"),
    "png of 2^31": (bare_png(2**31 - 1, 2**31 - 1), "too_large"),
    "png of 9,000 x 9,000": (bare_png(9000, 9000, zeros(78)), "too_large"),
    "png of 0 x 5": (bare_png(0, 5), "damaged"),
    "less data than its size": (bare_png(4000, 4000, zeros(1)), "damaged"),
    "compressed text": (
        encoded(gradient())[:33] + chunk(b"zTXt", b"x\0\0" + zeros(50)) + encoded(gradient())[33:],
        "damaged",
    ),
    "gif of 65,535 x 65,535": (gif_of(65_535, 65_535), "too_large"),
    "side": (bare_png(2**15 + 1, 200, zeros(7)), "too_large"),
    "strip": (encoded(Image.new("RGB", (20_000, 2))), "too_large"),
    "21 MiB": (encoded(gradient()) + bytes(21 * 2**20), "too_large"),
    "jpeg header": (b"\xff\xd8\xff\xe0", "damaged"),
    "bmp": (encoded(gradient(), "BMP"), "format"),
    "tiff": (encoded(gradient(), "TIFF"), "format"),
    "eps": (encoded(gradient(), "EPS"), "format"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "format"),
    "html": (b"<html>", "format"),
    "empty": (b"", "format"),
}


@pytest.mark.parametrize("name", DECODED)
def test_an_image_is_decoded(name: str) -> None:
    data, image, tolerance = DECODED[name]
    expected = np.asarray(image.convert("RGB")).astype(int)

    result = image_from(data)

    assert result.mode == "RGB"
    assert np.asarray(result).shape == expected.shape
    assert np.abs(np.asarray(result) - expected).max() <= tolerance


@pytest.mark.parametrize("name", REFUSED)
def test_an_image_is_refused(name: str) -> None:
    data, problem = REFUSED[name]

    with pytest.raises(DecodeError) as error:
        image_from(data)

    assert error.value.problem == problem


@pytest.mark.parametrize("orientation", range(1, 10))
def test_an_image_is_upright(orientation: int) -> None:
    """By the definition of EXIF: where the first row and the first column of the file are. 9 is no orientation."""
    pixels = np.asarray(gradient())
    transposed = pixels.transpose(1, 0, 2)
    stored = {
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: transposed,
        6: transposed[::-1],
        7: transposed[::-1, ::-1],
        8: transposed[:, ::-1],
    }.get(orientation, pixels)

    result = image_from(turned(Image.fromarray(np.ascontiguousarray(stored)), orientation))

    assert np.array_equal(np.asarray(result), pixels)


def test_bands_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transparent image is converted band by band."""
    whole = image_from(encoded(transparent(77)))
    monkeypatch.setattr("engine.media.decode._BAND_PIXELS", 5 * WIDTH)

    assert image_from(encoded(transparent(77))).tobytes() == whole.tobytes()


def test_no_other_format_of_pillow_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    formats: list[object] = []

    def opened(file: io.BytesIO, **arguments: object) -> Image.Image:
        formats.append(arguments.get("formats"))
        raise OSError

    monkeypatch.setattr(Image, "open", opened)
    with pytest.raises(DecodeError):
        image_from(b"GIF8")

    assert formats == [("PNG", "JPEG", "WEBP", "GIF")]
