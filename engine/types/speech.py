"""Transcription of speech: the tokens of a model that decides them, and the features of a sound."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from engine.types.array import Array
from engine.types.request import Media, TimestampRule

_FLOAT = struct.Struct("<f")


@dataclass(frozen=True, slots=True)
class SpeechLanguage:
    """A language that a model transcribes: its code, its English name and its token."""

    code: str
    name: str
    token: int


@dataclass(frozen=True, slots=True)
class SpeechInfo:
    """How a loaded model transcribes (Whisper).

    start_token       begins the prompt of a window
    previous_token    precedes text before the window; None: there is no token for it
    no_speech_token   its probability after `start_token` is that of a window without speech
    languages         empty: the model transcribes English, and prompts have neither language nor task
    tasks             (name, token): "transcribe" and "translate"
    rule              of the timestamps in its output
    window_frames     frames of features that the encoder reads at once
    frame_seconds     duration of a frame
    frames_per_timestamp  two consecutive timestamp tokens are this many frames apart
    max_tokens        of a window, with its prompt
    """

    start_token: int
    previous_token: int | None
    no_speech_token: int
    languages: tuple[SpeechLanguage, ...]
    tasks: tuple[tuple[str, int], ...]
    rule: TimestampRule
    window_frames: int
    frame_seconds: float
    frames_per_timestamp: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SpeechFeatures:
    """Features of a sound: float32 [bins, frames], at least one window.

    seconds         its duration
    content_frames  frames of the sound, without the silence at its end that fills a window
    """

    array: Array
    seconds: float
    content_frames: int

    def window(self, start: int, count: int) -> Media:
        """Encoder input of the frames [start, start + count), zeros beyond the end. For worker threads."""
        bins, frames = self.array.shape
        stop = min(start + count, frames)
        padding = bytes((start + count - stop) * _FLOAT.size)
        data, size = memoryview(self.array.data), _FLOAT.size
        rows = [data[(row * frames + start) * size : (row * frames + stop) * size] for row in range(bins)]
        return Media.of({"input_features": Array("float32", (bins, count), padding.join([*rows, b""]))})
