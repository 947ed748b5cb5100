"""Incremental parser of one answer."""

from __future__ import annotations

from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.message import AnswerDelta
from engine.chat_format.source import Steps, TextSource


class AnswerParser:
    """Parses the text of one answer into deltas; their content does not depend on how the text is chunked."""

    def __init__(self, source: TextSource, deltas: DeltaBuffer, steps: Steps[None]) -> None:
        self._source = source
        self._deltas = deltas
        self._steps = steps

    def push(self, text: str) -> list[AnswerDelta]:
        """Add text; deltas that are certain now."""
        self._source.push(text)
        next(self._steps, None)
        return self._deltas.take()

    def finish(self) -> list[AnswerDelta]:
        """End of the text; remaining deltas."""
        self._source.end()
        return self._take_all()

    def cut(self) -> list[AnswerDelta]:
        """End of a truncated text; remaining deltas. A tool call without a complete name is dropped."""
        self._source.cut()
        return self._take_all()

    def _take_all(self) -> list[AnswerDelta]:
        next(self._steps, None)
        return self._deltas.take()
