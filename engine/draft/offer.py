"""The depths that a step could draft at, and what each of them is worth.

With the survival s of a draft, the chance that it and all drafts before it are right, a step brings (rows + sum of s)
tokens and costs T(rows + drafts) seconds and the time of drafting. The best choice brings most tokens a second.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from engine.draft.acceptance import Acceptance
from engine.draft.lengths import Lengths
from engine.draft.levels import DraftCost
from engine.schedule.step_cost import StepCost

# Drafts that are right as seldom as this are not considered, but for the first of each kind.
_HOPELESS = 0.005
# Where a token costs so many times as much as at best, there is no use in going on.
_FAR = 2.0
# What makes a choice that loses nothing cost something, as a share of a step: so that the stalest of them is tried.
_LEAST = 1e-3
# How many times as fast drafts have to be as none, and as those that were chosen before.
_GAIN, _ALIKE = 1.01, 1.02

# How deep to draft, by kind.
Depths: TypeAlias = Mapping[str, int]


class Candidate(NamedTuple):
    """A sequence that could be drafted for by a kind of drafter.

    limit   tokens to draft at most
    unread  tokens of its text that the drafter would read first
    said    tokens of its output so far
    room    tokens that it may still say
    """

    kind: str
    limit: int
    unread: int = 0
    said: int = 0
    room: int = sys.maxsize


class _Level(NamedTuple):
    """The drafts at one position of all candidates of a kind that may have so many."""

    kind: str
    depth: int
    drafts: int
    survival: float
    age: float


class Choices:
    """No drafts, and then level by level those that are likeliest right, as far as it is known what rows cost.

    A choice is the number of levels that it has. All candidates of a kind have the same depth, or their limit.

    What a drafter has to read first is spread over what the sequences will still say.

    rows     rows that the step computes anyway, each worth a token
    paid     what a kind's drafting costs at a pace of 1; who costs nothing is not in it
    lengths  of texts that ended
    """

    def __init__(
        self,
        candidates: Collection[Candidate],
        known: Mapping[str, Acceptance],
        paid: Mapping[str, DraftCost],
        cost: StepCost,
        rows: int,
        lengths: Lengths,
    ) -> None:
        self._kinds = known.keys()
        self._levels = sorted(_levels(candidates, known), key=attrgetter("survival"), reverse=True)
        counts = list(accumulate([rows, *(level.drafts for level in self._levels)]))
        self._counts = counts[: bisect_right(counts, cost.reach)]
        seconds, pace = cost.seconds(self._counts), cost.pace
        tokens, drafting, lines = float(rows), 0.0, dict[str, tuple[float, float]]()
        reading, spread = 0.0, 0.0
        self._tokens, self._seconds, least = [tokens], seconds[:1], seconds[0] / tokens
        self._reading, self._spread = [0.0], [0.0]
        for (kind, depth, drafts, survival, _), step_seconds in zip(self._levels, seconds[1:], strict=False):
            tokens += drafts * survival
            if kind in paid:
                if depth == 1:
                    lines[kind] = paid[kind].line(drafts)
                    drafting += pace * lines[kind][0]
                    unread, each = _unread(candidates, kind, lengths)
                    reading += pace * paid[kind].token * unread
                    spread += pace * paid[kind].token * each / rows
                drafting += pace * lines[kind][1]
            self._tokens.append(tokens)
            self._seconds.append(step_seconds + drafting)
            self._reading.append(reading)
            self._spread.append(spread)
            least = min(least, self._seconds[-1] / tokens)
            if self._seconds[-1] > _FAR * least * tokens:
                break
        ages = cost.ages(self._counts[: len(self._tokens)])
        self._ages = list(map(max, ages, [0.0, *(level.age for level in self._levels)]))

    def depths(self, choice: int) -> Depths:
        """How deep a choice drafts."""
        deepest = dict.fromkeys(self._kinds, 0)
        deepest.update((level.kind, level.depth) for level in self._levels[:choice])
        return deepest

    def seconds(self, choice: int) -> float:
        """What a step and its drafting take."""
        return self._seconds[choice]

    def reading(self, choice: int) -> float:
        """What its drafters have to read first takes."""
        return self._reading[choice]

    def price(self, choice: int) -> float:
        """Seconds a token, with its share of what has to be read first."""
        return self._seconds[choice] / self._tokens[choice] + self._spread[choice]

    def loss(self, choice: int, price: float) -> float:
        """How many seconds longer a step takes than what it brings is worth."""
        return max(self._seconds[choice] - self._tokens[choice] * price, 0.0)

    @property
    def fastest(self) -> int:
        """The choice that brings most tokens a second."""
        return min(range(len(self._tokens)), key=self.price)

    def settled(self, before: Depths | None) -> int:
        """The fastest, or one that is nearly as fast: none at all, or else the depths of before.

        Estimates differ by as much from one time to the next, and texts that grow by leaps end one by one, so that the
        last of them have a step for themselves.
        """
        best = self.fastest
        if self.price(0) <= _GAIN * self.price(best):
            return 0
        same = 0 if before is None else self._choice(before)
        return same if same and self.price(same) <= _ALIKE * self.price(best) else best

    def worth(self, choice: int) -> float:
        """Seconds that each draft of a choice may take in some step, so that its tokens cost no more than here."""
        drafts = self._counts[choice] - self._counts[0]
        return (self._tokens[choice] - self._tokens[0]) * self.price(choice) / drafts if drafts else 0.0

    def _choice(self, depths: Depths) -> int:
        """The choice that drafts as deep; 0: none does."""
        choice = sum(level.depth <= depths[level.kind] for level in self._levels[: len(self._tokens) - 1])
        return choice if self.depths(choice) == depths else 0

    def stalest(self, best: int) -> int:
        """The choice but the best one that is cheapest to try for the steps that it was not tried.

        Every choice so costs about the same in the long run, and what would cost much is tried seldom.
        """
        price, least = self.price(best), _LEAST * self._seconds[best]
        others = [choice for choice in range(len(self._tokens)) if choice != best]
        return min(
            others,
            key=lambda choice: (self.loss(choice, price) + self.reading(choice) + least) / max(self._ages[choice], 1.0),
            default=best,
        )


def _unread(candidates: Collection[Candidate], kind: str, lengths: Lengths) -> tuple[int, float]:
    """Tokens that a kind's drafter would read: of all texts, and for each token that these will say."""
    texts = [one for one in candidates if one.kind == kind]
    return sum(one.unread for one in texts), sum(
        one.unread / max(min(one.room, lengths.left(one.said)), 1.0) for one in texts
    )


def _levels(candidates: Collection[Candidate], known: Mapping[str, Acceptance]) -> Iterator[_Level]:
    for kind, acceptance in known.items():
        limits = Counter([candidate.limit for candidate in candidates if candidate.kind == kind])
        deepest, drafts = max(limits, default=0), sum(limits.values())
        ages = acceptance.ages(deepest)
        for at, survival in enumerate(acceptance.survival(deepest)):
            drafts -= limits[at]
            if survival < _HOPELESS and at > 0:
                break
            yield _Level(kind, at + 1, drafts, survival, ages[at])
