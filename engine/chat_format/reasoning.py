"""Markers of reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from engine.chat_format.lark_writer import LarkWriter
from engine.types.request import ReasoningLimit


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers around the reasoning before an answer.

    label        literal after the opening marker
    start_token  opening marker as a token, if it is one token
    end_tokens   tokens of the closing marker
    """

    opens: str
    closes: str
    label: str = ""
    start_token: int | None = None
    end_tokens: tuple[int, ...] = ()

    def is_open(self, generation_prompt: str) -> bool:
        """Whether the generation prompt ends inside reasoning."""
        return generation_prompt.rfind(self.opens) > generation_prompt.rfind(self.closes)

    def is_closed(self, generation_prompt: str) -> bool:
        """Whether the generation prompt ends after closed reasoning."""
        return self.closes in generation_prompt and not self.is_open(generation_prompt)

    def reasoning_limit(self, budget: int, generation_prompt: str) -> ReasoningLimit | None:
        """A limit of `budget` tokens; None: reasoning is closed already, or its opening marker is not one token."""
        if self.is_open(generation_prompt):
            return ReasoningLimit(None, self.end_tokens, budget)
        return (
            None
            if self.start_token is None or self.is_closed(generation_prompt)
            else ReasoningLimit(self.start_token, self.end_tokens, budget)
        )

    def grammar_rule(self, lark: LarkWriter, generation_prompt: str) -> str:
        """Reasoning up to its closing marker: required if it is open, absent if it is closed, else optional."""
        if self.is_open(generation_prompt):
            return f"{lark.until(self.closes)} {lark.space()}"
        if self.is_closed(generation_prompt):
            return ""
        return f"({lark.space()} {lark.literals(self.opens, self.label)} {lark.until(self.closes)} {lark.space()})?"
