"""Sounds of many formats: decoded within limits, or refused."""

from __future__ import annotations

import io
import wave
from functools import cache
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import ContentProblem
from engine.media.decode import DecodeError, sound_from

RATE = 16_000
SECONDS = 1.5
MAX_SECONDS = 60.0
# Lossy formats put silence before the sound.
MAX_DELAY = 2400


def tone(seconds: float, rate: int) -> NDArray[np.float64]:
    """A chirp, whose position in time is unambiguous, with a tone."""
    time = np.arange(int(seconds * rate)) / rate
    return 0.4 * np.sin(2 * np.pi * (200 + 400 * time) * time) + 0.1 * np.sin(2 * np.pi * 3000 * time)


def wav(rate: int = 44_100, channels: int = 2, seconds: float = SECONDS) -> bytes:
    """16-bit PCM, all channels equal."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        samples = np.repeat((tone(seconds, rate) * 32767).astype("<i2")[:, None], channels, axis=1)
        file.writeframes(samples.tobytes())
    return out.getvalue()


@cache
def muxed(container: str, codec: str, rate: int = 48_000, seconds: float = SECONDS, *, silent: bool = False) -> bytes:
    """A sound in a container, encoded by FFmpeg."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as target:
        stream: Any = target.add_stream(codec, rate=rate, layout="stereo")
        samples = np.zeros(int(seconds * rate)) if silent else tone(seconds, rate)
        frame = av.AudioFrame.from_ndarray(np.stack([samples] * 2).astype(np.float32), format="fltp", layout="stereo")
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode(None)):
            target.mux(packet)
    return out.getvalue()


@cache
def video() -> bytes:
    """A file without sound."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as target:
        stream: Any = target.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        for packet in (*stream.encode(av.VideoFrame(32, 32, "yuv420p")), *stream.encode(None)):
            target.mux(packet)
    return out.getvalue()


DECODED = {
    "wav": (lambda: wav(), 0.9999),
    "mono wav": (lambda: wav(channels=1), 0.9999),
    "wav of 8 kHz": (lambda: wav(rate=8000), 0.9999),
    "float wav": (lambda: muxed("wav", "pcm_f32le"), 0.9999),
    "flac": (lambda: muxed("flac", "flac", 44_100), 0.9999),
    "mp3": (lambda: muxed("mp3", "libmp3lame", 44_100), 0.995),
    "opus in ogg": (lambda: muxed("ogg", "libopus"), 0.98),
    "opus in webm": (lambda: muxed("webm", "libopus"), 0.98),
    "aac in m4a": (lambda: muxed("mp4", "aac", 44_100), 0.98),
    "aac": (lambda: muxed("adts", "aac", 44_100), 0.98),
    "alac in m4a": (lambda: muxed("mp4", "alac", 44_100), 0.9999),
}
REFUSED: dict[str, tuple[bytes, ContentProblem]] = {
    "empty": (b"", "format"),
    "text": (b"hello world, this is no sound", "format"),
    "playlist": (b"#EXTM3U\nfile:///etc/passwd\n", "format"),
    "concatenation": (b"ffconcat version 1.0\nfile /etc/passwd\n", "format"),
    "header of a wav": (wav()[:44], "damaged"),
    "no bits a sample": (wav()[:34] + bytes(2) + wav()[36:], "format"),
    "721 MHz": (wav()[:24] + (721_453_118).to_bytes(4, "little") + wav()[28:], "too_large"),
    "short": (wav(seconds=0.05), "damaged"),
    "26 MiB": (wav() + bytes(26 * 2**20), "too_large"),
    "9 channels": (wav(channels=9), "too_large"),
    "video": (video(), "format"),
    "ogg of zeros": (b"OggS" + bytes(1000), "damaged"),
    "webm of zeros": (b"\x1aE\xdf\xa3" + bytes(1000), "damaged"),
    "codec": (muxed("matroska", "ac3"), "format"),
}


def similarity(samples: NDArray[np.float32]) -> float:
    """The correlation with the tone at the best delay."""
    expected = tone(SECONDS, RATE)[: len(samples) - MAX_DELAY][:RATE]
    return max(
        float(np.corrcoef(samples[delay : delay + len(expected)], expected)[0, 1])
        for delay in range(MAX_DELAY)
        if delay + len(expected) <= len(samples)
    )


@pytest.mark.parametrize("name", DECODED)
def test_a_sound_is_decoded(name: str) -> None:
    make, least = DECODED[name]

    samples = sound_from(make(), RATE, MAX_SECONDS)

    assert samples.dtype == np.float32
    assert len(samples) / RATE == pytest.approx(SECONDS, abs=0.1)
    assert similarity(samples) > least


@pytest.mark.parametrize("name", REFUSED)
def test_a_sound_is_refused(name: str) -> None:
    data, problem = REFUSED[name]

    with pytest.raises(DecodeError) as error:
        sound_from(data, RATE, MAX_SECONDS)

    assert error.value.problem == problem


def test_the_limit_counts_decoded_samples() -> None:
    """Minutes of silence are a small file."""
    data = muxed("ogg", "libopus", seconds=90, silent=True)
    assert len(data) < 300_000

    with pytest.raises(DecodeError, match="longer than 60 s"):
        sound_from(data, RATE, MAX_SECONDS)

    assert len(sound_from(data, RATE, 100)) / RATE == pytest.approx(90, abs=0.1)


def test_a_header_may_claim_any_length() -> None:
    """A recorder that does not know the length writes the largest number."""
    data = wav(channels=1)
    endless = data[:4] + b"\xff\xff\xff\xff" + data[8:40] + b"\xff\xff\xff\xff" + data[44:]

    assert len(sound_from(endless, RATE, MAX_SECONDS)) == len(sound_from(data, RATE, MAX_SECONDS))


def test_samples_are_finite() -> None:
    samples = np.array([[np.nan, np.inf, -np.inf, 5.0, -5.0] * 1000] * 2, np.float32)
    out = io.BytesIO()
    with av.open(out, "w", format="wav") as target:
        stream: Any = target.add_stream("pcm_f32le", rate=RATE, layout="stereo")
        frame = av.AudioFrame.from_ndarray(samples.T.reshape(1, -1), format="flt", layout="stereo")
        frame.sample_rate = RATE
        for packet in (*stream.encode(frame), *stream.encode(None)):
            target.mux(packet)

    decoded = sound_from(out.getvalue(), RATE, MAX_SECONDS)

    assert np.isfinite(decoded).all()
    assert np.abs(decoded).max() == 1.0
