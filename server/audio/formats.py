"""A transcription as text, subtitles and JSON."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence

from engine.types.events import TokenLogprob
from engine.types.speech import SpeechInfo
from server.audio.segments import SpeechSegment
from server.schemas.audio import TranscriptionSegment, TranscriptLogprob

_MILLISECONDS = (3_600_000, 60_000, 1000)


def plain_text(segments: Sequence[SpeechSegment]) -> str:
    """The text of all segments."""
    return "".join(segment.text for segment in segments).strip()


def srt(segments: Iterable[SpeechSegment]) -> str:
    """Subtitles in the format of SubRip."""
    cues = [f"{number}\n{_cue(segment, ',')}\n" for number, segment in enumerate(segments, 1)]
    return "\n".join(cues)


def vtt(segments: Iterable[SpeechSegment]) -> str:
    """Subtitles in the format WebVTT."""
    return "WEBVTT\n\n" + "\n".join(f"{_cue(segment, '.')}\n" for segment in segments)


SUBTITLES: dict[str, Callable[[Sequence[SpeechSegment]], str]] = {
    "text": lambda segments: plain_text(segments) + "\n",
    "srt": srt,
    "vtt": vtt,
}


def verbose_segment(number: int, segment: SpeechSegment, temperature: float) -> TranscriptionSegment:
    """A segment of the format `verbose_json`."""
    encoded = segment.text.encode(errors="replace")
    logprobs = [entry.chosen.logprob for entry in segment.logprobs]
    return TranscriptionSegment(
        id=number,
        seek=segment.seek,
        start=round(segment.start, 3),
        end=round(segment.end, 3),
        text=segment.text,
        tokens=list(segment.tokens),
        temperature=temperature,
        avg_logprob=sum(logprobs) / max(len(logprobs), 1),
        compression_ratio=len(encoded) / len(zlib.compress(encoded)),
        no_speech_prob=segment.no_speech,
    )


def logprobs_of(speech: SpeechInfo, entries: Iterable[TokenLogprob]) -> list[TranscriptLogprob]:
    """Log-probabilities of the tokens of the text."""
    return [
        TranscriptLogprob(token=chosen.text, bytes=list(chosen.bytes), logprob=chosen.logprob)
        for chosen in (entry.chosen for entry in entries)
        if chosen.token < speech.rule.end_token and math.isfinite(chosen.logprob)
    ]


class TextDeltas:
    """Deltas of the text of segments: joined, they are `plain_text`, without white space at both ends."""

    def __init__(self) -> None:
        self._is_empty, self._space = True, ""

    def append(self, text: str) -> str:
        """The delta of another segment; white space at its end is part of the next one."""
        text = text.lstrip() if self._is_empty else self._space + text
        delta = text.rstrip()
        self._space = text[len(delta) :]
        if delta:
            self._is_empty = False
        return delta


def _cue(segment: SpeechSegment, separator: str) -> str:
    """Times and text; the text has no empty line and no arrow, which would end the cue or begin another one."""
    text = " ".join(segment.text.split()).replace("-->", "->")
    if separator == ".":
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"{_clock(segment.start, separator)} --> {_clock(segment.end, separator)}\n{text}"


def _clock(seconds: float, separator: str) -> str:
    rest = round(seconds * 1000)
    parts = []
    for unit in _MILLISECONDS:
        parts.append(f"{rest // unit:02}")
        rest %= unit
    return ":".join(parts) + f"{separator}{rest:03}"
