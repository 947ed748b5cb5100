"""The pieces of an answer while they are being read: neighbours become one, and whitespace between parts is dropped."""

from __future__ import annotations

from collections.abc import Collection

from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from engine.chat_format.tool_input import ToolInputDecoder


class DeltaBuffer:
    """What a reader has found and nobody has taken yet.

    Reasoning has no whitespace at its ends, nor has text next to reasoning or a call. A text that stands alone keeps
    all of its own. Whitespace is held back until it is known what follows. Two texts with something between them are
    parted by an empty line, since clients join them; so is reasoning.

    customs tools whose calls are told as the text that they take
    calls   tool calls opened so far
    has_arguments  whether the latest one has arguments
    """

    def __init__(self, customs: Collection[str] = ()) -> None:
        self._custom_tools = customs
        self._input: ToolInputDecoder | None = None
        self._deltas: list[AnswerDelta] = []
        self._space = ""
        self._in_reasoning = False
        self._between = False
        self._kinds: set[type[TextDelta | ReasoningDelta]] = set()
        self.calls = 0
        self.has_arguments = False

    def add_text(self, text: str) -> None:
        """More text."""
        if self._between:
            text = text.lstrip()
            if not text:
                return
            self._between = False
            self._space = self._gap(TextDelta)
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._add(TextDelta(kept))

    def add_reasoning(self, text: str) -> None:
        """More reasoning."""
        if not self._in_reasoning:
            self.end_part()
            text = text.lstrip()
            self._in_reasoning = bool(text)
            self._space = self._gap(ReasoningDelta) if text else ""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._add(ReasoningDelta(kept))

    def end_part(self) -> None:
        """What was said is over, and something else begins: whitespace around here is nobody's."""
        self._end_input()
        self._space, self._between, self._in_reasoning = "", True, False

    def begin_call(self, name: str) -> None:
        """A call begins."""
        self.end_part()
        custom = name in self._custom_tools
        self._input = ToolInputDecoder() if custom else None
        self._add(ToolCallStart(self.calls, name, "custom" if custom else "function"))
        self.calls += 1
        self.has_arguments = False

    def add_arguments(self, text: str) -> None:
        """More of the arguments of the latest call."""
        self.has_arguments = self.has_arguments or bool(text)
        self._add(ToolCallDelta(self.calls - 1, text if self._input is None else self._input.push(text)))

    def finish(self) -> None:
        """Nothing else follows: whitespace at the end of a text is text."""
        self._end_input()
        if not self._in_reasoning:
            self._add(TextDelta(self._space))
        self._space = ""

    def take(self) -> list[AnswerDelta]:
        """What was found since the last time."""
        pieces, self._deltas = self._deltas, []
        return pieces

    def _end_input(self) -> None:
        if self._input is not None:
            self._add(ToolCallDelta(self.calls - 1, self._input.finish()))
            self._input = None

    def _gap(self, kind: type[TextDelta | ReasoningDelta]) -> str:
        return "\n\n" if kind in self._kinds else ""

    def _add(self, piece: AnswerDelta) -> None:
        if not isinstance(piece, ToolCallStart):
            if not piece.text:
                return
            if isinstance(piece, TextDelta | ReasoningDelta):
                self._kinds.add(type(piece))
            last = self._deltas[-1] if self._deltas else None
            if isinstance(last, type(piece)) and not isinstance(last, ToolCallStart):
                piece = _joined(last, piece)
                self._deltas.pop()
        self._deltas.append(piece)


def _joined(last: AnswerDelta, piece: AnswerDelta) -> AnswerDelta:
    """Two neighbours of one kind as one."""
    match last, piece:
        case TextDelta(before), TextDelta(after):
            return TextDelta(before + after)
        case ReasoningDelta(before), ReasoningDelta(after):
            return ReasoningDelta(before + after)
        case ToolCallDelta(index, before), ToolCallDelta(_, after):
            return ToolCallDelta(index, before + after)
    raise AssertionError(last, piece)
