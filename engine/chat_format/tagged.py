"""Answers with reasoning and tool calls between markers; everything else is text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.chat_format.calls import CallableTools
from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.lark_writer import ANYTHING, LarkWriter
from engine.chat_format.markers import ReasoningMarkers, ToolCallMarkers
from engine.chat_format.message import AnswerConstraint, Tool, ToolChoice
from engine.chat_format.source import Literals, Parser, TextSource
from engine.types.request import ReasoningLimit

# If a call needs no opening marker, text must not begin with an object.
_NO_OBJECT = r"(\s*[^{\s](?s:.)*)?"


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """Layout of an answer with marked reasoning and tool calls.

    hidden_markers  special tokens that are part of no text
    """

    reasoning: ReasoningMarkers | None = None
    tool_calls: ToolCallMarkers | None = None
    hidden_markers: frozenset[str] = frozenset()
    _end_literals: Literals = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        closes = () if self.reasoning is None else (self.reasoning.closes,)
        object.__setattr__(self, "_end_literals", Literals((*closes, *self.hidden_markers)))

    @property
    def supports_reasoning(self) -> bool:
        """Whether the model may write reasoning before its answer."""
        return self.reasoning is not None

    @property
    def supports_tool_calls(self) -> bool:
        """Whether the model can call tools."""
        return self.tool_calls is not None

    def reasoning_limit(self, budget: int, generation_prompt: str) -> ReasoningLimit | None:
        """A limit of `budget` reasoning tokens; None: the answer has no reasoning to limit."""
        return None if self.reasoning is None else self.reasoning.reasoning_limit(budget, generation_prompt)

    def parse(
        self, source: TextSource, deltas: DeltaBuffer, tools: Mapping[str, Tool], generation_prompt: str
    ) -> Parser[None]:
        """Parse an answer that follows `generation_prompt` into `deltas`."""
        if self.reasoning is not None:
            yield from self._reasoning(self.reasoning, source, deltas, generation_prompt)
        if self.tool_calls is not None and tools:
            yield from self._calls(self.tool_calls, source, deltas, tools)
        else:
            yield from self._text(Literals(self.hidden_markers), source, deltas)
        deltas.finish()

    def grammar_rule(
        self,
        lark: LarkWriter,
        tools: Sequence[Tool],
        choice: ToolChoice,
        constraint: AnswerConstraint | None,
        generation_prompt: str,
    ) -> str:
        """A grammar expression for the whole answer."""
        reasoning = "" if self.reasoning is None else self.reasoning.grammar_rule(lark, generation_prompt)
        if self.tool_calls is None or not tools:
            return f"{reasoning} {lark.constrained_text(constraint) if constraint else lark.text()}"
        return f"{reasoning} {self._answer(lark, self.tool_calls, tools, choice, constraint)}"

    def _answer(
        self,
        lark: LarkWriter,
        tool_calls: ToolCallMarkers,
        tools: Sequence[Tool],
        choice: ToolChoice,
        constraint: AnswerConstraint | None,
    ) -> str:
        text = lark.text(tool_calls.opening[0], patterns=(_NO_OBJECT if tool_calls.allows_unmarked else ANYTHING,))
        calls = tool_calls.grammar_rule(lark, tools, parallel=choice.parallel)
        if choice.mode == "required":
            return calls
        if constraint is not None:
            constrained = lark.constrained_text(constraint)
            return constrained if choice.mode == "none" else f"({constrained} | {calls})"
        if choice.mode == "none":
            return text
        rest = tool_calls.grammar_after_opening(lark, tools, parallel=choice.parallel)
        later = f"({lark.until(tool_calls.opening[0])} {rest} {lark.space()}){'*' if choice.parallel else '?'} {text}"
        return f"({calls} | {later})" if tool_calls.allows_unmarked else later

    def _reasoning(
        self, reasoning: ReasoningMarkers, source: TextSource, deltas: DeltaBuffer, generation_prompt: str
    ) -> Parser[None]:
        if not reasoning.is_open(generation_prompt):
            if reasoning.is_closed(generation_prompt):
                return
            if not (yield from source.attempt(source.expect("", reasoning.opens))):
                return
            yield from source.accept(reasoning.label)
        while (literal := (yield from source.until(self._end_literals, deltas.add_reasoning))) in self.hidden_markers:
            if literal == reasoning.closes:
                break
        if literal:
            deltas.end_part()

    def _text(self, literals: Literals, source: TextSource, deltas: DeltaBuffer) -> Parser[None]:
        while (yield from source.until(literals, deltas.add_text)):
            pass

    def _calls(
        self, tool_calls: ToolCallMarkers, source: TextSource, deltas: DeltaBuffer, tools: Mapping[str, Tool]
    ) -> Parser[None]:
        opening = tool_calls.opening[0]
        callable_tools = CallableTools(tools, known_only=tool_calls.allows_unmarked)
        if tool_calls.allows_unmarked:
            called = yield from tool_calls.parse_unmarked(source, deltas, callable_tools)
            # An unmarked object that was cut is an incomplete call, not text.
            if called and source.is_broken:
                source.discard()
        literals = Literals((opening, *self.hidden_markers))
        while literal := (yield from source.until(literals, deltas.add_text)):
            if literal != opening:
                continue
            called = yield from tool_calls.parse(source, deltas, callable_tools)
            if source.is_broken:
                source.discard()
                deltas.end_part()
            elif not called and opening not in self.hidden_markers:
                deltas.add_text(opening)
