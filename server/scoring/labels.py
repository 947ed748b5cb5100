"""How likely each of some answers is: read from the log-probabilities of their first tokens, one forward a fork.

An answer is a short label, such as a letter. Labels of one token are read behind the prompt itself. Longer ones fork
behind the tokens that they share: every fork is one more request, whose prompt goes on with these, and which computes
no more than what is new in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.types.request import Request, SamplingParams, SpeculationParams
from server.generation.batch import PromptResult
from server.generation.logprobs import IMPOSSIBLE

Path = tuple[int, ...]

# Significant ones. Chunks and neighbours in a batch change the sixth in float32 (measured: by 6e-6 of a probability).
DIGITS = 4


@dataclass(frozen=True, slots=True)
class LabelScores:
    """How likely the labels are among themselves, in their order, and all of them together among all that could be."""

    shares: tuple[float, ...]
    total_probability: float

    @property
    def best(self) -> int:
        """The likeliest label; of equals the first."""
        return max(range(len(self.shares)), key=self.shares.__getitem__)

    @property
    def confidence(self) -> float:
        """How likely the best label is among all that could be."""
        return rounded_probability(self.shares[self.best] * self.total_probability)


@dataclass(frozen=True, slots=True)
class LabelScorer:
    """A prompt with labels that may follow it. No label is the beginning of another one."""

    prompt: Path
    labels: tuple[Path, ...]

    def requests(self, id: str) -> Iterator[Request]:
        """What has to be run; `read` takes the outcomes in this order."""
        for at, (path, tokens) in enumerate(self._places().items()):
            yield Request(
                f"{id}-{at}",
                (*self.prompt, *path),
                sampling=SamplingParams(temperature=0.0),
                max_tokens=1,
                ignore_eos=True,
                logprobs=0,
                label_tokens=tokens,
                speculation=SpeculationParams("none"),
            )

    def scores(self, outcomes: Sequence[PromptResult]) -> LabelScores:
        """How likely the labels are."""
        told = {path: _told(outcome) for path, outcome in zip(self._places(), outcomes, strict=True)}
        weights = [sum(told[label[:at]][label[at]] for at in range(len(label))) for label in self.labels]
        highest = max(weights)
        parts = [math.exp(weight - highest) for weight in weights]
        whole = math.fsum(parts)
        return LabelScores(
            tuple(rounded_probability(part / whole) for part in parts), min(math.exp(highest) * whole, 1.0)
        )

    def _places(self) -> dict[Path, Path]:
        """By the tokens behind the prompt, those of labels that may follow."""
        found: dict[Path, dict[int, None]] = {}
        for label in self.labels:
            for at, token in enumerate(label):
                found.setdefault(label[:at], {})[token] = None
        return {path: tuple(tokens) for path, tokens in found.items()}


def rounded_probability(share: float) -> float:
    """A probability as it is told: in digits that do not depend on what else was computed at the same time."""
    return float(f"{share:.{DIGITS}g}")


def _told(outcome: PromptResult) -> Mapping[int, float]:
    (entry,) = outcome.logprobs
    return {label.token: max(label.logprob, IMPOSSIBLE) for label in entry.labels}
