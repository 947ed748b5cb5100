"""The pieces of an answer while they are being read: neighbours become one, and whitespace between parts is dropped."""

from __future__ import annotations

from collections.abc import Collection

from engine.chat_format.input import Input
from engine.chat_format.message import CallArguments, CallOpened, Piece, Reasoning, Text


class Speech:
    """What a reader has found and nobody has taken yet.

    Reasoning has no whitespace at its ends, nor has text next to reasoning or a call. A text that stands alone keeps
    all of its own. Whitespace is held back until it is known what follows. Two texts with something between them are
    parted by an empty line, since clients join them; so is reasoning.

    customs tools whose calls are told as the text that they take
    calls   tool calls opened so far
    argued  whether the latest one has arguments
    """

    def __init__(self, customs: Collection[str] = ()) -> None:
        self._customs = customs
        self._input: Input | None = None
        self._pieces: list[Piece] = []
        self._space = ""
        self._thought = False
        self._between = False
        self._kinds: set[type[Text | Reasoning]] = set()
        self.calls = 0
        self.argued = False

    def say(self, text: str) -> None:
        """More text."""
        if self._between:
            text = text.lstrip()
            if not text:
                return
            self._between = False
            self._space = self._gap(Text)
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._add(Text(kept))

    def think(self, text: str) -> None:
        """More reasoning."""
        if not self._thought:
            self.part()
            text = text.lstrip()
            self._thought = bool(text)
            self._space = self._gap(Reasoning) if text else ""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._add(Reasoning(kept))

    def part(self) -> None:
        """What was said is over, and something else begins: whitespace around here is nobody's."""
        self._end_input()
        self._space, self._between, self._thought = "", True, False

    def call(self, name: str) -> None:
        """A call begins."""
        self.part()
        custom = name in self._customs
        self._input = Input() if custom else None
        self._add(CallOpened(self.calls, name, "custom" if custom else "function"))
        self.calls += 1
        self.argued = False

    def arguments(self, text: str) -> None:
        """More of the arguments of the latest call."""
        self.argued = self.argued or bool(text)
        self._add(CallArguments(self.calls - 1, text if self._input is None else self._input.push(text)))

    def finish(self) -> None:
        """Nothing else follows: whitespace at the end of a text is text."""
        self._end_input()
        if not self._thought:
            self._add(Text(self._space))
        self._space = ""

    def take(self) -> list[Piece]:
        """What was found since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _end_input(self) -> None:
        if self._input is not None:
            self._add(CallArguments(self.calls - 1, self._input.finish()))
            self._input = None

    def _gap(self, kind: type[Text | Reasoning]) -> str:
        return "\n\n" if kind in self._kinds else ""

    def _add(self, piece: Piece) -> None:
        if not isinstance(piece, CallOpened):
            if not piece.text:
                return
            if isinstance(piece, Text | Reasoning):
                self._kinds.add(type(piece))
            last = self._pieces[-1] if self._pieces else None
            if isinstance(last, type(piece)) and not isinstance(last, CallOpened):
                piece = _joined(last, piece)
                self._pieces.pop()
        self._pieces.append(piece)


def _joined(last: Piece, piece: Piece) -> Piece:
    """Two neighbours of one kind as one."""
    match last, piece:
        case Text(before), Text(after):
            return Text(before + after)
        case Reasoning(before), Reasoning(after):
            return Reasoning(before + after)
        case CallArguments(index, before), CallArguments(_, after):
            return CallArguments(index, before + after)
    raise AssertionError(last, piece)
