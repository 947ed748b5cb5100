"""The text of an answer to its pieces, as it comes."""

from __future__ import annotations

from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.message import AnswerDelta
from engine.chat_format.source import Steps, TextSource


class AnswerParser:
    """Turns the text of one answer into pieces; how it is cut does not change what they say together."""

    def __init__(self, source: TextSource, speech: DeltaBuffer, steps: Steps[None]) -> None:
        self._source = source
        self._deltas = speech
        self._steps = steps

    def push(self, text: str) -> list[AnswerDelta]:
        """Take more of the text; what became certain by it."""
        self._source.push(text)
        next(self._steps, None)
        return self._deltas.take()

    def finish(self) -> list[AnswerDelta]:
        """The text is over; what was still held back."""
        self._source.end()
        return self._take_all()

    def cut(self) -> list[AnswerDelta]:
        """The text was cut short; what was still held back. A call that has no name yet is lost: it is no text."""
        self._source.cut()
        return self._take_all()

    def _take_all(self) -> list[AnswerDelta]:
        next(self._steps, None)
        return self._deltas.take()
