"""How many tokens to draft for each sequence of a step, so that tokens come fastest.

What steps cost (engine/cost.py) and how often drafts are right (acceptance.py) is learnt from what happens, and
offer.py finds the depths that promise most. Nothing here reads a clock or draws a number: equal inputs, equal depths.

Measured by tests/engine/draft/simulate.py, one sequence and 2,000 rounds after 20 to learn, over 198 worlds of eleven
costs, chances of 0.1 to 0.98 and drafting that is free or costs up to a quarter of a step, each drawn three times:
0.996 of the best fixed depth on average, 0.962 in the worst world, and 0.994 where the first step without drafts behind
one with drafts takes half as long again (drawn once). Thinking takes 0.05 to 0.14 ms, and 0.2 to 0.4 ms among
steps of a model, that leave nothing of it in the processor's caches; so a choice is kept for up to 128 uses, and a kind
of drafts that does not pay is not even asked for most of the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from functools import cache
from math import log2
from typing import Protocol

from engine.cost import StepCost
from engine.draft.acceptance import Acceptance
from engine.draft.lengths import Lengths
from engine.draft.levels import DraftCost
from engine.draft.offer import Candidate, Choices, Depths
from engine.draft.plans import Plan, Rest, Savings, Trial

__all__ = ["AdaptiveDepth", "Candidate", "Depth", "FixedDepth"]

# Trying what seems not to pay may cost this share of the time: half of it where so many trials changed nothing, a third
# where twice as many did not. It is saved up for: so many steps' time, or what the next trial takes.
_CURIOSITY, _SURE, _SAVINGS = 0.003, 2, 1.5
# What thinking of it costs, as a share of a short step, and what a step of a trial costs at least.
_THOUGHT, _TRIAL = 0.15, 0.005
# Steps of a trial of drafts, for the first ones of a size take up to twice as long as later ones; and of one of no
# drafts: short where a step is expected to lose much, for then those tell enough (engine/cost.py).
_TRY, _PAUSE, _GLANCE, _MUCH = 3, 9, 3, 0.1
# Steps of a size that are taken without drafts before there are any.
_FIRST = 6
# Where drafts seem so many times as fast as none, or less, and steps without were measured among the first of all only,
# they are measured once more, whatever that costs: else it could be long until drafts are found out.
_CLOSE = 1.5
# How often drafts are right that are trusted.
_TRUST = 0.95
# Steps after which drafts of a kind may have become better than they were.
_LONG_AGO = 64
# Asking a kind that has nothing to say may cost this share of the time; it is asked again after so many steps at most,
# for what repeats itself mostly does so for longer.
_ASKING, _SILENCE = 0.003, 31
# So many measurements of drafts behind texts that were new wait for one of drafts alone.
_UNCLEAR = 8
# A text is new to a drafter that has read less of it than all but so many tokens.
_NEW = 16


class Depth(Protocol):
    """Chooses depths, and is told what came of it, what steps cost among it (`cost`)."""

    cost: StepCost

    def rests(self, kind: str, rows: int) -> bool:
        """Whether drafts of a kind are not worth being considered in the next step, which computes `rows` anyway.

        To be asked once a step.
        """

    def likelier(self, kind: str, other: str) -> bool:
        """Whether drafts of a kind seem to be right as often as those of another, that take longer to make."""

    def outdone(self, kind: str, rows: int) -> None:
        """All drafts of a kind in a step were likelier wrong than those of another, so none of them is a candidate."""

    def silent(self, kind: str, rows: int, seconds: float) -> None:
        """A kind was asked in a step, which took so long, and had nothing to say."""

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """Tokens to draft for each candidate, in a step that computes `rows` rows anyway (theirs among them)."""

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

    def rests(self, kind: str, rows: int) -> bool:
        """Only where nothing is ever drafted."""
        return self._depth == 0

    def likelier(self, kind: str, other: str) -> bool:
        """Nothing is known."""
        return True

    def outdone(self, kind: str, rows: int) -> None:
        """Nothing is learnt."""

    def silent(self, kind: str, rows: int, seconds: float) -> None:
        """Nothing is learnt."""

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """The depth, or less where a candidate's limit is less."""
        return [min(self._depth, candidate.limit) for candidate in candidates]

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


