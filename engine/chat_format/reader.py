"""The text of an answer to its pieces, as it comes."""

from __future__ import annotations

from engine.chat_format.message import Piece
from engine.chat_format.source import Source, Steps
from engine.chat_format.speech import Speech


class Reader:
    """Turns the text of one answer into pieces; how it is cut does not change what they say together."""

    def __init__(self, source: Source, speech: Speech, steps: Steps[None]) -> None:
        self._source = source
        self._speech = speech
        self._steps = steps

    def push(self, text: str) -> list[Piece]:
        """Take more of the text; what became certain by it."""
        self._source.push(text)
        next(self._steps, None)
        return self._speech.take()

    def finish(self) -> list[Piece]:
        """The text is over; what was still held back."""
        self._source.end()
        return self._rest()

    def cut(self) -> list[Piece]:
        """The text was cut short; what was still held back. A call that has no name yet is lost: it is no text."""
        self._source.cut()
        return self._rest()

    def _rest(self) -> list[Piece]:
        next(self._steps, None)
        return self._speech.take()
