"""All drafts that one step could verify, and which of them to take.

With the survival s of a draft, the chance that it and all drafts before it are right, a step brings (rows + sum of s)
tokens and costs T(rows + drafts) seconds and the time of drafting. The choice is the one with most tokens a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.draft.acceptance import Acceptance
from engine.draft.cost import Floats, Numbers

# What makes a choice that loses nothing cost something, as a share of a step: so that the stalest of them is tried.
_LEAST = 1e-3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could be drafted for by a kind of drafter: at most `limit` tokens."""

    kind: str
    limit: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Some drafts of an offer, the seconds of a step with them, and how much longer it takes than it brings."""

    drafts: Numbers
    seconds: float
    loss: float = 0.0


class Offer:
    """Drafts are numbers, candidate x deepest limit + level; they are taken in the order of their survival.

    rows           rows that the step computes anyway, each worth a token
    level_seconds  what a kind's drafting of one level costs, for all of its candidates together
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        known: Mapping[str, Acceptance],
        level_seconds: Mapping[str, float],
        *,
        rows: int,
    ) -> None:
        self._rows = rows
        self._kinds = np.array([candidate.kind for candidate in candidates])
        self._limits = np.array([candidate.limit for candidate in candidates])
        self._deepest = int(self._limits.max())
        self._level_seconds = {kind: level_seconds[kind] for kind in known if level_seconds.get(kind)}
        self._survival = self._spread({kind: rates.survival(self._deepest) for kind, rates in known.items()})
        self._ages = self._spread({kind: rates.ages(self._deepest) for kind, rates in known.items()})
        order = np.argsort(-self._survival, kind="stable")
        self._order: Numbers = order[self._survival[order] > 0]

    @property
    def size(self) -> int:
        """How many drafts there are."""
        return len(self._order)

    def best(self, costs: Floats) -> Choice:
        """The drafts that bring most tokens a second; costs[n] are the seconds of a step with n drafts.

        For every cap on the depth, the likeliest drafts up to it, as many as pay. The cap is what makes this right for
        drafters that pay by level: without it, one deep draft of a single sequence costs all of them a level.
        """
        caps = self._caps()
        # [caps, drafts]: which of the drafts, in their order, a cap lets through.
        inside = (self._order % self._deepest) < caps[:, None]
        counts = inside.cumsum(1)
        inside &= counts < len(costs)
        seconds = costs[np.minimum(counts, len(costs) - 1)] + self._drafting(inside)
        rates = (self._rows + (self._survival[self._order] * inside).cumsum(1)) / seconds
        nothing = Choice(self._order[:0], float(costs[0]))
        if not rates.size or rates.max() <= self._rows / nothing.seconds:
            return nothing
        cap, at = divmod(int(rates.argmax()), len(self._order))
        return Choice(self._order[: at + 1][inside[cap, : at + 1]], float(seconds[cap, at]))

    def curious(self, best: Choice, costs: Floats, ages: Floats) -> Choice:
        """The choice but the best one that is cheapest to try for the steps that it was not tried.

        ages[n] are the steps since one of as many rows was measured. Every choice so costs about the same in the long
        run, and what would cost much is tried seldom.
        """
        drafts = self._order[: len(costs) - 1]
        costs = costs[: len(drafts) + 1].copy()
        costs[1:] += self._drafting(np.ones((1, len(self._order)), dtype=np.bool_))[0, : len(drafts)]
        tokens = self._rows + np.concatenate(([0.0], np.cumsum(self._survival[drafts])))
        rate = (self._rows + self._survival[best.drafts].sum()) / best.seconds
        losses = np.maximum(costs - tokens / rate, 0.0)
        stale = np.maximum(ages[: len(costs)], np.concatenate(([0.0], self._ages[drafts])))
        price = (losses + _LEAST * best.seconds) / np.maximum(stale, 1e-9)
        price[len(best.drafts) : len(best.drafts) + 1] = np.inf
        at = int(price.argmin())
        return Choice(drafts[:at], float(costs[at]), float(losses[at]))

    def depths(self, choice: Choice) -> list[int]:
        """How deep a choice drafts for each candidate."""
        counts = np.bincount(choice.drafts // self._deepest, minlength=len(self._limits))
        return [int(count) for count in counts]

    def _spread(self, by_kind: Mapping[str, list[float]]) -> Floats:
        """What is known of kinds and levels, for each draft; 0 behind a candidate's limit."""
        inside = np.arange(self._deepest) < self._limits[:, None]
        return np.where(inside, np.array([by_kind[kind] for kind in self._kinds]), 0.0).ravel()

    def _caps(self) -> Numbers:
        """Where drafting costs nothing, or there is only one to draft for, the order alone is right."""
        apart = self._level_seconds and len(self._limits) > 1
        return np.arange(1 if apart else self._deepest, self._deepest + 1)

    def _drafting(self, inside: NDArray[np.bool_]) -> Floats:
        """Seconds of drafting the first, the first two, ... of the drafts, but for those outside [caps, drafts].

        A kind drafts a level for all at once.
        """
        total = np.zeros(inside.shape)
        for kind, seconds in self._level_seconds.items():
            own = self._kinds[self._order // self._deepest] == kind
            levels = np.where(own, self._order % self._deepest + 1, 0)
            total += seconds * np.maximum.accumulate(levels * inside, axis=1)
        return total
