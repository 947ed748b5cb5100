"""Decodes images and sounds within limits; for the media sandbox only.

The limits of an image are checked on its header, before any pixel is allocated. Those of a sound are checked on the
decoded samples: headers may be wrong.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from engine.errors import ContentProblem
from engine.types.content import MAX_IMAGE_PIXELS, MAX_REQUEST_PIXELS, ContentKind

# Of an encoded file.
MAX_BYTES: dict[ContentKind, int] = {"image": 20 * 2**20, "audio": 25 * 2**20}
# Pillow reads some forty formats, some of them by other programs.
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MAX_SIDE = 2**15
# Of the longer side to the shorter one.
_MAX_RATIO = 200
# Pixels that are converted at once, as copies of a whole image would take gigabytes.
_BAND_PIXELS = 2**20
_MIN_SECONDS = 0.1
_MAX_CHANNELS = 8
# Samples per second: the resampler takes minutes for rates of hundreds of millions.
_MAX_RATE = 768_000
# Demuxers that read the file alone: others open playlists, further files or addresses.
_SIGNATURES = (
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (4, b"ftyp", "mp4"),
    (0, b"ID3", "mp3"),
)
_CODECS = ("pcm_", "mp3", "flac", "vorbis", "opus", "aac", "alac")
_ORIENTATION_TAG = 0x0112
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_IMAGE_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError),
    *(struct.error, zlib.error),
)


class DecodeError(Exception):
    """The bytes are refused; the text continues "the image ..." or "the sound ..."."""

    def __init__(self, reason: str, problem: ContentProblem) -> None:
        super().__init__(reason)
        self.reason, self.problem = reason, problem


def _check_bytes(data: bytes, kind: ContentKind) -> None:
    if len(data) > MAX_BYTES[kind]:
        raise DecodeError(f"has {len(data):,} bytes, and the limit is {MAX_BYTES[kind]:,}", "too_large")


def image_from(data: bytes, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """The first frame as RGB, upright, on white where it is transparent. Raises DecodeError, and MemoryError.

    max_pixels  what earlier images leave of those of the request, if less than MAX_IMAGE_PIXELS
    """
    _check_bytes(data, "image")
    try:
        with warnings.catch_warnings():
            # The limits are checked here: those of Pillow only warn, up to twice their size.
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=_IMAGE_FORMATS)
            _check_dimensions(*image.size, max_pixels)
            orientation = image.getexif().get(_ORIENTATION_TAG)
            image.load()
            upright = image.transpose(_TRANSPOSITIONS[orientation]) if orientation in _TRANSPOSITIONS else image
            return _rgb(upright)
    except Image.DecompressionBombError as error:
        raise DecodeError(f"has more pixels than the limit of {MAX_IMAGE_PIXELS:,}", "too_large") from error
    except UnidentifiedImageError as error:
        if _has_image_signature(data):
            raise DecodeError("is damaged at its start", "damaged") from error
        raise DecodeError("is no PNG, JPEG, WebP or GIF file", "format") from error
    except _IMAGE_ERRORS as error:
        raise DecodeError(f"is damaged ({type(error).__name__})", "damaged") from error


def _has_image_signature(data: bytes) -> bool:
    return data.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8")) or (data[:4], data[8:12]) == (b"RIFF", b"WEBP")


def _check_dimensions(width: int, height: int, max_pixels: int) -> None:
    if width * height > MAX_IMAGE_PIXELS or max(width, height) > _MAX_SIDE:
        limit = f"{MAX_IMAGE_PIXELS:,} pixels, and {_MAX_SIDE:,} on a side"
        raise DecodeError(f"has {width:,} x {height:,} pixels, and the limit is {limit}", "too_large")
    if width * height > max_pixels:
        limit = f"with it the images of the request have more than {MAX_REQUEST_PIXELS:,}"
        raise DecodeError(f"has {width:,} x {height:,} pixels, and {limit}", "too_large")
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise DecodeError(
            f"has {width:,} x {height:,} pixels, and may be at most {_MAX_RATIO} times as long as wide", "too_large"
        )


def _rgb(image: Image.Image) -> Image.Image:
    """RGB of any mode. `convert` alone clips 16-bit greys to white, and what is transparent to black."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    result = Image.new("RGB", image.size, "white")
    rows = max(_BAND_PIXELS // image.width, 1)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        if image.mode.startswith("I"):
            grey = (np.asarray(band).astype(np.uint32) * 255 + 32767) // 65535
            result.paste(Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB"), (0, top))
        elif image.has_transparency_data:
            alpha = band.convert("RGBA")
            result.paste(alpha, (0, top), mask=alpha)
        else:
            result.paste(band.convert("RGB"), (0, top))
    return result


def sound_from(data: bytes, rate: int, max_seconds: float) -> NDArray[np.float32]:
    """Mono samples [count] from -1 to 1, at `rate` per second. Raises DecodeError, and MemoryError."""
    _check_bytes(data, "audio")
    demuxer = _demuxer(data)
    if demuxer is None:
        raise DecodeError("is no WAV, MP3, FLAC, Ogg, WebM, M4A or AAC file", "format")
    blocks, count = [np.zeros(0, np.float32)], 0
    try:
        for block in _blocks(data, demuxer, rate):
            blocks.append(block)
            count += len(block)
            if count > max_seconds * rate:
                raise DecodeError(f"is longer than {max_seconds:g} s", "too_large")
    except (av.error.FFmpegError, ValueError, OSError, EOFError) as error:
        raise DecodeError(f"is damaged ({type(error).__name__})", "damaged") from error
    if count < _MIN_SECONDS * rate:
        raise DecodeError(f"is shorter than {_MIN_SECONDS:g} s", "damaged")
    samples = np.concatenate(blocks)
    return np.nan_to_num(samples, copy=False, nan=0.0, posinf=0.0, neginf=0.0).clip(-1, 1, out=samples)


def _blocks(data: bytes, demuxer: str, rate: int) -> Iterator[NDArray[np.float32]]:
    """The resampled samples of the first audio stream, block by block."""
    options = {"protocol_whitelist": "pipe"}
    with av.open(io.BytesIO(data), "r", format=demuxer, options=options, metadata_errors="ignore") as container:
        if not container.streams.audio:
            raise DecodeError("has no audio stream", "format")
        stream = container.streams.audio[0]
        codec = stream.codec_context
        if codec is None:
            raise DecodeError("has an unknown codec", "format")
        if not codec.name.startswith(_CODECS):
            raise DecodeError(f"has the codec {codec.name}, which is not supported", "format")
        if codec.channels > _MAX_CHANNELS:
            raise DecodeError(f"has {codec.channels} channels, and the limit is {_MAX_CHANNELS}", "too_large")
        if codec.sample_rate > _MAX_RATE:
            raise DecodeError(
                f"has {codec.sample_rate:,} samples a second, and the limit is {_MAX_RATE:,}", "too_large"
            )
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        for frame in container.decode(stream):
            for block in resampler.resample(frame):
                yield block.to_ndarray()[0].copy()
        for block in resampler.resample(None):
            yield block.to_ndarray()[0].copy()


def _demuxer(data: bytes) -> str | None:
    """FFmpeg's name of the file format, by the first bytes."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    for start, signature, demuxer in _SIGNATURES:
        if data[start : start + len(signature)] == signature:
            return demuxer
    if len(data) < 2 or data[0] != 0xFF:
        return None
    # Frames without a header of the file.
    if data[1] & 0xF6 == 0xF0:
        return "aac"
    return "mp3" if data[1] & 0xE6 in (0xE2, 0xE4, 0xE6) else None
