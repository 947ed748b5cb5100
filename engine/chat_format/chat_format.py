"""Chat format: how a model family writes reasoning, tool calls and text in its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.lark_writer import LarkWriter
from engine.chat_format.message import AnswerConstraint, AnswerDelta, Tool, ToolChoice
from engine.chat_format.source import Parser, TextSource
from engine.errors import InvalidRequest
from engine.types.request import Grammar, ReasoningLimit


class AnswerParser:
    """Parses the text of one answer into deltas; their content does not depend on how the text is chunked."""

    def __init__(self, source: TextSource, deltas: DeltaBuffer, parser: Parser[None]) -> None:
        self._source = source
        self._deltas = deltas
        self._parser = parser

    def push(self, text: str) -> list[AnswerDelta]:
        """Add text; deltas that are certain now."""
        self._source.push(text)
        next(self._parser, None)
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
        next(self._parser, None)
        return self._deltas.take()


class AnswerFormat(Protocol):
    """Layout of an answer: where its reasoning, tool calls and text are."""

    @property
    def supports_reasoning(self) -> bool:
        """Whether the model may write reasoning before its answer."""
        ...

    @property
    def supports_tool_calls(self) -> bool:
        """Whether the model can call tools."""
        ...

    def parse(
        self, source: TextSource, deltas: DeltaBuffer, tools: Mapping[str, Tool], generation_prompt: str
    ) -> Parser[None]:
        """Parse an answer that follows `generation_prompt` into `deltas`."""
        ...

    def grammar_rule(
        self,
        lark: LarkWriter,
        tools: Sequence[Tool],
        choice: ToolChoice,
        constraint: AnswerConstraint | None,
        generation_prompt: str,
    ) -> str:
        """A grammar expression for the whole answer."""
        ...

    def reasoning_limit(self, budget: int, generation_prompt: str) -> ReasoningLimit | None:
        """A limit of `budget` reasoning tokens; None: the answer has no reasoning to limit."""
        ...


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Chat format of one model, found by `detect_chat_format`.

    answer_format  layout of reasoning, tool calls and text
    tokens         added tokens by their text; most markers are one token
    special        whether the markers are special tokens: then requests need `include_special_tokens`
    """

    answer_format: AnswerFormat
    tokens: Mapping[str, int]
    special: bool = False

    @property
    def supports_reasoning(self) -> bool:
        """Whether the model may write reasoning before its answer."""
        return self.answer_format.supports_reasoning

    @property
    def supports_tool_calls(self) -> bool:
        """Whether the model can call tools."""
        return self.answer_format.supports_tool_calls

    def parser(self, tools: Sequence[Tool], generation_prompt: str) -> AnswerParser:
        """A parser of one answer that follows `generation_prompt`. Without tools, tool calls are parsed as text."""
        source, deltas = TextSource(), DeltaBuffer({tool.name for tool in tools if tool.kind == "custom"})
        return AnswerParser(
            source,
            deltas,
            self.answer_format.parse(source, deltas, {tool.name: tool for tool in tools}, generation_prompt),
        )

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, constraint: AnswerConstraint | None, generation_prompt: str
    ) -> Grammar | None:
        """The grammar of an answer, from its first token on; None: the answer is unconstrained.

        With mode "auto", tools without `strict` are unconstrained unless `choice` restricts calls. `constraint` is for
        answers without tool calls.
        Raises InvalidRequest if the model cannot do what is required, or a grammar of the request cannot be parsed.
        """
        chosen = [tool for tool in tools if not choice.names or tool.name in choice.names]
        if choice.mode == "required" and not (chosen and self.supports_tool_calls):
            raise InvalidRequest(
                "tool_choice", "there is no tool to call" if self.supports_tool_calls else "this model calls no tools"
            )
        unconstrained = (
            choice.mode == "auto" and choice.parallel and not choice.names and not any(tool.strict for tool in tools)
        )
        if constraint is None and (not chosen or not self.supports_tool_calls or unconstrained):
            return None
        lark = LarkWriter(self.tokens)
        return lark.grammar(self.answer_format.grammar_rule(lark, chosen, choice, constraint, generation_prompt))

    def reasoning_limit(self, budget: int, generation_prompt: str) -> ReasoningLimit | None:
        """A limit of `budget` reasoning tokens; None: the answer has no reasoning to limit."""
        return self.answer_format.reasoning_limit(budget, generation_prompt)
