"""How one model writes what it means: its reasoning, its calls of tools and its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.chat_format.answer_parser import AnswerParser
from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.lark_writer import LarkWriter
from engine.chat_format.message import AnswerConstraint, Tool, ToolChoice
from engine.chat_format.source import Steps, TextSource
from engine.errors import InvalidRequest
from engine.types.request import Grammar, ReasoningLimit


class AnswerFormat(Protocol):
    """Where reasoning, calls and text stand in an answer."""

    @property
    def supports_reasoning(self) -> bool:
        """Whether the model may reason before it answers."""
        ...

    @property
    def supports_tool_calls(self) -> bool:
        """Whether it has a way to call tools."""
        ...

    def parse(self, source: TextSource, speech: DeltaBuffer, tools: Mapping[str, Tool], opened: str) -> Steps[None]:
        """Read an answer behind what the prompt ended with."""
        ...

    def grammar_rule(
        self, lark: LarkWriter, tools: Sequence[Tool], choice: ToolChoice, body: AnswerConstraint | None, opened: str
    ) -> str:
        """An answer as an expression of the grammar."""
        ...

    def reasoning_limit(self, budget: int, opened: str) -> ReasoningLimit | None:
        """A limit to the reasoning in tokens; None: there is none to limit."""
        ...


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Found once for a model, by `detect_chat_format`.

    answer_format    where reasoning, calls and text stand in an answer
    tokens   texts that are a token of their own, as most markers are
    special  whether its markers are special tokens: then requests must keep those in their text (`Request.include_special_tokens`)
    """

    answer_format: AnswerFormat
    tokens: Mapping[str, int]
    special: bool = False

    @property
    def supports_reasoning(self) -> bool:
        """Whether the model may reason before it answers."""
        return self.answer_format.supports_reasoning

    @property
    def supports_tool_calls(self) -> bool:
        """Whether it has a way to call tools."""
        return self.answer_format.supports_tool_calls

    def parser(self, tools: Sequence[Tool], opened: str) -> AnswerParser:
        """For one answer. Without tools, calls are text.

        opened  what the prompt ended with (`RenderedPrompt.generation_prompt`)
        """
        source, speech = TextSource(), DeltaBuffer({tool.name for tool in tools if tool.kind == "custom"})
        return AnswerParser(
            source, speech, self.answer_format.parse(source, speech, {tool.name: tool for tool in tools}, opened)
        )

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, body: AnswerConstraint | None, opened: str
    ) -> Grammar | None:
        """What an answer must follow, from its first token on; None: anything goes.

        With "auto" only strict tools bind, unless calls are restricted otherwise. A body is for answers without calls.
        Raises InvalidRequest where the model has no way to do what is asked, or a grammar cannot be read.
        """
        chosen = [tool for tool in tools if not choice.names or tool.name in choice.names]
        if choice.mode == "required" and not (chosen and self.supports_tool_calls):
            raise InvalidRequest(
                "tool_choice", "there is no tool to call" if self.supports_tool_calls else "this model calls no tools"
            )
        free = choice.mode == "auto" and choice.parallel and not choice.names and not any(tool.strict for tool in tools)
        if body is None and (not chosen or not self.supports_tool_calls or free):
            return None
        lark = LarkWriter(self.tokens)
        return lark.grammar(self.answer_format.grammar_rule(lark, chosen, choice, body, opened))

    def reasoning_limit(self, budget: int, opened: str) -> ReasoningLimit | None:
        """A limit to the reasoning in tokens; None: there is none to limit."""
        return self.answer_format.reasoning_limit(budget, opened)
