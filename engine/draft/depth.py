"""How many tokens to draft for each sequence of a step: who says it, and the one who says the same always.

adaptive.py is the one who learns it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from engine.draft.offer import Candidate
from engine.schedule.step_cost import StepCost


class Depth(Protocol):
    """Chooses depths, and is told what came of it, what steps cost among it (`cost`)."""

    cost: StepCost

    def rests(self, kind: str, rows: int, running: int = 0) -> int:
        """In how many steps drafts of a kind are not worth being considered; 0: in the step at hand they are.

        rows     that the step computes anyway; in those behind it they are about as many
        running  sequences that will speak together when prompts are read; those of the step are, whoever else is
        """

    def likelier(self, kind: str, other: str) -> bool:
        """Whether drafts of a kind seem to be right as often as those of another, that take longer to make."""

    def outdone(self, kind: str, rows: int) -> None:
        """All drafts of a kind in a step were likelier wrong than those of another, so none of them is a candidate."""

    def silent(self, kind: str, rows: int, seconds: float) -> None:
        """A kind was asked in a step, which took so long, and had nothing to say."""

    def choose(self, candidates: Sequence[Candidate], *, rows: int, running: int = 0) -> list[int]:
        """Tokens to draft for each candidate, in a step that computes `rows` rows anyway (theirs among them).

        running  as above
        """

    def again(self, kind: str, most: int) -> tuple[int, int]:
        """How deep drafts of a kind are in the choice just made, of that kind alone, and for how many steps it stands.

        For `most` more steps like this one: nothing else is to be asked then.
        """

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Of a draft, `judged` tokens were compared with what was emitted, `accepted` of them were right.

        What stood behind a wrong token or behind the end of the text was not judged.
        """

    def drafted(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """Drafting up to `levels` tokens for each of so many sequences took so long."""

    def caught_up(self, kind: str, sequences: int, levels: int, seconds: float, read: int) -> None:
        """The same, but much of it went into reading texts: that says nothing of the levels to come.

        read  tokens that texts, which now are read to their end, had more than was read of them before
        """

    def stepped(self, rows: int, seconds: float) -> None:
        """A step of so many rows, drafts among them, took so long, without the drafting."""

    def ended(self, tokens: int) -> None:
        """A sequence is over, and has said so much."""


class FixedDepth:
    """The same depth always; implements Depth."""

    def __init__(self, depth: int, cost: StepCost | None = None) -> None:
        self._depth, self.cost = depth, cost or StepCost()

    def rests(self, kind: str, rows: int, running: int = 0) -> int:
        """In all of them where nothing is ever drafted."""
        return sys.maxsize if self._depth == 0 else 0

    def likelier(self, kind: str, other: str) -> bool:
        """Nothing is known."""
        return True

    def outdone(self, kind: str, rows: int) -> None:
        """Nothing is learnt."""

    def silent(self, kind: str, rows: int, seconds: float) -> None:
        """Nothing is learnt."""

    def choose(self, candidates: Sequence[Candidate], *, rows: int, running: int = 0) -> list[int]:
        """The depth, or less where a candidate's limit is less."""
        return [min(self._depth, candidate.limit) for candidate in candidates]

    def again(self, kind: str, most: int) -> tuple[int, int]:
        """For all of them."""
        return self._depth, most

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Nothing is learnt."""

    def drafted(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """Nothing is learnt."""

    def caught_up(self, kind: str, sequences: int, levels: int, seconds: float, read: int) -> None:
        """Nothing is learnt."""

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step costs: the depth is the same, but others want to know."""
        self.cost.observe(rows, seconds)

    def ended(self, tokens: int) -> None:
        """Nothing is learnt."""
