"""Segments of a window: what is between the timestamps in a model's output, as in transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types.events import TokenLogprob
from engine.types.speech import SpeechInfo


@dataclass(frozen=True, slots=True)
class WindowSegment:
    """A range [first, stop) of the tokens of a window, with start and end in seconds."""

    first: int
    stop: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class SpeechSegment:
    """A text with start and end in seconds.

    seek         frames before its window
    tokens       with timestamps
    logprobs     of the tokens; empty without them
    no_speech    probability that its window has no speech
    """

    seek: int
    start: float
    end: float
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    no_speech: float


class WindowSplitter:
    """Splits the output of one window, token by token.

    seek    frames before the window
    frames  of the sound in the window
    """

    def __init__(self, speech: SpeechInfo, seek: int, frames: int) -> None:
        self._speech, self._frames = speech, frames
        self._timestamp_seconds = speech.frame_seconds * speech.frames_per_timestamp
        self._offset = seek * self._timestamp_seconds / speech.frames_per_timestamp
        self._tokens: list[int] = []
        self._first = 0

    def append(self, token: int) -> WindowSegment | None:
        """The segment that two consecutive timestamps end: nothing after them changes it."""
        self._tokens.append(token)
        if len(self._tokens) < 2 or not all(map(self._is_timestamp, self._tokens[-2:])):
            return None
        stop = len(self._tokens) - 1
        segment = self._segment(self._first, stop, self._tokens[stop - 1])
        self._first = stop
        return segment

    def finish(self) -> tuple[WindowSegment | None, int]:
        """The segment at the end of the output, and by how many frames the next window starts later.

        A text that has no end behind others is left to the next window.
        """
        flags = [self._is_timestamp(token) for token in self._tokens]
        if self._first == 0:
            return self._whole(), self._frames
        if flags[-2:] == [False, True]:
            return self._segment(self._first, len(self._tokens), self._tokens[-1]), self._frames
        latest = self._tokens[self._first - 1] - self._speech.rule.first
        return None, latest * self._speech.frames_per_timestamp or self._frames

    def _whole(self) -> WindowSegment:
        """All tokens, which end at the last timestamp after 0 s, or with the window."""
        timestamps = [token for token in self._tokens if self._is_timestamp(token)]
        position = int(self._frames * self._speech.frame_seconds / self._timestamp_seconds)
        if timestamps and timestamps[-1] != self._speech.rule.first:
            position = timestamps[-1] - self._speech.rule.first
        return WindowSegment(0, len(self._tokens), self._offset, self._time(position))

    def _segment(self, first: int, stop: int, last: int) -> WindowSegment:
        zero = self._speech.rule.first
        return WindowSegment(first, stop, self._time(self._tokens[first] - zero), self._time(last - zero))

    def _time(self, position: int) -> float:
        return self._offset + position * self._timestamp_seconds

    def _is_timestamp(self, token: int) -> bool:
        return token >= self._speech.rule.first


def text_tokens(speech: SpeechInfo, tokens: Sequence[int]) -> list[int]:
    """The tokens without timestamps and other special tokens."""
    return [token for token in tokens if token < speech.rule.end_token]
