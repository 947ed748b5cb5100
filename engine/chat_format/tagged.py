"""Answers in which reasoning and calls stand between markers, and everything else is text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.chat_format.calls import CallableTools
from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.lark_writer import ANYTHING, LarkWriter
from engine.chat_format.message import AnswerConstraint, Tool, ToolChoice
from engine.chat_format.reasoning import ReasoningMarkers
from engine.chat_format.source import Literals, Steps, TextSource
from engine.chat_format.tool_call_markers import ToolCallMarkers
from engine.types.request import ReasoningLimit

# Where a call may be a bare object, no text begins like one.
_NO_OBJECT = r"(\s*[^{\s](?s:.)*)?"


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """How such an answer is read.

    hidden_markers  special tokens that are part of no text
    """

    reasoning: ReasoningMarkers | None = None
    frame: ToolCallMarkers | None = None
    hidden_markers: frozenset[str] = frozenset()
    _end_literals: Literals = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        closes = () if self.reasoning is None else (self.reasoning.closes,)
        object.__setattr__(self, "_end_literals", Literals((*closes, *self.hidden_markers)))

    @property
    def supports_reasoning(self) -> bool:
        """Whether the model may reason before it answers."""
        return self.reasoning is not None

    @property
    def supports_tool_calls(self) -> bool:
        """Whether it has a way to call tools."""
        return self.frame is not None

    def reasoning_limit(self, budget: int, opened: str) -> ReasoningLimit | None:
        """A limit to the reasoning in tokens; None: there is none to limit."""
        return None if self.reasoning is None else self.reasoning.reasoning_limit(budget, opened)

    def parse(self, source: TextSource, speech: DeltaBuffer, tools: Mapping[str, Tool], opened: str) -> Steps[None]:
        """Read an answer behind what the prompt ended with."""
        if self.reasoning is not None:
            yield from self._reasoning(self.reasoning, source, speech, opened)
        if self.frame is not None and tools:
            yield from self._calls(self.frame, source, speech, tools)
        else:
            yield from self._text(Literals(self.hidden_markers), source, speech)
        speech.finish()

    def grammar_rule(
        self, lark: LarkWriter, tools: Sequence[Tool], choice: ToolChoice, body: AnswerConstraint | None, opened: str
    ) -> str:
        """An answer as an expression of the grammar."""
        thoughts = "" if self.reasoning is None else self.reasoning.grammar_rule(lark, opened)
        if self.frame is None or not tools:
            return f"{thoughts} {lark.answer_body(body) if body else lark.text()}"
        return f"{thoughts} {self._answer(lark, self.frame, tools, choice, body)}"

    def _answer(
        self,
        lark: LarkWriter,
        frame: ToolCallMarkers,
        tools: Sequence[Tool],
        choice: ToolChoice,
        body: AnswerConstraint | None,
    ) -> str:
        text = lark.text(frame.opening[0], like=(_NO_OBJECT if frame.allows_unmarked else ANYTHING,))
        calls = frame.grammar_rule(lark, tools, parallel=choice.parallel)
        if choice.mode == "required":
            return calls
        if body is not None:
            return lark.answer_body(body) if choice.mode == "none" else f"({lark.answer_body(body)} | {calls})"
        if choice.mode == "none":
            return text
        rest = frame.grammar_after_opening(lark, tools, parallel=choice.parallel)
        later = f"({lark.until(frame.opening[0])} {rest} {lark.space()}){'*' if choice.parallel else '?'} {text}"
        return f"({calls} | {later})" if frame.allows_unmarked else later

    def _reasoning(
        self, thoughts: ReasoningMarkers, source: TextSource, speech: DeltaBuffer, opened: str
    ) -> Steps[None]:
        if not thoughts.is_open(opened):
            if thoughts.is_closed(opened):
                return
            if not (yield from source.attempt(source.expect("", thoughts.opens))):
                return
            yield from source.accept(thoughts.label)
        while (found := (yield from source.until(self._end_literals, speech.add_reasoning))) in self.hidden_markers:
            if found == thoughts.closes:
                break
        if found:
            speech.end_part()

    def _text(self, literals: Literals, source: TextSource, speech: DeltaBuffer) -> Steps[None]:
        while (yield from source.until(literals, speech.add_text)):
            pass

    def _calls(
        self, frame: ToolCallMarkers, source: TextSource, speech: DeltaBuffer, tools: Mapping[str, Tool]
    ) -> Steps[None]:
        opening = frame.opening[0]
        offer = CallableTools(tools, only=frame.allows_unmarked)
        if frame.allows_unmarked:
            called = yield from frame.parse_unmarked(source, speech, offer)
            # Without a marker nothing says that the beginning of an object is no text.
            if called and source.is_broken:
                source.discard()
        literals = Literals((opening, *self.hidden_markers))
        while found := (yield from source.until(literals, speech.add_text)):
            if found != opening:
                continue
            called = yield from frame.parse(source, speech, offer)
            if source.is_broken:
                source.discard()
                speech.end_part()
            elif not called and opening not in self.hidden_markers:
                speech.add_text(opening)
