"""Reasoning: what opens and closes it, and whether a prompt has opened it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.chat_format.lark import Lark
from engine.types.request import Thinking


@dataclass(frozen=True, slots=True)
class Thoughts:
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

    def begun(self, opened: str) -> bool:
        """Whether the prompt's end `opened` leaves the model inside its reasoning."""
        return opened.rfind(self.opens) > opened.rfind(self.closes)

    def over(self, opened: str) -> bool:
        """Whether the reasoning is behind it, if there was any."""
        return self.closes in opened and not self.begun(opened)

    def limit(self, budget: int, opened: str) -> Thinking | None:
        """A limit in tokens; None: the prompt has closed the reasoning, or nobody can tell where it begins."""
        if self.begun(opened):
            return Thinking(None, self.last, budget)
        return None if self.first is None or self.over(opened) else Thinking(self.first, self.last, budget)

    def write(self, lark: Lark, opened: str) -> str:
        """Reasoning up to its end as an expression of the grammar: there must be some, may be some, or is none."""
        if self.begun(opened):
            return f"{lark.until(self.closes)} {lark.space()}"
        if self.over(opened):
            return ""
        return f"({lark.space()} {lark.literals(self.opens, self.label)} {lark.until(self.closes)} {lark.space()})?"
