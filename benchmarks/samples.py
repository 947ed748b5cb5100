"""What was measured: one Sample a request, and the figures of many. Pure values, no clock and no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

OK = "ok"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. All times are seconds; `sent` counts from the start of its level, the others from `sent`.

    outcome            "ok", or what went wrong: "http 429", "timeout", "cut" (no end), "error event", "connection"
    arrivals           when each piece of text arrived at the socket; several tokens may share a piece
    finished           when the answer ended, however it ended
    completion_tokens  as `usage` says; where a server sends none, the number of pieces
    cached_tokens      prompt tokens that the server says it did not compute; None: it does not say
    """

    outcome: str
    sent: float
    arrivals: tuple[float, ...]
    finished: float
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    counted_by: Literal["usage", "chunks"] = "chunks"

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


@dataclass(frozen=True, slots=True)
class Run:
    """One level against one server, once: `seconds` from the first request sent to the last answer ended."""

    planned: int
    seconds: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one level against one server. Times are of answers that came whole; None where there is none.

    lost           requests that never got an outcome; anything but 0 is a bug of this program
    tokens_second  tokens of whole answers over the time of all runs
    ttft           from sending to the first text;  itl: between pieces;  tpot: mean time a token after the first
    """

    requests: int
    outcomes: dict[str, int]
    lost: int
    seconds: float
    completion_tokens: int
    tokens_second: float
    requests_second: float
    prompt_tokens_p50: float | None
    cached_tokens: int | None
    counted_by: list[str]
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    latency_p50: float | None
    latency_p99: float | None


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of all values do not exceed (nearest rank); None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def summarize(runs: Sequence[Run]) -> Summary:
    """Return the figures of the same level run once or more."""
    samples = [sample for run in runs for sample in run.samples]
    whole = [sample for sample in samples if sample.outcome == OK]
    seconds = sum(run.seconds for run in runs)
    tokens = sum(sample.completion_tokens for sample in whole)
    first = [sample.arrivals[0] for sample in whole if sample.arrivals]
    gaps = [gap for sample in whole for gap in sample.gaps]
    tpot = [time for sample in whole if (time := time_a_token(sample)) is not None]
    latency = [sample.finished for sample in whole]
    cached = [sample.cached_tokens for sample in whole if sample.cached_tokens is not None]
    prompts = [float(sample.prompt_tokens) for sample in whole if sample.prompt_tokens is not None]
    return Summary(
        requests=len(samples),
        outcomes=dict(sorted(Counter(sample.outcome for sample in samples).items())),
        lost=sum(run.planned for run in runs) - len(samples),
        seconds=seconds,
        completion_tokens=tokens,
        tokens_second=tokens / seconds if seconds else 0.0,
        requests_second=len(whole) / seconds if seconds else 0.0,
        prompt_tokens_p50=percentile(prompts, 0.5),
        cached_tokens=sum(cached) if cached else None,
        counted_by=sorted({sample.counted_by for sample in whole}),
        ttft_p50=percentile(first, 0.5),
        ttft_p99=percentile(first, 0.99),
        itl_p50=percentile(gaps, 0.5),
        itl_p99=percentile(gaps, 0.99),
        tpot_p50=percentile(tpot, 0.5),
        tpot_p99=percentile(tpot, 0.99),
        latency_p50=percentile(latency, 0.5),
        latency_p99=percentile(latency, 0.99),
    )


def time_a_token(sample: Sample) -> float | None:
    """Return the mean seconds a token after the first, which does not depend on how tokens share pieces."""
    if len(sample.arrivals) < 2 or sample.completion_tokens < 2:
        return None
    return (sample.arrivals[-1] - sample.arrivals[0]) / (sample.completion_tokens - 1)
