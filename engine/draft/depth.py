"""How many tokens to draft for each sequence of a step, so that tokens come fastest.

What steps cost (engine/cost.py) and how often drafts are right (acceptance.py) is learnt from what happens, and
offer.py finds the depths that promise most. Nothing here reads a clock or draws a number: equal inputs, equal depths.

Measured by tests/engine/draft/simulate.py, one sequence and 2,000 rounds after 20 to learn, over 198 worlds of eleven
costs, chances of 0.1 to 0.98 and drafting that is free or costs up to a quarter of a step: 0.99 of the best fixed depth
on average, 0.98 at worst. Thinking takes 0.1 ms for one sequence and 0.4 ms for 16, with drafts of up to 16 tokens, so
answers are kept (habit.py), and a kind of drafts that does not pay is not even asked for most of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import log2
from typing import Protocol

import numpy as np

from engine.cost import StepCost
from engine.draft.acceptance import Acceptance
from engine.draft.habit import Answer, Habit
from engine.draft.levels import LevelCost
from engine.draft.offer import Candidate, Choice, Offer

__all__ = ["AdaptiveDepth", "Candidate", "Depth", "FixedDepth"]

# Trying what seems not to pay may cost this share of the time. It is saved up for, for so many steps at most.
_CURIOSITY, _PATIENCE = 0.005, 500
# What thinking of it costs, as a share of a short step.
_THOUGHT = 0.1
# Steps are alike whose rows, in halvings, differ by less than one part in so many.
_LIKE = 3
# What was settled is not thought over for one step in so many of all that were taken; rests may take four.
_GREEN = 16
# How often drafts are right that are trusted.
_TRUST = 0.95
# Steps after which drafts of a kind may have become better than they were.
_LONG_AGO = 64
# Steps for which a kind whose drafts do not pay is not even asked, at most. In a step of fewer rows they may.
_LONGEST_REST, _FEWER = 63, 0.8


class Depth(Protocol):
    """Chooses depths, and is told what came of it, what steps cost among it (`cost`)."""

    cost: StepCost

    def rests(self, kind: str, rows: int) -> bool:
        """Whether drafts of a kind are not worth being considered in the next step, which computes `rows` anyway."""

    def likelier(self, kind: str, other: str) -> bool:
        """Whether drafts of a kind seem to be right as often as those of another, that take longer to make."""

    def outdone(self, kind: str, rows: int) -> None:
        """All drafts of a kind in a step were likelier wrong than those of another, so none of them is a candidate."""

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """Tokens to draft for each candidate, in a step that computes `rows` rows anyway (theirs among them)."""

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Of a draft, `judged` tokens were compared with what was emitted, `accepted` of them were right.

        What stood behind a wrong token or behind the end of the text was not judged.
        """

    def drafted(self, kind: str, levels: int, seconds: float) -> None:
        """Drafting up to `levels` tokens for a whole step took so long."""

    def caught_up(self, kind: str, levels: int, seconds: float) -> None:
        """The same, but much of it went into reading a text: that says nothing of the levels to come."""

    def stepped(self, rows: int, seconds: float) -> None:
        """A step of so many rows, drafts among them, took so long, without the drafting."""


class FixedDepth:
    """The same depth always; implements Depth."""

    def __init__(self, depth: int, cost: StepCost | None = None) -> None:
        self._depth, self.cost = depth, cost or StepCost()

    def rests(self, kind: str, rows: int) -> bool:
        """Only where nothing is ever drafted."""
        return self._depth == 0

    def likelier(self, kind: str, other: str) -> bool:
        """Nothing is known."""
        return True

    def outdone(self, kind: str, rows: int) -> None:
        """Nothing is learnt."""

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """The depth, or less where a candidate's limit is less."""
        return [min(self._depth, candidate.limit) for candidate in candidates]

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Nothing is learnt."""

    def drafted(self, kind: str, levels: int, seconds: float) -> None:
        """Nothing is learnt."""

    def caught_up(self, kind: str, levels: int, seconds: float) -> None:
        """Nothing is learnt."""

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step costs: the depth is the same, but others want to know."""
        self.cost.observe(rows, seconds)


