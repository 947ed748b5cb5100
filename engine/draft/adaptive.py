"""How many tokens to draft for each sequence of a step, so that tokens come fastest.

What steps cost (step_cost.py) and how often drafts are right (acceptance.py) is learnt from what happens, and
offer.py finds the depths that promise most. Nothing here reads a clock or draws a number: equal inputs, equal depths.

Measured by tests/engine/draft/simulate.py, one sequence and 2,000 rounds after 20 to learn, over 198 worlds of eleven
costs, chances of 0.1 to 0.98 and drafting that is free or costs up to a quarter of a step, each drawn three times:
0.996 of the best fixed depth on average, 0.956 in the worst world, and 0.994 where the first step without drafts behind
one with drafts takes half as long again (drawn once). Thinking takes 0.05 to 0.14 ms, and 0.2 to 0.4 ms among
steps of a model, that leave nothing of it in the processor's caches; so a choice is kept for up to 128 uses, and a kind
of drafts that does not pay is not even asked for most of the time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import cycle, islice
from math import log2
from typing import NamedTuple

from engine.draft.acceptance import Acceptance
from engine.draft.lengths import Lengths
from engine.draft.levels import DraftCost
from engine.draft.offer import Candidate, Choices, Depths
from engine.draft.plans import LONGEST_REST, Plan, Rest, Savings, Trial
from engine.schedule.step_cost import StepCost
from engine.schedule.work import Work

# Trying what seems not to pay may cost this share of the time: half of it where so many trials changed nothing, a third
# where twice as many did not. It is saved up for: so many steps' time, or what the next trial takes.
_CURIOSITY, _SURE, _SAVINGS = 0.003, 2, 1.5
# What thinking of it costs, as a share of a short step, and what a step of a trial costs at least.
_THOUGHT, _TRIAL = 0.15, 0.005
# Steps of a trial of drafts, for the first ones of a size take up to twice as long as later ones: more where they are
# expected to lose so little that this decides; and of one of no drafts: short where a step is expected to lose much,
# for then those tell enough (engine/schedule/step_cost.py).
_TRY, _CLOSELY, _LITTLE, _PAUSE, _GLANCE, _MUCH = 3, 6, 0.04, 9, 3, 0.1
# Steps of a size that are taken without drafts before there are any, and steps in all after which it may be close.
_FIRST, _LEARNER = 6, 500
# Where drafts seem so many times as fast as none, or less, and steps without were measured among the first of all only,
# they are measured once more, whatever that costs: else it could be long until drafts are found out.
_CLOSE = 1.5
# How often drafts are right that are trusted.
_TRUST = 0.95
# Steps after which drafts of a kind may have become better than they were.
_LONG_AGO = 64
# Asking a kind that has nothing to say may cost this share of the time; it is asked again after so many steps at most,
# for what repeats itself mostly does so for longer.
_ASKING, _SILENCE = 0.0015, 63
# What is put down of each thing at most, to be learnt from later: where requests say how deep to draft, nobody thinks.
_MOST_PUT_DOWN = 1024
# Steps for which a choice stands without being looked at.
_AGAIN = 8
# So many measurements of drafts behind texts that were new wait for one of drafts alone.
_UNCLEAR = 8
# A text is new to a drafter that has read less of it than all but so many tokens.
_NEW = 16


class _Question(NamedTuple):
    """For whom a plan is made: the kinds, whether prompts are read beside them, the size of the step, and `_news`."""

    kinds: frozenset[str]
    reads: bool
    size: int
    news: int


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
        self._plans: dict[_Question, Plan] = {}
        # By the kind, and by the size of a step.
        self._rests = defaultdict[tuple[str, int], Rest](Rest)
        self._considered: dict[str, int] = {}
        self._steps = self._thought = 0
        # Of the step at hand, and the plan that is used in it.
        self._size = 0
        self._standing: Plan | None = None
        # What became of drafts, to be learnt from when somebody asks.
        self._judged: list[tuple[str, int, int]] = []
        # What drafting took, to be learnt from with the next thought; and of those that read texts, what was read.
        self._drafted: list[tuple[str, int, int, float]] = []
        self._caught_up: list[tuple[str, int, int, float, int]] = []
        # By the size of a step.
        self._savings = defaultdict[int, Savings](lambda: Savings(_SAVINGS))
        # The latest.
        self._trial: Trial | None = None
        self._lengths = Lengths()

    def rests(self, kind: str, rows: int, running: int = 0) -> int:
        """Where they did not pay lately beside about as many rows; they are looked at again."""
        self._size = size = _size(rows)
        left = self._left(kind, size)
        if not left and self.cost.work.reads:
            # What does not pay when the prompts are read does not pay beside them.
            left = min(self._left(kind, self._together(running)), 1)
        return left

    def likelier(self, kind: str, other: str) -> bool:
        """By their first tokens, or where drafts of the kind were not considered for long."""
        one, two = (self._rates(each) for each in (kind, other))
        return one.survival(1) >= two.survival(1) or self._steps - self._considered.get(kind, 0) > _LONG_AGO

    def outdone(self, kind: str, rows: int) -> None:
        """The kind need not be asked for some steps."""
        self._let_rest(kind, _size(rows), 0, LONGEST_REST)

    def silent(self, kind: str, rows: int, seconds: float) -> None:
        """The kind need not be asked for a few steps: the fewer, the less it costs."""
        (step,), size = self.cost.seconds([rows]), _size(rows)
        most = min(int(seconds / (_ASKING * step)), _SILENCE) if step else 0
        self._let_rest(kind, size, 0, max(most, self._rests[kind, size].length))

    def choose(self, candidates: Sequence[Candidate], *, rows: int, running: int = 0) -> list[int]:
        """The best depths as far as is known; now and then others, to know better."""
        self._size = size = _size(rows)
        self._standing = None
        if self.cost.work.reads and candidates:
            alone = self._alone(candidates, running)
            if alone is not None:
                return self._beside(alone, candidates, rows)
            candidates = _only(_goes_on, candidates)
        question = self._question(candidates, size)
        plan, trial, kinds = self._plans.get(question), self._trial, question.kinds
        if trial is not None and trial.size == size and trial.depths.keys() == kinds and self._steps < trial.until:
            depths = trial.depths
        elif plan is not None and self._steps < plan.until:
            depths = plan.use(self._steps)
            self._standing = plan
        elif not any(one.limit for one in candidates) or self.cost.reach <= rows or self._begins(kinds, rows):
            return [0] * len(candidates)
        else:
            depths = self._think(question, candidates, rows)
            plan = self._plans[question]
        return _fitted(depths, candidates, skips=plan is not None and plan.skips)

    def again(self, kind: str, most: int) -> tuple[int, int]:
        """For some uses of a plan, which are used up by that, come what may."""
        plan = self._standing
        if plan is None or plan.skips:
            return 0, 0
        count = max(min(most, plan.uses, plan.until - self._steps - 1, _AGAIN), 0)
        plan.uses -= count
        return plan.depths[kind], count

    def verified(self, kind: str, judged: int, accepted: int) -> None:
        """Put down how often drafts of a kind are right."""
        self._judged.append((kind, judged, accepted))
        if len(self._judged) == _MOST_PUT_DOWN:
            self._learn_judged()

    def drafted(self, kind: str, sequences: int, levels: int, seconds: float) -> None:
        """Learn what a level of drafting costs."""
        self._drafted.append((kind, sequences, levels, seconds))
        if len(self._drafted) == _MOST_PUT_DOWN:
            self._learn_drafting()

    def caught_up(self, kind: str, sequences: int, levels: int, seconds: float, read: int) -> None:
        """Learn what reading costs; only the steps of a trial behind it tell what a level costs."""
        self._caught_up.append((kind, sequences, levels, seconds, read))
        if len(self._caught_up) == _MOST_PUT_DOWN:
            self._learn_drafting()
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
        """How often drafts of a kind are right, as of now."""
        self._learn_judged()
        return self._acceptance_of(kind)

    def _learn_judged(self) -> None:
        put_down, self._judged = self._judged, []
        for (kind, judged, accepted), times in Counter(put_down).items():
            self._acceptance_of(kind).observe(judged, accepted, times)

    def _acceptance_of(self, kind: str) -> Acceptance:
        if kind not in self._acceptance:
            self._acceptance[kind] = Acceptance(_TRUST) if kind in self._trusted else Acceptance()
        return self._acceptance[kind]

    def _left(self, kind: str, size: int) -> int:
        """Steps of a size for which a kind rests."""
        return max(self._rests[kind, size].until - self._savings[size].steps, 0)

    def _let_rest(self, kind: str, size: int, depth: int, most: int) -> None:
        """A kind rests from this step on if it is not drafted with."""
        self._rests[kind, size].decide(depth, self._savings[size].steps, self._steps, most)

    def _together(self, running: int) -> int:
        """The size of a step when prompts are read."""
        return _size(max(self.cost.work.told, running))

    def _begins(self, kinds: Collection[str], rows: int) -> bool:
        """Whether there were too few steps of about so many rows to know what drafts have to be better than."""
        return not self.cost.work.reads and self._trusted.isdisjoint(kinds) and self.cost.measured(rows) < _FIRST

    def _question(self, candidates: Sequence[Candidate], size: int) -> _Question:
        """Limits change with every match, and rows with every end: what is right for some is so for nearly as many."""
        return _Question(frozenset([one.kind for one in candidates]), self.cost.work.reads, size, _news(candidates))

    def _alone(self, candidates: Sequence[Candidate], running: int) -> Plan | None:
        """The plan of those who will speak when the prompts are read, if they are all like these; None: unknown.

        What a token is worth is told by how fast they come then. So is whether a text is worth being read, and then
        it may be read now.
        """
        work, count = self.cost.work, max(self.cost.work.told, running)
        self.cost.expect(Work(count, work.cells, work.pairs * count // work.rows, count))
        question = self._question(candidates, _size(count))
        plan = self._plans.get(question)
        if (plan is None or self._steps >= plan.until) and not self._begins(question.kinds, count):
            everybody = list(islice(cycle(candidates), count))
            *_, plan = self._plan(question, everybody, self._known(candidates), count)
            plan.keep(self._steps, 0)
            for kind, depth in plan.depths.items():
                self._let_rest(kind, question.size, depth, LONGEST_REST)
        self.cost.expect(work)
        return plan

    def _plan(
        self, question: _Question, candidates: Sequence[Candidate], known: Mapping[str, Acceptance], rows: int
    ) -> tuple[Choices, int, Plan]:
        """What could be done, what is best, and the plan that this becomes."""
        before = self._plans.get(question)
        found = Choices(candidates, known, self._levels, self.cost, rows, self._lengths)
        best, skips = found.settled(before.depths if before else None), False
        if question.news and any(map(_is_read, candidates)):
            # It may be one long text that takes longer to read than drafts for all of them save.
            read = Choices(_only(_is_read, candidates), known, self._levels, self.cost, rows, self._lengths)
            other = read.settled(before.depths if before else None)
            if read.price(other) < found.price(best):
                found, best, skips = read, other, True
        plan = self._plans[question] = Plan.after(before, found.depths(best), found.worth(best), skips=skips)
        return found, best, plan

    def _think(self, question: _Question, candidates: Sequence[Candidate], rows: int) -> Depths:
        known, before = self._known(candidates), self._plans.get(question)
        found, best, plan = self._plan(question, candidates, known, rows)
        trial, curiosity = self._other(rows, found, best), _CURIOSITY / (1 + plan.trials / _SURE)
        savings = self._savings[trial.size]
        plan.tried = savings.pay(trial.loss, curiosity, _SAVINGS)
        self._trial = trial if plan.tried else None
        # Until there is enough for a trial, and for thinking of it.
        most = int((_THOUGHT + trial.loss - savings.saved) / curiosity)
        plan.keep(self._steps, most)
        for kind in plan.depths:
            self._rest(kind, _size(rows), before, plan, most)
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
        steps = _TRY if loss >= _LITTLE or self._steps < _LEARNER else _CLOSELY
        if other == 0:
            steps = _PAUSE if loss < _MUCH else _GLANCE
        depths, kept = found.depths(other), found.depths(best)
        woken = [kind for kind, depth in depths.items() if depth and not kept[kind]]
        # Steps without drafts are slow behind some with drafts, in the trial or behind it.
        turning = 0.0 if best and other else self.cost.turning
        loss = steps * loss + turning + found.reading(other) / found.seconds(best)
        return Trial(_size(rows), depths, woken, loss, self._steps + steps)

    def _rest(self, kind: str, size: int, before: Plan | None, plan: Plan, most: int) -> None:
        """A kind whose drafts do not pay is left in peace; what comes of a trial is thought over at once."""
        rest, now = self._rests[kind, size], self._savings[size].steps
        trial, depth = self._trial, plan.depths[kind]
        if trial is not None and not any(trial.depths.values()):
            rest.until = now + trial.until - self._steps
            plan.until = self._steps
        elif trial is None or kind not in trial.woken:
            self._let_rest(kind, size, depth, most)
            if before is not None and before.depths[kind] and not depth:
                # Until it is known what a step without drafts takes.
                rest.until = now + _PAUSE

    def _beside(self, alone: Plan, candidates: Sequence[Candidate], rows: int) -> list[int]:
        """Depths beside prompts, whose rows have to be computed anyway: those without them, if they pay here too.

        There may be few who speak already, and to draft for one takes nearly as long as for all.
        """
        depths = _fitted(alone.depths, candidates, skips=alone.skips)
        drafts = sum(depths)
        if drafts and rows < self.cost.reach:
            before, after = self.cost.seconds([rows, rows + drafts])
            if after - before + self._drafting(candidates, depths) <= alone.worth * drafts:
                return depths
        return [0] * len(candidates)

    def _drafting(self, candidates: Sequence[Candidate], depths: Sequence[int]) -> float:
        """Seconds that drafting takes of those who are paid for it."""
        chosen = defaultdict[str, list[int]](list)
        for one, depth in zip(candidates, depths, strict=True):
            if depth and one.kind in self._levels:
                chosen[one.kind].append(depth)
        seconds = 0.0
        for kind, own in chosen.items():
            start, level = self._levels[kind].line(len(own))
            seconds += start + level * max(own)
        return self.cost.pace * seconds


def _fitted(depths: Depths, candidates: Sequence[Candidate], *, skips: bool) -> list[int]:
    """The depth of each candidate, as far as its limit goes; none for texts that are new if they are skipped."""
    return [0 if skips and not _is_read(one) else min(depths[one.kind], one.limit) for one in candidates]


def _only(wanted: Callable[[Candidate], bool], candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates, with no drafts for others than those that are wanted."""
    return [one if wanted(one) else one._replace(limit=0, unread=0) for one in candidates]


def _is_read(one: Candidate) -> bool:
    """Whether a drafter has read most of a text: else it is new to it."""
    return one.unread <= _NEW


def _goes_on(one: Candidate) -> bool:
    """Whether a drafter has read a text, or will see more of it: it may as well begin beside prompts."""
    return _is_read(one) or one.said >= _NEW


@cache
def _size(rows: int) -> int:
    """The same for numbers of rows that are alike: by halves."""
    return round(log2(rows)) if rows else 0


def _news(candidates: Collection[Candidate]) -> int:
    """Whose texts are new to a drafter: nobody's (0), those of half of the candidates at most (1), or of more (2)."""
    new = sum([one.unread > _NEW for one in candidates])
    return -(-2 * new // len(candidates)) if new else 0
