"""Round times of speculation modes, and how `auto` compares with the best fixed depth."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

# Bootstrap samples of an interval.
_RESAMPLES = 400
# A mode is dropped when it is _SURE standard errors below _CLOSE times the best one. A lower limit of the spread, which
# few rounds underestimate.
_SURE, _CLOSE, _LEAST_SPREAD = 3.0, 0.985, 0.05


@dataclass(frozen=True, slots=True)
class RoundTime:
    """One mode in one round: emitted tokens and processor seconds."""

    tokens: int
    seconds: float


@dataclass(slots=True)
class ModeComparison:
    """One drafter and batch size.

    times       by mode; a dropped mode has the first rounds only, `auto` has all
    acceptance  of each mode's drafts, by position
    """

    drafter: str
    batch: int
    times: dict[str, list[RoundTime]] = field(default_factory=dict)
    acceptance: dict[str, list[float]] = field(default_factory=dict)

    def rate(self, mode: str) -> float:
        """Tokens per second, the median of the rounds."""
        return statistics.median(one.tokens / one.seconds for one in self.times[mode])

    def ratio(self, mode: str, other: str = "off") -> float:
        """Speed of a mode relative to another, in the rounds of both."""
        return trimmed_mean(self._ratios(mode, other, range(min(len(self.times[mode]), len(self.times[other])))))

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.times["auto"])

    @property
    def candidates(self) -> list[str]:
        """The modes with a fixed depth that were not dropped."""
        return [mode for mode in self.times if _is_fixed(mode) and len(self.times[mode]) == self.rounds]

    @property
    def best(self) -> str:
        """The fastest of the candidates."""
        return self._best(range(self.rounds))

    @property
    def to_best(self) -> float:
        """Speed of `auto` relative to the best candidate, which is chosen by the other half of the rounds."""
        return self._to_best(range(self.rounds))

    @property
    def interval(self) -> tuple[float, float]:
        """The 90 % interval of `to_best`, by the bootstrap."""
        chance = random.Random(0)
        found = sorted(self._to_best(chance.choices(range(self.rounds), k=self.rounds)) for _ in range(_RESAMPLES))
        return found[_RESAMPLES // 20], found[-_RESAMPLES // 20]

    def clearly_slower(self) -> list[str]:
        """Modes that are clearly slower than the best candidate, over all rounds."""
        rounds = range(self.rounds)
        best = self._best(rounds)
        active = [mode for mode, times in self.times.items() if mode != "auto" and len(times) == self.rounds]
        return [mode for mode in active if mode != best and _clearly_below(self._ratios(mode, best, rounds))]

    def _to_best(self, rounds: Sequence[int]) -> float:
        # Halves by round number: a round that was sampled twice must not be in both.
        halves = [[number for number in rounds if number % 2 == half] or list(rounds) for half in (0, 1)]
        ratios = [
            self._ratios("auto", self._best(half), other) for half, other in zip(halves, halves[::-1], strict=True)
        ]
        return trimmed_mean([ratio for some in ratios for ratio in some])

    def _best(self, rounds: Sequence[int]) -> str:
        return max(self.candidates, key=lambda mode: trimmed_mean(self._ratios(mode, "auto", rounds)))

    def _ratios(self, mode: str, other: str, rounds: Sequence[int]) -> list[float]:
        pairs = [(self.times[mode][number], self.times[other][number]) for number in rounds]
        return [a.tokens / a.seconds * b.seconds / b.tokens for a, b in pairs]


def trimmed_mean(ratios: Sequence[float]) -> float:
    """The mean of the trimmed_mean half (interquartile mean), robust against outliers."""
    ordered = sorted(ratios)
    aside = len(ordered) // 4
    return statistics.fmean(ordered[aside : len(ordered) - aside])


def _is_fixed(mode: str) -> bool:
    return mode == "off" or mode.isdigit()


def _clearly_below(ratios: Sequence[float]) -> bool:
    """Whether the ratios are significantly below `_CLOSE`; the spread is estimated from the quartiles."""
    ordered = sorted(map(math.log, ratios))
    quarter = len(ordered) // 4
    spread = (ordered[-1 - quarter] - ordered[quarter]) / 1.35
    error = max(spread, _LEAST_SPREAD) / math.sqrt(len(ordered))
    return math.log(trimmed_mean(ratios)) + _SURE * error < math.log(_CLOSE)
