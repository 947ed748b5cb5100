"""What modes of speculation took, turn by turn, and how one of them compares with the best of the others."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

# How often rounds are drawn anew for an interval.
_RESAMPLED = 400
# A mode is given up that is so many standard errors below this share of the best one; few rounds seem to differ less
# than they do.
_SURE, _CLOSE, _LEAST_SPREAD = 3.0, 0.985, 0.05


@dataclass(frozen=True, slots=True)
class Turn:
    """One mode in one round: tokens said, and the seconds of the processor."""

    tokens: int
    seconds: float


@dataclass(slots=True)
class Cell:
    """One pair and batch: turns by mode, and of the drafts of each mode the shares that were right, by position.

    A mode that was given up has the first rounds only. `auto` has all.
    """

    pair: str
    batch: int
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    accepted: dict[str, list[float]] = field(default_factory=dict)

    def rate(self, mode: str) -> float:
        """Tokens a second."""
        return statistics.median(turn.tokens / turn.seconds for turn in self.turns[mode])

    def ratio(self, mode: str, other: str = "off") -> float:
        """How many times as fast a mode is as another, in the rounds that both played."""
        return middle(self._ratios(mode, other, range(min(len(self.turns[mode]), len(self.turns[other])))))

    @property
    def rounds(self) -> int:
        """How many there were."""
        return len(self.turns["auto"])

    @property
    def rivals(self) -> list[str]:
        """The modes that choose nothing and were not given up."""
        return [mode for mode in self.turns if _chooses_nothing(mode) and len(self.turns[mode]) == self.rounds]

    @property
    def best(self) -> str:
        """The fastest of them."""
        return self._best(range(self.rounds))

    @property
    def to_best(self) -> float:
        """How many times as fast `auto` is as the best of those: of the one that is so in other rounds."""
        return self._to_best(range(self.rounds))

    @property
    def interval(self) -> tuple[float, float]:
        """What `to_best` would be in nine of ten runs, as far as the rounds tell: by the bootstrap."""
        chance = random.Random(0)
        found = sorted(self._to_best(chance.choices(range(self.rounds), k=self.rounds)) for _ in range(_RESAMPLED))
        return found[_RESAMPLED // 20], found[-_RESAMPLED // 20]

    def hopeless(self) -> list[str]:
        """Modes that are clearly slower than the best that chooses nothing, in all rounds until now."""
        rounds = range(self.rounds)
        best = self._best(rounds)
        playing = [mode for mode, turns in self.turns.items() if mode != "auto" and len(turns) == self.rounds]
        return [mode for mode in playing if mode != best and _clearly_below(self._ratios(mode, best, rounds))]

    def _to_best(self, rounds: Sequence[int]) -> float:
        # A round that was drawn twice must not be in both halves.
        halves = [[number for number in rounds if number % 2 == half] or list(rounds) for half in (0, 1)]
        ratios = [
            self._ratios("auto", self._best(half), other) for half, other in zip(halves, halves[::-1], strict=True)
        ]
        return middle([ratio for some in ratios for ratio in some])

    def _best(self, rounds: Sequence[int]) -> str:
        return max(self.rivals, key=lambda mode: middle(self._ratios(mode, "auto", rounds)))

    def _ratios(self, mode: str, other: str, rounds: Sequence[int]) -> list[float]:
        pairs = [(self.turns[mode][number], self.turns[other][number]) for number in rounds]
        return [a.tokens / a.seconds * b.seconds / b.tokens for a, b in pairs]


def middle(ratios: Sequence[float]) -> float:
    """The mean of the middle half: what the machine did to single rounds does not count, and more does than one."""
    ordered = sorted(ratios)
    aside = len(ordered) // 4
    return statistics.fmean(ordered[aside : len(ordered) - aside])


def _chooses_nothing(mode: str) -> bool:
    return mode == "off" or mode.isdigit()


def _clearly_below(ratios: Sequence[float]) -> bool:
    """Whether ratios are below `_CLOSE` beyond doubt; the spread is taken from the quartiles."""
    ordered = sorted(map(math.log, ratios))
    quarter = len(ordered) // 4
    spread = (ordered[-1 - quarter] - ordered[quarter]) / 1.35
    error = max(spread, _LEAST_SPREAD) / math.sqrt(len(ordered))
    return math.log(middle(ratios)) + _SURE * error < math.log(_CLOSE)
