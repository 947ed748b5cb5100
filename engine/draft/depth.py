"""How many tokens to draft for each sequence of a step, so that tokens come fastest.

What steps cost (engine/cost.py) and how often drafts are right (acceptance.py) is learnt from what happens, and
offer.py finds the depths that promise most. Nothing here reads a clock or draws a number: equal inputs, equal depths.

Measured by tests/engine/draft/simulate.py, one sequence and 2,000 rounds after 20 to learn, over 198 worlds of eleven
costs, chances of 0.1 to 0.98 and drafting that is free or costs up to a quarter of a step, each drawn five times: 0.995
of the best fixed depth on average, 0.98 in the worst world. Thinking takes 0.05 ms, whatever the batch is, and 0.15 ms
among steps of a model, that leave nothing of it in the processor's caches; so a choice is kept for up to 32 uses, and a
kind of drafts that does not pay is not even asked for most of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.cost import StepCost
from engine.draft.acceptance import Acceptance
from engine.draft.levels import DraftCost, size
from engine.draft.offer import Candidate, Choices, Depths

__all__ = ["AdaptiveDepth", "Candidate", "Depth", "FixedDepth"]

# Trying what seems not to pay may cost this share of the time. It is saved up for, for so many steps at most.
_CURIOSITY, _PATIENCE = 0.0025, 600
# What thinking of it costs, as a share of a short step, and what the trial itself costs at least.
_THOUGHT, _TRIAL = 0.1, 0.005
# A choice is kept for a share of the steps that were taken, and for so many at most; rests may take four times that.
# What is asked seldom is kept until so many times as many steps have passed.
_GREEN, _LONGEST_PLAN, _SELDOM = 16, 32, 8
# How often drafts are right that are trusted.
_TRUST = 0.95
# Steps after which drafts of a kind may have become better than they were.
_LONG_AGO = 64
# Steps for which a kind whose drafts do not pay is not even asked, at most. In a step of fewer rows they may.
_LONGEST_REST, _FEWER = 63, 0.8
# Steps for which a kind that has nothing to say is not asked, at most: what repeats itself mostly does so for longer.
_SILENCE = 7


class Depth(Protocol):
    """Chooses depths, and is told what came of it, what steps cost among it (`cost`)."""

    cost: StepCost

    def rests(self, kind: str, rows: int) -> bool:
        """Whether drafts of a kind are not worth being considered in the next step, which computes `rows` anyway."""

    def likelier(self, kind: str, other: str) -> bool:
        """Whether drafts of a kind seem to be right as often as those of another, that take longer to make."""

    def outdone(self, kind: str, rows: int) -> None:
        """All drafts of a kind in a step were likelier wrong than those of another, so none of them is a candidate."""

    def silent(self, kind: str, rows: int) -> None:
        """A kind was asked in a step and had nothing to say, and another one had."""

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """Tokens to draft for each candidate, in a step that computes `rows` rows anyway (theirs among them)."""

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Of a draft, `judged` tokens were compared with what was emitted, `accepted` of them were right.

        What stood behind a wrong token or behind the end of the text was not judged.
        """

    def drafted(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """Drafting up to `levels` tokens for each of so many sequences took so long."""

    def caught_up(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
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

    def silent(self, kind: str, rows: int) -> None:
        """Nothing is learnt."""

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """The depth, or less where a candidate's limit is less."""
        return [min(self._depth, candidate.limit) for candidate in candidates]

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Nothing is learnt."""

    def drafted(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """Nothing is learnt."""

    def caught_up(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """Nothing is learnt."""

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step costs: the depth is the same, but others want to know."""
        self.cost.observe(rows, seconds)


class AdaptiveDepth:
    """The depths that promise most tokens a second; implements Depth. One for each model, for as long as it runs.

    It starts with no drafts, and goes on to at most twice the rows that were ever measured, if that promises more.
    What was chosen is kept for some steps, the longer the more is known: thinking costs time too.

    trusted  kinds whose drafts are nearly always right, for all that is known before they are tried
    """

    def __init__(self, trusted: Collection[str] = ()) -> None:
        self._trusted = trusted
        self.cost = StepCost()
        self._acceptance: dict[str, Acceptance] = {}
        self._levels: dict[str, DraftCost] = {}
        self._plans: dict[Hashable, _Plan] = {}
        self._rests: dict[str, _Rest] = {}
        self._considered: dict[str, int] = {}
        self._steps = self._thought = 0
        # In steps.
        self._savings = float(_PATIENCE * _CURIOSITY)
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

    def silent(self, kind: str, rows: int) -> None:
        """The kind need not be asked for a few steps."""
        rest = self._rests.setdefault(kind, _Rest())
        rest.decide(0, self._steps, rows, max(_SILENCE, rest.length))

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """The best depths as far as is known; now and then others, to know better."""
        self._trial = None
        kinds = frozenset([candidate.kind for candidate in candidates])
        # Limits change with every match, and rows with every end: what is right for some is right for nearly as many.
        question = (kinds, self.cost.reads, size(rows))
        plan = self._plans.get(question)
        alone = self._plans.get((kinds, False, size(len(candidates)))) if self.cost.reads and candidates else None
        if alone is not None:
            depths = self._beside(alone, candidates, rows)
        elif plan is not None and self._steps < plan.until:
            depths = plan.use(self._steps)
        elif self.cost.reach <= rows or not any(candidate.limit for candidate in candidates):
            return [0] * len(candidates)
        else:
            depths = self._think(question, candidates, rows)
        return [min(depths[candidate.kind], candidate.limit) for candidate in candidates]

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Learn how often drafts of a kind are right."""
        self._rates(kind).observe(judged, accepted)

    def drafted(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """Learn what a level of drafting costs."""
        self._levels.setdefault(kind, DraftCost()).observe(sequences, levels, seconds / self.cost.pace)

    def caught_up(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """A trial for which the drafter had to read costs more, and goes on for a step: that one tells the price.

        What reading took is no loss where the drafts turn out to pay; else the kind is left in peace for as long.
        """
        trial = self._trial
        if trial is not None and kind in trial.woken:
            start, level = self._levels.setdefault(kind, DraftCost()).line(sequences)
            self._plans[trial.question] = _Plan(trial.depths, self._steps + 2, 1, trial.worth)
            self._savings -= trial.loss
            owed = max(seconds - self.cost.pace * (start + level * levels), 0.0) / (_CURIOSITY * trial.seconds)
            self._rests.setdefault(kind, _Rest()).owed = int(owed)

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step costs."""
        self._steps += 1
        self.cost.observe(rows, seconds)

    def _rates(self, kind: str) -> Acceptance:
        if kind not in self._acceptance:
            self._acceptance[kind] = Acceptance(_TRUST) if kind in self._trusted else Acceptance()
        return self._acceptance[kind]

    def _think(self, question: Hashable, candidates: Sequence[Candidate], rows: int) -> Depths:
        passed, self._thought = self._steps - self._thought, self._steps
        known = {candidate.kind: self._rates(candidate.kind) for candidate in candidates}
        for kind, acceptance in known.items():
            acceptance.fade(passed)
            self._considered[kind] = self._steps
        found = Choices(candidates, known, self._levels, self.cost, rows)
        best = found.fastest
        other = found.stalest(best)
        loss = max(found.loss(other, found.price(best)) / found.seconds(best), _TRIAL)
        plan = _Plan(found.depths(best), self._steps, 0, found.worth(best))
        depths = plan.depths
        if self._dares(loss, passed):
            depths = found.depths(other)
            woken = [kind for kind, depth in depths.items() if depth and not plan.depths[kind]]
            self._trial = _Trial(question, depths, woken, found.seconds(best), plan.worth, loss)
        self._settle(question, plan, rows, loss)
        for kind, acceptance in known.items():
            acceptance.tried(depths[kind])
        return depths

    def _beside(self, alone: _Plan, candidates: Sequence[Candidate], rows: int) -> Depths:
        """Depths beside prompts, whose rows have to be computed anyway: those without them, if their rows pay here."""
        drafts = sum(min(alone.depths[one.kind], one.limit) for one in candidates)
        if drafts and rows < self.cost.reach:
            before, after = self.cost.seconds([rows, rows + drafts])
            if after - before <= alone.worth * drafts:
                return alone.depths
        return dict.fromkeys(alone.depths, 0)

    def _settle(self, question: Hashable, plan: _Plan, rows: int, loss: float) -> None:
        """Keep to the best that is known: kinds of which that is nothing rest until there is enough for a trial."""
        before = self._plans.get(question)
        if before is not None:
            # The oftener it came out the same, the longer it is kept.
            plan.length = 2 * before.length + 1 if before.depths == plan.depths else before.length // 2
        plan.length = min(plan.length, self._steps // _GREEN, _LONGEST_PLAN)
        # Where a kind does not pay, its rest is all the plan there is.
        plan.uses = plan.length if all(plan.depths.values()) else 0
        plan.until += 1 + _SELDOM * plan.uses
        self._plans[question] = plan
        # What comes of a trial is thought over at once.
        for kind in plan.depths.keys() - (self._trial.woken if self._trial else ()):
            rest = self._rests.setdefault(kind, _Rest())
            rest.decide(plan.depths[kind], self._steps, rows, int((_THOUGHT + loss - self._savings) / _CURIOSITY))

    def _dares(self, loss: float, passed: int) -> bool:
        """Whether another choice than the best is to be tried: what that is expected to lose was saved up."""
        self._savings = min(self._savings + passed * _CURIOSITY, _PATIENCE * _CURIOSITY)
        if loss > self._savings:
            return False
        self._savings -= loss
        return True


@dataclass(slots=True)
class _Plan:
    """Depths that are kept until a step, or until they were used so often.

    worth   seconds that a draft of them may add to a step that reads prompts
    length  how often they may be used in all: the oftener they were found best, the oftener
    """

    depths: Depths
    until: int
    uses: int
    worth: float
    length: int = 1

    def use(self, step: int) -> Depths:
        """The depths, once more."""
        self.uses -= 1
        if self.uses <= 0:
            self.until = step + 1
        return self.depths


@dataclass(frozen=True, slots=True)
class _Trial:
    """Depths that are not the best as far as is known.

    woken    kinds of which nothing is the best
    seconds  of the best step
    worth    see _Plan
    loss     that a step of the trial is expected to cost, in such steps
    """

    question: Hashable
    depths: Depths
    woken: Collection[str]
    seconds: float
    worth: float
    loss: float


@dataclass(slots=True)
class _Rest:
    """The step until which a kind is left in peace, and how long that is: the longer, the oftener it did not pay.

    rows   of the step in which it did not
    owed   steps that it is to rest for what was spent on it, unless it pays
    """

    until: int = 0
    length: int = 0
    rows: int = 0
    owed: int = 0

    def rests(self, step: int, rows: int) -> bool:
        """Whether the kind is left in peace in a step of so many rows."""
        return step < self.until and rows > _FEWER * self.rows

    def decide(self, deepest: int, step: int, rows: int, most: int = _LONGEST_REST) -> None:
        """How deep is best in this step, and how many rows it had anyway; the rest has `most` steps at most."""
        most = max(min(most, _LONGEST_REST, 1 + 4 * step // _GREEN), 0)
        self.length = 0 if deepest else min(2 * self.length + 1, most)
        # Who knows little should not be sure for long.
        self.until = step + (0 if deepest else max(self.length, min(self.owed, step)))
        self.rows, self.owed = rows, 0
