"""How one model writes what it means: its reasoning, its calls of tools and its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.chat_format.lark import Lark
from engine.chat_format.message import Body, Tool, ToolChoice
from engine.chat_format.reader import Reader
from engine.chat_format.source import Source, Steps
from engine.chat_format.speech import Speech
from engine.errors import InvalidRequest
from engine.types.request import Grammar, Thinking


class Style(Protocol):
    """Where reasoning, calls and text stand in an answer."""

    @property
    def reasons(self) -> bool:
        """Whether the model may reason before it answers."""
        ...

    @property
    def calls(self) -> bool:
        """Whether it has a way to call tools."""
        ...

    def read(self, source: Source, speech: Speech, tools: Mapping[str, Tool], opened: str) -> Steps[None]:
        """Read an answer behind what the prompt ended with."""
        ...

    def write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, body: Body | None, opened: str) -> str:
        """An answer as an expression of the grammar."""
        ...

    def limit(self, budget: int, opened: str) -> Thinking | None:
        """A limit to the reasoning in tokens; None: there is none to limit."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """Found once for a model, by `find_dialect`.

    style    where reasoning, calls and text stand in an answer
    tokens   texts that are a token of their own, as most markers are
    special  whether its markers are special tokens: then requests must keep those in their text (`Request.special`)
    """

    style: Style
    tokens: Mapping[str, int]
    special: bool = False

    @property
    def reasons(self) -> bool:
        """Whether the model may reason before it answers."""
        return self.style.reasons

    @property
    def calls(self) -> bool:
        """Whether it has a way to call tools."""
        return self.style.calls

    def reader(self, tools: Sequence[Tool], opened: str) -> Reader:
        """For one answer. Without tools, calls are text.

        opened  what the prompt ended with (`Rendering.opened`)
        """
        source, speech = Source(), Speech({tool.name for tool in tools if tool.kind == "custom"})
        return Reader(source, speech, self.style.read(source, speech, {tool.name: tool for tool in tools}, opened))

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, body: Body | None, opened: str) -> Grammar | None:
        """What an answer must follow, from its first token on; None: anything goes.

        With "auto" only strict tools bind, unless calls are restricted otherwise. A body is for answers without calls.
        Raises InvalidRequest where the model has no way to do what is asked, or a grammar cannot be read.
        """
        chosen = [tool for tool in tools if not choice.names or tool.name in choice.names]
        if choice.mode == "required" and not (chosen and self.calls):
            raise InvalidRequest(
                "tool_choice", "there is no tool to call" if self.calls else "this model calls no tools"
            )
        free = choice.mode == "auto" and choice.parallel and not choice.names and not any(tool.strict for tool in tools)
        if body is None and (not chosen or not self.calls or free):
            return None
        lark = Lark(self.tokens)
        return lark.grammar(self.style.write(lark, chosen, choice, body, opened))

    def thinking(self, budget: int, opened: str) -> Thinking | None:
        """A limit to the reasoning in tokens; None: there is none to limit."""
        return self.style.limit(budget, opened)
