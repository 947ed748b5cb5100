"""How many tokens to draft for each sequence of a step, so that tokens come fastest.

What steps cost (engine/cost.py) and how often drafts are right (acceptance.py) is learnt from what happens, and
offer.py finds the depths that promise most. Nothing here reads a clock or draws a number: equal inputs, equal depths.

Measured by tests/engine/draft/simulate.py, one sequence and 2,000 rounds after 20 to learn, over 198 worlds of eleven
costs, chances of 0.1 to 0.98 and drafting that is free or costs up to a quarter of a step, each drawn three times:
0.997 of the best fixed depth on average, 0.98 in the worst world, and 0.996 where the first step without drafts behind
one with drafts takes half as long again. Thinking takes 0.05 ms, whatever the batch is, and 0.15 ms among steps of a
model, that leave nothing of it in the processor's caches; so a choice is kept for up to 64 uses, and a kind of drafts
that does not pay is not even asked for most of the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from math import log2
from typing import Protocol

from engine.cost import StepCost
from engine.draft.acceptance import Acceptance
from engine.draft.levels import DraftCost
from engine.draft.offer import Candidate, Choices, Depths
from engine.draft.plans import Plan, Rest, Trial

__all__ = ["AdaptiveDepth", "Candidate", "Depth", "FixedDepth"]

# Trying what seems not to pay may cost this share of the time: half of it where so many trials changed nothing, a third
# where twice as many did not. It is saved up for, so many steps' time at most.
_CURIOSITY, _SURE, _SAVINGS = 0.003, 2, 1.5
# What thinking of it costs, as a share of a short step, and what a step of a trial costs at least.
_THOUGHT, _TRIAL = 0.15, 0.005
# Steps of a trial of drafts where there are none, and of one of no drafts: short where a step is expected to lose much,
# for then the first ones tell enough, though they are slow behind drafts (engine/cost.py).
_TRY, _PAUSE, _GLANCE, _MUCH = 3, 9, 3, 0.1
# How often drafts are right that are trusted.
_TRUST = 0.95
# Steps after which drafts of a kind may have become better than they were.
_LONG_AGO = 64
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
        """A kind was asked in a step and had nothing to say."""

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
        self._plans: dict[Hashable, Plan] = {}
        self._rests = defaultdict[str, Rest](Rest)
        self._considered: dict[str, int] = {}
        self._steps = self._thought = 0
        # What drafting took, to be learnt from with the next thought.
        self._drafted: list[tuple[str, int, int, float]] = []
        # In steps.
        self._savings = _SAVINGS
        # The latest.
        self._trial: Trial | None = None

    def rests(self, kind: str, rows: int) -> bool:
        """Whether drafts of a kind did not pay lately; they are looked at again after 127 steps at most."""
        rest = self._rests.get(kind)
        return rest is not None and rest.rests(self._steps, rows)

    def likelier(self, kind: str, other: str) -> bool:
        """By their first tokens, or where drafts of the kind were not considered for long."""
        one, two = (self._rates(each) for each in (kind, other))
        return one.survival(1) >= two.survival(1) or self._steps - self._considered.get(kind, 0) > _LONG_AGO

    def outdone(self, kind: str, rows: int) -> None:
        """The kind need not be asked for some steps."""
        self._rests[kind].decide(0, self._steps, rows)

    def silent(self, kind: str, rows: int) -> None:
        """The kind need not be asked for a few steps."""
        rest = self._rests[kind]
        rest.decide(0, self._steps, rows, max(_SILENCE, rest.length))

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """The best depths as far as is known; now and then others, to know better."""
        kinds, reads = frozenset([kind for kind, _ in candidates]), self.cost.reads
        # Limits change with every match, and rows with every end: what is right for some is right for nearly as many.
        question = (kinds, reads, round(log2(rows)))
        alone = self._plans.get((kinds, False, round(log2(len(candidates))))) if reads and candidates else None
        plan, trial = self._plans.get(question), self._trial
        if trial is not None and trial.question == question and self._steps < trial.until:
            depths = trial.depths
        elif alone is not None:
            depths = self._beside(alone, candidates, rows)
        elif plan is not None and self._steps < plan.until:
            depths = plan.use(self._steps)
        elif self.cost.reach <= rows or not any(limit for _, limit in candidates):
            return [0] * len(candidates)
        else:
            depths = self._think(question, candidates, rows)
        return [min(depths[kind], limit) for kind, limit in candidates]

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Learn how often drafts of a kind are right."""
        self._rates(kind).observe(judged, accepted)

    def drafted(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """Learn what a level of drafting costs."""
        self._drafted.append((kind, sequences, levels, seconds))

    def caught_up(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """A trial for which the drafter had to read costs more; steps behind it tell what a level costs.

        What reading took is no loss where the drafts turn out to pay; else the kind is left in peace for as long.
        """
        trial = self._trial
        if trial is not None and kind in trial.woken:
            start, level = self._levels.setdefault(kind, DraftCost()).line(sequences)
            trial.until = max(trial.until, self._steps + 2)
            owed = max(seconds - self.cost.pace * (start + level * levels), 0.0) / (_CURIOSITY * trial.seconds)
            self._rests[kind].owed = int(owed)

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step costs."""
        self._steps += 1
        self.cost.observe(rows, seconds)

    def _rates(self, kind: str) -> Acceptance:
        if kind not in self._acceptance:
            self._acceptance[kind] = Acceptance(_TRUST) if kind in self._trusted else Acceptance()
        return self._acceptance[kind]

    def _think(self, question: Hashable, candidates: Sequence[Candidate], rows: int) -> Depths:
        known, passed = self._known(candidates)
        found = Choices(candidates, known, self._levels, self.cost, rows)
        before = self._plans.get(question)
        best = found.settled(before.depths if before else None)
        plan = self._plans[question] = Plan.after(before, found.depths(best), found.worth(best))
        trial, curiosity = self._other(question, found, best), _CURIOSITY / (1 + plan.trials / _SURE)
        self._savings = min(self._savings + passed * curiosity, _SAVINGS)
        plan.tried = trial.loss <= self._savings
        self._trial = trial if plan.tried else None
        self._savings -= trial.loss if plan.tried else 0.0
        # Until there is enough for a trial, and for thinking of it.
        most = int((_THOUGHT + trial.loss - self._savings) / curiosity)
        plan.keep(self._steps, most)
        for kind in plan.depths:
            self._rest(kind, before, plan, rows, most)
        depths = trial.depths if plan.tried else plan.depths
        for kind, acceptance in known.items():
            acceptance.tried(depths[kind])
        return depths

    def _known(self, candidates: Sequence[Candidate]) -> tuple[dict[str, Acceptance], int]:
        """How often drafts of each kind are right, as of now, and the steps since the last thought."""
        passed, self._thought, pace = self._steps - self._thought, self._steps, self.cost.pace
        for kind, sequences, levels, seconds in self._drafted:
            self._levels.setdefault(kind, DraftCost()).observe(sequences, levels, seconds / pace)
        self._drafted.clear()
        known = {kind: self._rates(kind) for kind, _ in candidates}
        for kind, acceptance in known.items():
            acceptance.fade(passed)
            self._considered[kind] = self._steps
        return known, passed

    def _other(self, question: Hashable, found: Choices, best: int) -> Trial:
        """What is to be tried next, for how long, and what that costs."""
        other = found.stalest(best)
        loss = max(found.loss(other, found.price(best)) / found.seconds(best), _TRIAL)
        steps = 1
        if best == 0:
            steps = _TRY
        elif other == 0:
            steps = _PAUSE if loss < _MUCH else _GLANCE
        depths, kept = found.depths(other), found.depths(best)
        woken = [kind for kind, depth in depths.items() if depth and not kept[kind]]
        loss = steps * loss + (self.cost.turning if steps > 1 else 0.0)
        return Trial(question, depths, woken, found.seconds(best), loss, self._steps + steps)

    def _rest(self, kind: str, before: Plan | None, plan: Plan, rows: int, most: int) -> None:
        """A kind whose drafts do not pay is left in peace; what comes of a trial is thought over at once."""
        rest, trial, depth = self._rests[kind], self._trial, plan.depths[kind]
        if trial is not None and not any(trial.depths.values()):
            rest.pause(trial.until, rows)
            plan.until = self._steps
        elif trial is None or kind not in trial.woken:
            rest.decide(depth, self._steps, rows, most)
            if before is not None and before.depths[kind] and not depth:
                # Until it is known what a step without drafts takes.
                rest.pause(self._steps + _PAUSE, rows)

    def _beside(self, alone: Plan, candidates: Sequence[Candidate], rows: int) -> Depths:
        """Depths beside prompts, whose rows have to be computed anyway: those without them, if their rows pay here."""
        drafts = sum(min(alone.depths[one.kind], one.limit) for one in candidates)
        if drafts and rows < self.cost.reach:
            before, after = self.cost.seconds([rows, rows + drafts])
            if after - before <= alone.worth * drafts:
                return alone.depths
        return dict.fromkeys(alone.depths, 0)
