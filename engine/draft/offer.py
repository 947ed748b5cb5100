"""All drafts that one step could verify, and which of them to take.

With the survival s of a draft, the chance that it and all drafts before it are right, a step brings (rows + sum of s)
tokens and costs T(rows + drafts) seconds and the time of drafting. The choice is the one with most tokens a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.cost import Floats, Numbers
from engine.draft.acceptance import Acceptance
from engine.draft.levels import LevelCost

# What makes a choice that loses nothing cost something, as a share of a step: so that the stalest of them is tried.
_LEAST = 1e-3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could be drafted for by a kind of drafter: at most `limit` tokens."""

    kind: str
    limit: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Some drafts of an offer, and the seconds of a step with them.

    gain  tokens that they are expected to bring
    loss  how many seconds longer the step takes than what it brings is worth
    """

    drafts: Numbers
    seconds: float
    gain: float = 0.0
    loss: float = 0.0


class Offer:
    """Drafts are numbers, candidate x deepest limit + level; they are taken in the order of their survival.

    rows  rows that the step computes anyway, each worth a token
    paid  what a kind's drafting costs by levels, for all of its candidates together; who costs nothing is not in it
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        known: Mapping[str, Acceptance],
        paid: Mapping[str, LevelCost],
        *,
        rows: int,
    ) -> None:
        self._rows, self._count = rows, len(candidates)
        limits = np.array([candidate.limit for candidate in candidates])
        deepest = self._deepest = int(limits.max())
        numbers = {kind: number for number, kind in enumerate(known)}
        kinds = np.array([numbers[candidate.kind] for candidate in candidates])
        rates = np.array([acceptance.survival(deepest) for acceptance in known.values()])
        chances = np.where(np.arange(deepest) < limits[:, None], rates[kinds], 0.0).ravel()
        order = np.argsort(-chances, kind="stable")
        # By draft, in the order in which they are taken: its number, survival, level, age, and the seconds of its kind
        # by level.
        self._order: Numbers = order[: int((chances > 0).sum())]
        self._survival = chances[self._order]
        self._levels = self._order % deepest + 1
        own = kinds[self._order // deepest]
        ages = np.array([acceptance.ages(deepest) for acceptance in known.values()])
        self._ages = ages[own, self._levels - 1]
        levels = np.arange(deepest + 1)
        # By kind that costs something: the levels of its drafts, and the seconds of so many levels.
        self._paid = [
            (np.where(own == numbers[kind], self._levels, 0), paid[kind].seconds(levels))
            for kind in known
            if kind in paid
        ]

    @property
    def size(self) -> int:
        """How many drafts there are."""
        return len(self._order)

    def best(self, costs: Floats) -> Choice:
        """The drafts that bring most tokens a second; costs[n] are the seconds of a step with n drafts.

        For every cap on the depth, the likeliest drafts up to it, as many as pay. The cap is what makes this right for
        drafters that pay by level: without it, one deep draft of a single sequence costs all of them a level.
        """
        # [caps, drafts]: which of the drafts, in their order, a cap lets through.
        inside = self._levels <= self._caps()[:, None]
        counts = inside.cumsum(1)
        inside &= counts < len(costs)
        seconds = costs[np.minimum(counts, len(costs) - 1)] + self._drafting(inside)
        rates = (self._rows + (self._survival * inside).cumsum(1)) / seconds
        nothing = Choice(self._order[:0], float(costs[0]))
        if not rates.size or rates.max() <= self._rows / nothing.seconds:
            return nothing
        cap, at = divmod(int(rates.argmax()), len(self._order))
        taken = inside[cap, : at + 1]
        gain = float(self._survival[: at + 1][taken].sum())
        return Choice(self._order[: at + 1][taken], float(seconds[cap, at]), gain=gain)

    def curious(self, best: Choice, costs: Floats, ages: Floats) -> Choice:
        """The choice but the best one that is cheapest to try for the steps that it was not tried.

        ages[n] are the steps since one of as many rows was measured. Every choice so costs about the same in the long
        run, and what would cost much is tried seldom.
        """
        count = min(len(self._order), len(costs) - 1)
        costs = costs[: count + 1].copy()
        costs[1:] += self._drafting(np.ones((1, len(self._order)), dtype=np.bool_))[0, :count]
        tokens = self._rows + np.concatenate(([0.0], self._survival[:count].cumsum()))
        losses = np.maximum(costs - tokens * best.seconds / (self._rows + best.gain), 0.0)
        stale = np.maximum(ages[: count + 1], np.concatenate(([0.0], self._ages[:count])))
        price = (losses + _LEAST * best.seconds) / np.maximum(stale, 1e-9)
        price[len(best.drafts) : len(best.drafts) + 1] = np.inf
        at = int(price.argmin())
        return Choice(self._order[:at], float(costs[at]), loss=float(losses[at]))

    def depths(self, choice: Choice) -> list[int]:
        """How deep a choice drafts for each candidate."""
        counts: list[int] = np.bincount(choice.drafts // self._deepest, minlength=self._count).tolist()
        return counts

    def _caps(self) -> Numbers:
        """Where drafting costs nothing, or there is only one to draft for, the order alone is right."""
        deepest = int(self._levels.max(initial=1))
        return np.arange(1 if self._paid and self._count > 1 else deepest, deepest + 1)

    def _drafting(self, inside: NDArray[np.bool_]) -> Floats:
        """Seconds of drafting the first, the first two, ... of the drafts, but for those outside [caps, drafts].

        A kind drafts a level for all at once.
        """
        total = np.zeros(inside.shape)
        for levels, seconds in self._paid:
            total += seconds[np.maximum.accumulate(levels * inside, axis=1)]
        return total
