"""What was measured: one Sample a request, and the figures of many. Pure values, no clock and no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. All times are seconds; `sent` counts from the start of its run, the others from `sent`.

    outcome            "ok", or what went wrong: "http 429", "timeout", "cut" (no end), "error event", "connection"
    arrivals           when each piece of text arrived at the socket; several tokens may share a piece
    finished           when the answer ended, however it ended
    asked_tokens       that the answer might have at most
    completion_tokens  as `usage` says; where a server sends none, the number of pieces
    cached_tokens      prompt tokens that the server says it did not compute; None: it does not say
    text               the answer without its reasoning, or the server's error text
    """

    outcome: str
    sent: float
    arrivals: tuple[float, ...]
    finished: float
    asked_tokens: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    counted_by: Literal["usage", "chunks"] = "chunks"
    text: str = ""

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds to the first text, None where there was none."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def seconds_per_token(self) -> float | None:
        """The mean seconds a token after the first, which does not depend on how tokens share pieces."""
        if len(self.arrivals) < 2 or self.completion_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Requests sent together: `seconds` from the first one sent to the end of the last answer."""

    planned: int
    seconds: float
    samples: tuple[Sample, ...]

    @property
    def whole(self) -> list[Sample]:
        """The answers that came to their end; no other counts in a figure."""
        return [sample for sample in self.samples if sample.outcome == OK]

    @property
    def tokens_second(self) -> float:
        """Tokens of whole answers over the time of the run."""
        return sum(sample.completion_tokens for sample in self.whole) / self.seconds if self.seconds else 0.0


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of all values do not exceed (nearest rank); None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def outcomes(runs: Sequence[LoadRun]) -> dict[str, int]:
    """How many requests ended how; "lost": without an outcome, a bug of this program."""
    samples = [sample for run in runs for sample in run.samples]
    lost = sum(run.planned for run in runs) - len(samples)
    return dict(sorted(Counter(sample.outcome for sample in samples).items())) | ({"lost": lost} if lost else {})
