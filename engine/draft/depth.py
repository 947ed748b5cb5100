"""How many tokens to draft for each sequence of a step, so that tokens come fastest.

What steps cost (cost.py) and how often drafts are right (acceptance.py) is learnt from what happens, and offer.py finds
the depths that promise most. Nothing here reads a clock or draws a number: equal inputs give equal depths.

Measured by tests/engine/draft/simulate.py, one sequence and 2,000 rounds after 20 to learn, over 132 worlds of eleven
costs, chances of 0.1 to 0.98 and drafting that is free or costs a quarter of a step: 0.993 of the best fixed depth on
average, 0.985 at worst. A choice takes 80 us for one sequence and 350 us for 64, at depths of up to 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.draft.acceptance import Acceptance
from engine.draft.cost import Numbers, StepCost
from engine.draft.offer import Candidate, Offer

__all__ = ["AdaptiveDepth", "Candidate", "Depth", "FixedDepth"]

# Trying what seems not to pay may cost this share of the time. It is saved up for, for so many steps at most.
_CURIOSITY, _PATIENCE = 0.005, 500
# Weight of a new measurement of drafting.
_WEIGHT = 0.15


class Depth(Protocol):
    """Chooses depths, and is told what came of it."""

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """Tokens to draft for each candidate, in a step that computes `rows` rows anyway (theirs among them)."""

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Of a draft, `judged` tokens were compared with what was emitted, `accepted` of them were right.

        What stood behind a wrong token or behind the end of the text was not judged.
        """

    def drafted(self, kind: str, levels: int, seconds: float) -> None:
        """Drafting up to `levels` tokens for a whole step took so long."""

    def stepped(self, rows: int, seconds: float) -> None:
        """A step of so many rows, drafts among them, took so long, without the drafting."""


class FixedDepth:
    """The same depth always; implements Depth."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """The depth, or less where a candidate's limit is less."""
        return [min(self._depth, candidate.limit) for candidate in candidates]

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Nothing is learnt."""

    def drafted(self, kind: str, levels: int, seconds: float) -> None:
        """Nothing is learnt."""

    def stepped(self, rows: int, seconds: float) -> None:
        """Nothing is learnt."""


class AdaptiveDepth:
    """The depths that promise most tokens a second; implements Depth. One for each model, for as long as it runs.

    It starts with no drafts, and goes on to at most twice the rows that were ever measured, if that promises more.
    """

    def __init__(self) -> None:
        self._cost = StepCost()
        self._acceptance: dict[str, Acceptance] = {}
        self._level_seconds: dict[str, float] = {}
        self._savings = 0.0

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """The best depths as far as is known; now and then others, to know better."""
        room = self._cost.frontier - rows
        if room < 1 or not any(candidate.limit for candidate in candidates):
            return [0] * len(candidates)
        known = {kind: self._acceptance.setdefault(kind, Acceptance()) for kind in _kinds(candidates)}
        for acceptance in known.values():
            acceptance.fade()
        offer = Offer(candidates, known, self._level_seconds, rows=rows)
        depths = self._decide(offer, np.arange(rows, rows + min(room, offer.size) + 1))
        for candidate, depth in zip(candidates, depths, strict=True):
            known[candidate.kind].tried(depth)
        return depths

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Learn how often drafts of a kind are right."""
        self._acceptance.setdefault(kind, Acceptance()).observe(judged, accepted)

    def drafted(self, kind: str, levels: int, seconds: float) -> None:
        """Learn what a level of drafting costs."""
        if levels > 0:
            known = self._level_seconds.get(kind, seconds / levels)
            self._level_seconds[kind] = known + _WEIGHT * (seconds / levels - known)

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step costs."""
        self._cost.observe(rows, seconds)

    def _decide(self, offer: Offer, rows: Numbers) -> list[int]:
        """The best choice, or another one once what that is expected to lose was saved up."""
        costs = self._cost.seconds(rows)
        best = offer.best(costs)
        self._savings = min(self._savings + _CURIOSITY * best.seconds, _PATIENCE * _CURIOSITY * best.seconds)
        other = offer.curious(best, costs, self._cost.ages(rows))
        if other.loss > self._savings:
            return offer.depths(best)
        self._savings -= other.loss
        return offer.depths(other)


def _kinds(candidates: Sequence[Candidate]) -> list[str]:
    """The kinds of some candidates, each once, in order."""
    return list(dict.fromkeys(candidate.kind for candidate in candidates))
