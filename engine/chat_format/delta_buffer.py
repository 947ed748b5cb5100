"""Buffer of parsed deltas: merges adjacent ones and strips whitespace between the parts of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from engine.chat_format.message import INPUT_FIELD, AnswerDelta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from engine.chat_format.source import Emit, Parser, TextSource

_UNESCAPED = re.compile(r'[^"\\]+')
_ALL = re.compile(r"(?s:.)+")
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]..")


class ToolInputDecoder:
    """Decodes the arguments of one call incrementally; the text does not depend on how they are chunked.

    Arguments of another shape are returned unchanged.
    """

    def __init__(self) -> None:
        self._decoded: list[str] = []
        self._source = TextSource()
        self._parser = _decode(self._source, self._decoded.append)

    def push(self, arguments: str) -> str:
        """Add arguments; the text that they complete."""
        self._source.push(arguments)
        return self._next()

    def finish(self) -> str:
        """End of the arguments; the remaining text."""
        self._source.end()
        return self._next()

    def _next(self) -> str:
        next(self._parser, None)
        text = "".join(self._decoded)
        self._decoded.clear()
        return text


def _decode(source: TextSource, emit: Callable[[str], None]) -> Parser[None]:
    if not (yield from source.attempt(source.expect("", "{", json.dumps(INPUT_FIELD), ":", '"'))):
        yield from source.match(_ALL, emit)
        return
    while True:
        yield from source.match(_UNESCAPED, emit)
        if (yield from source.peek()) != "\\":
            # The closing quote and everything after it.
            yield from source.match(_ALL, lambda _: None)
            return
        yield from _escape(source, emit)


def _escape(source: TextSource, emit: Emit) -> Parser[None]:
    """Decode one escape, or both of a surrogate pair; an incomplete escape is dropped."""
    text = yield from source.take(2)
    if text == "\\u":
        text += yield from source.take(4)
    if _HIGH_SURROGATE.fullmatch(text) and (yield from source.accept("\\u")):
        text += "\\u" + (yield from source.take(4))
    try:
        emit(json.loads(f'"{text}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except ValueError:
        return


class DeltaBuffer:
    """Deltas of one answer that were parsed but not taken yet.

    Reasoning, and text next to reasoning or a tool call, is stripped; text alone keeps its whitespace. Whitespace at
    the end is held back until the next part is known. Two texts with another part between them are separated by an
    empty line, because clients concatenate them; the same holds for reasoning.

    custom_tools   names of custom tools; their input is emitted as text, not as JSON
    calls          tool calls started so far
    has_arguments  whether the latest tool call has arguments
    """

    def __init__(self, custom_tools: Collection[str] = ()) -> None:
        self._custom_tools = custom_tools
        self._input: ToolInputDecoder | None = None
        self._deltas: list[AnswerDelta] = []
        self._space = ""
        self._in_reasoning = False
        self._after_part = False
        self._kinds: set[type[TextDelta | ReasoningDelta]] = set()
        self.calls = 0
        self.has_arguments = False

    def add_text(self, text: str) -> None:
        if self._after_part:
            text = text.lstrip()
            if not text:
                return
            self._after_part = False
            self._space = self._gap(TextDelta)
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        self._add(TextDelta(stripped))

    def add_reasoning(self, text: str) -> None:
        if not self._in_reasoning:
            self.end_part()
            text = text.lstrip()
            self._in_reasoning = bool(text)
            self._space = self._gap(ReasoningDelta) if text else ""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        self._add(ReasoningDelta(stripped))

    def end_part(self) -> None:
        """End the current part; whitespace around this position is dropped."""
        self._end_input()
        self._space, self._after_part, self._in_reasoning = "", True, False

    def begin_call(self, name: str) -> None:
        self.end_part()
        custom = name in self._custom_tools
        self._input = ToolInputDecoder() if custom else None
        self._add(ToolCallStart(self.calls, name, "custom" if custom else "function"))
        self.calls += 1
        self.has_arguments = False

    def add_arguments(self, text: str) -> None:
        """Append to the arguments of the latest tool call."""
        self.has_arguments = self.has_arguments or bool(text)
        self._add(ToolCallDelta(self.calls - 1, text if self._input is None else self._input.push(text)))

    def finish(self) -> None:
        """End of the answer: trailing whitespace of its text is kept."""
        self._end_input()
        if not self._in_reasoning:
            self._add(TextDelta(self._space))
        self._space = ""

    def take(self) -> list[AnswerDelta]:
        """Remove and return the deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _end_input(self) -> None:
        if self._input is not None:
            self._add(ToolCallDelta(self.calls - 1, self._input.finish()))
            self._input = None

    def _gap(self, kind: type[TextDelta | ReasoningDelta]) -> str:
        return "\n\n" if kind in self._kinds else ""

    def _add(self, delta: AnswerDelta) -> None:
        if not isinstance(delta, ToolCallStart):
            if not delta.text:
                return
            if isinstance(delta, TextDelta | ReasoningDelta):
                self._kinds.add(type(delta))
            last = self._deltas[-1] if self._deltas else None
            if isinstance(last, type(delta)) and not isinstance(last, ToolCallStart):
                delta = _joined(last, delta)
                self._deltas.pop()
        self._deltas.append(delta)


def _joined(last: AnswerDelta, delta: AnswerDelta) -> AnswerDelta:
    """Two adjacent deltas of one kind as one."""
    match last, delta:
        case TextDelta(before), TextDelta(after):
            return TextDelta(before + after)
        case ReasoningDelta(before), ReasoningDelta(after):
            return ReasoningDelta(before + after)
        case ToolCallDelta(index, before), ToolCallDelta(_, after):
            return ToolCallDelta(index, before + after)
    raise AssertionError(last, delta)
