"""Reasoning: what opens and closes it, and whether a prompt has opened it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.chat_format.lark_writer import LarkWriter
from engine.types.request import ReasoningLimit


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers around what a model says before its answer.

    label  what stands behind what opens it
    first  the token that opens it, where that is one
    last   the tokens that close it
    """

    opens: str
    closes: str
    label: str = ""
    first: int | None = None
    last: tuple[int, ...] = ()

    def is_open(self, opened: str) -> bool:
        """Whether the prompt's end `opened` leaves the model inside its reasoning."""
        return opened.rfind(self.opens) > opened.rfind(self.closes)

    def is_closed(self, opened: str) -> bool:
        """Whether the reasoning is behind it, if there was any."""
        return self.closes in opened and not self.is_open(opened)

    def reasoning_limit(self, budget: int, opened: str) -> ReasoningLimit | None:
        """A limit in tokens; None: the prompt has closed the reasoning, or nobody can tell where it begins."""
        if self.is_open(opened):
            return ReasoningLimit(None, self.last, budget)
        return None if self.first is None or self.is_closed(opened) else ReasoningLimit(self.first, self.last, budget)

    def grammar_rule(self, lark: LarkWriter, opened: str) -> str:
        """Reasoning up to its end as an expression of the grammar: there must be some, may be some, or is none."""
        if self.is_open(opened):
            return f"{lark.until(self.closes)} {lark.space()}"
        if self.is_closed(opened):
            return ""
        return f"({lark.space()} {lark.literals(self.opens, self.label)} {lark.until(self.closes)} {lark.space()})?"
