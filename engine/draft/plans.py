"""What was decided about depths, and for how long it is kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.draft.offer import Depths

# A plan is kept for a share of the steps that were taken, and for so many at most; rests may take four times that.
# What is asked seldom is kept until so many times as many steps have passed.
_GREEN, _LONGEST_PLAN, _SELDOM = 16, 64, 8
# Even one that changes each time is kept for a smaller share of the steps, and for so many of them at most: thinking of
# it at every step costs more than it is worth where depths are that close.
_RIPE, _SHORTEST_PLAN = 256, 8
# Trials that count at most.
_MOST_TRIALS = 10
# Steps for which a kind whose drafts do not pay is not even asked, at most.
LONGEST_REST = 127


@dataclass(slots=True)
class Plan:
    """The best depths as far as was known, kept until a step, or until they were used so often.

    worth   seconds that a draft of them may take in a step that reads prompts
    skips   whether there are none for texts that are new to their drafter, for they take longer to read than they save
    length  how often they may be used in all: the oftener they were found best, the oftener
    trials  of something else that did not change them, lately
    tried   whether there was one since
    """

    depths: Depths
    worth: float
    skips: bool = False
    length: int = 1
    trials: int = 0
    tried: bool = False
    until: int = 0
    uses: int = 0

    @classmethod
    def after(cls, before: Plan | None, depths: Depths, worth: float, *, skips: bool = False) -> Plan:
        """What is best now. The oftener it came out the same, the longer it is kept; what is new may be wrong."""
        if before is None:
            return cls(depths, worth, skips)
        if (before.depths, before.skips) == (depths, skips):
            return cls(depths, worth, skips, 2 * before.length + 1, min(before.trials + before.tried, _MOST_TRIALS))
        return cls(depths, worth, skips, before.length // 8, before.trials // 2)

    def keep(self, step: int, most: int) -> None:
        """From this step on; `most` steps, or the length where that is more."""
        shortest = min(step // _RIPE, _SHORTEST_PLAN)
        self.length = max(min(self.length, step // _GREEN, _LONGEST_PLAN), shortest)
        # Where a kind does not pay, its rest is all the plan there is.
        self.uses = max(self.length, min(most, 2 * self.length)) if all(self.depths.values()) else 0
        self.until = step + 1 + _SELDOM * self.uses

    def use(self, step: int) -> Depths:
        """The depths, once more."""
        self.uses -= 1
        if self.uses <= 0:
            self.until = step + 1
        return self.depths


@dataclass(slots=True)
class Trial:
    """Depths that are not the best as far as is known.

    size     of the step
    woken    kinds of which nothing is the best
    loss     that the trial is expected to cost, in steps like the best one
    until    the step in which it is over
    """

    size: int
    depths: Depths
    woken: Collection[str]
    loss: float
    until: int


@dataclass(slots=True)
class Rest:
    """Steps of about as many rows for which a kind is left in peace: the more, the oftener it did not pay there.

    until   the step of them in which it is over
    length  of them in all
    """

    until: int = 0
    length: int = 0

    def decide(self, deepest: int, now: int, step: int, most: int) -> None:
        """How deep is best in this step, `now` among those of about as many rows; the rest has `most` steps at most."""
        most = max(min(most, LONGEST_REST, 1 + 4 * step // _GREEN), 0)
        self.length = 0 if deepest else min(2 * self.length + 1, most)
        # The step itself is the first.
        self.until = now + self.length


@dataclass(slots=True)
class Savings:
    """What trials may cost in steps of about as many rows: each size saves up for its own.

    Else sizes that are seldom met, and know little, would spend what all others saved.

    saved    in such steps
    steps    of them so far
    counted  of those, what was saved in them
    """

    saved: float
    steps: int = 0
    counted: int = 0

    def pay(self, loss: float, share: float, least: float) -> bool:
        """Pay for a trial if it can be: this share of the steps is saved, up to what it costs or to `least`."""
        self.saved = min(self.saved + share * (self.steps - self.counted), max(loss, least))
        self.counted = self.steps
        if loss > self.saved:
            return False
        self.saved -= loss
        return True