class AdaptiveDepth:
    """The depths that promise most tokens a second; implements Depth. One for each model, for as long as it runs.

    It starts with no drafts, and goes on to at most twice the rows that were ever measured, if that promises more.
    Thinking is for steps in which something changed; where nothing does, it is done ever more seldom.

    trusted  kinds whose drafts are nearly always right, for all that is known before they are tried
    """

    def __init__(self, trusted: Collection[str] = ()) -> None:
        self._trusted = trusted
        self.cost = StepCost()
        self._acceptance: dict[str, Acceptance] = {}
        self._levels: dict[str, LevelCost] = {}
        self._habits: dict[Hashable, Habit] = {}
        self._rests: dict[str, _Rest] = {}
        self._considered: dict[str, int] = {}
        self._steps = self._thought = 0
        self._savings = 0.0
        # What was tried in the latest step, if anything was.
        self._trial: _Trial | None = None

    def rests(self, kind: str, rows: int) -> bool:
        """Whether drafts of a kind did not pay lately; they are looked at again after 63 steps at most."""
        rest = self._rests.get(kind)
        return rest is not None and rest.rests(self._steps, rows)

    def likelier(self, kind: str, other: str) -> bool:
        """By their first tokens, or where drafts of the kind were not considered for long."""
        one, two = (self._rates(each) for each in (kind, other))
        return one.survival(1) >= two.survival(1) or self._steps - self._considered.get(kind, 0) > _LONG_AGO

    def outdone(self, kind: str, rows: int) -> None:
        """The kind need not be asked for some steps."""
        self._rests.setdefault(kind, _Rest()).decide(0, self._steps, rows)

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """The best depths as far as is known; now and then others, to know better."""
        room, trial = self.cost.frontier - rows, self._trial
        self._trial = None
        if room < 1 or not any(candidate.limit for candidate in candidates):
            return [0] * len(candidates)
        # Limits change with every match, and rows with every end: what is right for some is right for nearly as many.
        question = (frozenset(candidate.kind for candidate in candidates), round(_LIKE * log2(rows)))
        habit = self._habits.setdefault(question, Habit())
        answer = trial.answer if trial is not None and trial.again(question) else habit.recall(self._steps)
        return self._think(question, candidates, rows, room) if answer is None else _applied(answer, candidates)

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Learn how often drafts of a kind are right."""
        self._rates(kind).observe(judged, accepted)

    def drafted(self, kind: str, levels: int, seconds: float) -> None:
        """Learn what a level of drafting costs."""
        self._levels.setdefault(kind, LevelCost()).observe(levels, seconds)

    def caught_up(self, kind: str, levels: int, seconds: float) -> None:
        """A trial for which the drafter had to read costs more, and goes on for a step: that one tells the price."""
        if self._trial is not None:
            known = self._levels.setdefault(kind, LevelCost()).seconds(np.array(levels))
            self._savings -= self._trial.loss + max(seconds - float(known), 0.0)
            self._trial.repeated = True
            self._rests.setdefault(kind, _Rest()).wake(self._steps + 1)

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step costs."""
        self._steps += 1
        self.cost.observe(rows, seconds)

    def _rates(self, kind: str) -> Acceptance:
        if kind not in self._acceptance:
            self._acceptance[kind] = Acceptance(_TRUST) if kind in self._trusted else Acceptance()
        return self._acceptance[kind]

    def _think(self, question: Hashable, candidates: Sequence[Candidate], rows: int, room: int) -> list[int]:
        passed, self._thought = self._steps - self._thought, self._steps
        known = {kind: self._rates(kind) for kind in _kinds(candidates)}
        for kind, acceptance in known.items():
            acceptance.fade(passed)
            self._considered[kind] = self._steps
        offer = Offer(candidates, known, self._levels, rows=rows)
        counts = np.arange(rows, rows + min(room, offer.size) + 1)
        costs = self.cost.seconds(counts)
        best = offer.best(costs)
        other = offer.curious(best, costs, self.cost.ages(counts))
        self._settle(question, _by_kind(candidates, offer.depths(best)), rows, other.loss / best.seconds)
        dares = self._dares(other, best, passed)
        depths = offer.depths(other if dares else best)
        tried = _by_kind(candidates, depths)
        for kind, acceptance in known.items():
            acceptance.tried(tried[kind][0])
        if dares:
            self._trial = _Trial(question, tried, other.loss)
        return depths

    def _settle(self, question: Hashable, answer: Answer, rows: int, loss: float) -> None:
        """Keep to the best that is known: kinds of which that is nothing rest.

        loss  what trying something else would cost, as a share of a step: the less, the sooner it is to be tried
        """
        # Who knows little should not be sure for long. Where a kind does not pay, its rest is all the habit there is.
        pays = all(depths[0] for depths in answer.values())
        self._habits[question].learn(answer, self._steps, self._steps // _GREEN if pays else 0)
        for kind, depths in answer.items():
            rest = self._rests.setdefault(kind, _Rest())
            rest.decide(depths[0], self._steps, rows, int((_THOUGHT + loss) / _CURIOSITY))

    def _dares(self, other: Choice, best: Choice, passed: int) -> bool:
        """Whether another choice than the best is to be tried: what that is expected to lose was saved up."""
        most = _PATIENCE * _CURIOSITY * best.seconds
        self._savings = min(self._savings + passed * _CURIOSITY * best.seconds, most)
        if other.loss > self._savings:
            return False
        self._savings -= other.loss
        return True


@dataclass(slots=True)
class _Trial:
    """An answer that is not the best one as far as is known, and what it is expected to lose.

    repeated  whether it is to be given once more
    """

    question: Hashable
    answer: Answer
    loss: float
    repeated: bool = False

    def again(self, question: Hashable) -> bool:
        """Whether it is the answer to this question too."""
        return self.repeated and self.question == question


@dataclass(slots=True)
class _Rest:
    """The step until which a kind is left in peace, and how long that is: the longer, the oftener it did not pay.

    rows   of the step in which it did not
    awake  a step in which it is not left in peace
    """

    until: int = 0
    length: int = 0
    rows: int = 0
    awake: int = -1

    def rests(self, step: int, rows: int) -> bool:
        """Whether the kind is left in peace in a step of so many rows."""
        return step < self.until and step != self.awake and rows > _FEWER * self.rows

    def wake(self, step: int) -> None:
        """It is asked in this step all the same."""
        self.awake = step

    def decide(self, deepest: int, step: int, rows: int, most: int = _LONGEST_REST) -> None:
        """How deep is best in this step, and how many rows it had anyway; the rest has `most` steps at most."""
        most = min(most, _LONGEST_REST, 1 + 4 * step // _GREEN)
        self.length = 0 if deepest else min(2 * self.length + 1, most)
        self.until, self.rows = step + self.length, rows


def _by_kind(candidates: Sequence[Candidate], depths: Sequence[int]) -> dict[str, list[int]]:
    """The depths of each kind, deepest first."""
    found: dict[str, list[int]] = {}
    for candidate, depth in sorted(zip(candidates, depths, strict=True), key=lambda pair: -pair[1]):
        found.setdefault(candidate.kind, []).append(depth)
    return found


def _applied(answer: Answer, candidates: Sequence[Candidate]) -> list[int]:
    """Depths for candidates of the same kinds; the last of a kind has as many further ones as there are."""
    left = {kind: chain(depths, repeat(depths[-1])) for kind, depths in answer.items()}
    return [min(next(left[candidate.kind]), candidate.limit) for candidate in candidates]


def _kinds(candidates: Sequence[Candidate]) -> list[str]:
    """The kinds of some candidates, each once, in order."""
    return list(dict.fromkeys(candidate.kind for candidate in candidates))