class AdaptiveDepth:
    """The depths that promise most tokens a second; implements Depth. One for each model, for as long as it runs.

    It starts with no drafts, and goes on to at most twice the rows that were ever measured, if that promises more.
    What was chosen is kept for some steps, the longer the more is known: thinking costs time too.

    trusted  kinds whose drafts are nearly always right, for all that is known before they are tried
    """

    def __init__(self, trusted: Collection[str] = ()) -> None:
        self._trusted = frozenset(trusted)
        self.cost = StepCost()
        self._acceptance: dict[str, Acceptance] = {}
        self._levels: dict[str, DraftCost] = {}
        self._plans: dict[Hashable, Plan] = {}
        # By the kind, and by the size of a step.
        self._rests = defaultdict[tuple[str, int], Rest](Rest)
        self._considered: dict[str, int] = {}
        self._steps = self._thought = 0
        # Of the step at hand.
        self._size = 0
        # What drafting took, to be learnt from with the next thought; and of those that read texts, what was read.
        self._drafted: list[tuple[str, int, int, float]] = []
        self._caught_up: list[tuple[str, int, int, float, int]] = []
        # By the size of a step.
        self._savings = defaultdict[int, Savings](lambda: Savings(_SAVINGS))
        # The latest.
        self._trial: Trial | None = None
        self._lengths = Lengths()

    def rests(self, kind: str, rows: int) -> bool:
        """Whether drafts of a kind did not pay lately beside about as many rows; they are looked at again."""
        self._size = _size(rows)
        return self._rests[kind, self._size].rests()

    def likelier(self, kind: str, other: str) -> bool:
        """By their first tokens, or where drafts of the kind were not considered for long."""
        one, two = (self._rates(each) for each in (kind, other))
        return one.survival(1) >= two.survival(1) or self._steps - self._considered.get(kind, 0) > _LONG_AGO

    def outdone(self, kind: str, rows: int) -> None:
        """The kind need not be asked for some steps."""
        self._rests[kind, _size(rows)].decide(0, self._steps)

    def silent(self, kind: str, rows: int, seconds: float) -> None:
        """The kind need not be asked for a few steps: the fewer, the less it costs."""
        (step,) = self.cost.seconds([rows])
        most, rest = min(int(seconds / (_ASKING * step)), _SILENCE) if step else 0, self._rests[kind, _size(rows)]
        rest.decide(0, self._steps, max(most, rest.length))

    def choose(self, candidates: Sequence[Candidate], *, rows: int) -> list[int]:
        """The best depths as far as is known; now and then others, to know better."""
        work, reads = self.cost.work, self.cost.work.reads
        if reads:
            candidates = [one if self._may_begin(one) else one._replace(limit=0, unread=0) for one in candidates]
        # Limits change with every match, and rows with every end: what is right for some is right for nearly as many.
        self._size = size = _size(rows)
        kinds, news = frozenset([one.kind for one in candidates]), _news(candidates)
        question = (kinds, reads, size, news)
        # Those whose prompts are read beside it will speak with them soon: that is what a token is worth.
        alone = self._plans.get((kinds, False, _size(work.told), news)) if reads and candidates else None
        plan, trial = self._plans.get(question), self._trial
        if trial is not None and trial.size == size and trial.depths.keys() == kinds and self._steps < trial.until:
            depths = trial.depths
        elif alone is not None:
            depths = self._beside(alone, candidates, rows)
        elif plan is not None and self._steps < plan.until:
            depths = plan.use(self._steps)
        elif not any(one.limit for one in candidates) or self.cost.reach <= rows or self._begins(kinds, rows):
            return [0] * len(candidates)
        else:
            depths = self._think(question, candidates, rows)
        return [min(depths[one.kind], one.limit) for one in candidates]

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Learn how often drafts of a kind are right."""
        self._rates(kind).observe(judged, accepted)

    def drafted(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """Learn what a level of drafting costs."""
        self._drafted.append((kind, sequences, levels, seconds))

    def caught_up(self, kind: str, sequences: int, levels: int, seconds: float, read: int) -> None:
        """Learn what reading costs; only the steps of a trial behind it tell what a level costs."""
        self._caught_up.append((kind, sequences, levels, seconds, read))
        trial = self._trial
        if trial is not None and kind in trial.woken:
            trial.until = max(trial.until, self._steps + 2)

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step costs."""
        self._steps += 1
        self._savings[self._size].steps += 1
        self.cost.observe(rows, seconds)

    def ended(self, tokens: int) -> None:
        """Learn how long texts become."""
        self._lengths.observe(tokens)

    def _rates(self, kind: str) -> Acceptance:
        if kind not in self._acceptance:
            self._acceptance[kind] = Acceptance(_TRUST) if kind in self._trusted else Acceptance()
        return self._acceptance[kind]

    def _begins(self, kinds: Collection[str], rows: int) -> bool:
        """Whether there were too few steps of about so many rows to know what drafts have to be better than."""
        return not self.cost.work.reads and self._trusted.isdisjoint(kinds) and self.cost.measured(rows) < _FIRST

    def _may_begin(self, one: Candidate) -> bool:
        """Whether drafts may begin beside prompts: not where a text has just begun, and it takes long to read it.

        Who will speak with it is known when the prompts are read, and so is whether drafts pay then.
        """
        if one.unread <= _NEW or one.said >= _NEW or one.kind not in self._levels:
            return True
        paid = self._levels[one.kind]
        return paid.token * one.unread < sum(paid.line(1))

    def _think(self, question: Hashable, candidates: Sequence[Candidate], rows: int) -> Depths:
        known = self._known(candidates)
        found = Choices(candidates, known, self._levels, self.cost, rows, self._lengths)
        before = self._plans.get(question)
        best = found.settled(before.depths if before else None)
        plan = self._plans[question] = Plan.after(before, found.depths(best), found.worth(best))
        trial, curiosity = self._other(rows, found, best), _CURIOSITY / (1 + plan.trials / _SURE)
        savings = self._savings[trial.size]
        plan.tried = savings.pay(trial.loss, curiosity, _SAVINGS)
        self._trial = trial if plan.tried else None
        # Until there is enough for a trial, and for thinking of it.
        most = int((_THOUGHT + trial.loss - savings.saved) / curiosity)
        plan.keep(self._steps, most)
        for kind in plan.depths:
            self._rest(self._rests[kind, _size(rows)], kind, before, plan, most)
        depths = trial.depths if plan.tried else plan.depths
        for kind, acceptance in known.items():
            acceptance.tried(depths[kind])
        return depths

    def _known(self, candidates: Sequence[Candidate]) -> dict[str, Acceptance]:
        """How often drafts of each kind are right, as of now."""
        passed, self._thought = self._steps - self._thought, self._steps
        self._learn_drafting()
        known = {one.kind: self._rates(one.kind) for one in candidates}
        for kind, acceptance in known.items():
            acceptance.fade(passed)
            self._considered[kind] = self._steps
        return known

    def _learn_drafting(self) -> None:
        """What drafting took becomes known."""
        pace = self.cost.pace
        for kind, sequences, levels, seconds in self._drafted:
            self._levels.setdefault(kind, DraftCost()).observe(sequences, levels, seconds / pace)
        self._drafted.clear()
        # As long as nobody knows what a level costs, it could be all of that, and reading nothing; but not for good.
        if len(self._caught_up) <= _UNCLEAR and any(one[0] not in self._levels for one in self._caught_up):
            return
        for kind, sequences, levels, seconds, read in self._caught_up:
            cost = self._levels.setdefault(kind, DraftCost())
            start, level = cost.line(sequences)
            cost.read(read, max(seconds / pace - (start + level * levels), 0.0))
        self._caught_up.clear()

    def _other(self, rows: int, found: Choices, best: int) -> Trial:
        """What is to be tried next, for how long, and what that costs."""
        if best and self.cost.is_young(rows) and found.price(0) < _CLOSE * found.price(best):
            return Trial(_size(rows), found.depths(0), (), 0.0, self._steps + _PAUSE)
        other = found.stalest(best)
        loss = max(found.loss(other, found.price(best)) / found.seconds(best), _TRIAL)
        steps = _TRY
        if other == 0:
            steps = _PAUSE if loss < _MUCH else _GLANCE
        depths, kept = found.depths(other), found.depths(best)
        woken = [kind for kind, depth in depths.items() if depth and not kept[kind]]
        # Steps without drafts are slow behind some with drafts, in the trial or behind it.
        turning = 0.0 if best and other else self.cost.turning
        loss = steps * loss + turning + found.reading(other) / found.seconds(best)
        return Trial(_size(rows), depths, woken, loss, self._steps + steps)

    def _rest(self, rest: Rest, kind: str, before: Plan | None, plan: Plan, most: int) -> None:
        """A kind whose drafts do not pay is left in peace; what comes of a trial is thought over at once."""
        trial, depth = self._trial, plan.depths[kind]
        if trial is not None and not any(trial.depths.values()):
            rest.left = trial.until - self._steps - 1
            plan.until = self._steps
        elif trial is None or kind not in trial.woken:
            rest.decide(depth, self._steps, most)
            if before is not None and before.depths[kind] and not depth:
                # Until it is known what a step without drafts takes.
                rest.left = _PAUSE - 1

    def _beside(self, alone: Plan, candidates: Sequence[Candidate], rows: int) -> Depths:
        """Depths beside prompts, whose rows have to be computed anyway: those without them, if their rows pay here."""
        drafts = sum(min(alone.depths[one.kind], one.limit) for one in candidates)
        if drafts and rows < self.cost.reach:
            before, after = self.cost.seconds([rows, rows + drafts])
            if after - before <= alone.worth * drafts:
                return alone.depths
        return dict.fromkeys(alone.depths, 0)


@cache
def _size(rows: int) -> int:
    """The same for numbers of rows that are alike: by halves."""
    return round(log2(rows))


def _news(candidates: Collection[Candidate]) -> int:
    """Whose texts are new to a drafter: nobody's (0), those of half of the candidates at most (1), or of more (2)."""
    new = sum([one.unread > _NEW for one in candidates])
    return -(-2 * new // len(candidates)) if new else 0
