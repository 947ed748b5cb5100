"""Probabilities of labels after a prompt, from the log-probabilities of their tokens.

A label is a short answer, such as a letter. Labels of one token need one request, which scores all of them. For longer
labels, each shared prefix is one more request, whose prompt is extended by the prefix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import anyio.to_thread

from engine.types.request import Request, SamplingParams, SpeculationParams
from server.generation.batch import PromptResult, run_all
from server.generation.logprobs import IMPOSSIBLE
from server.metrics.metrics import Endpoint
from server.service import Service

Path = tuple[int, ...]

# Significant digits. Chunking and batching change the sixth in float32 (measured: 6e-6 of a probability).
DIGITS = 4


@dataclass(frozen=True, slots=True)
class LabelScores:
    """Probabilities of the labels, normalised to 1, in order; and their total probability before."""

    probabilities: tuple[float, ...]
    total_probability: float

    @property
    def best(self) -> int:
        """Index of the likeliest label; the first of equals."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """Probability of the best label among all continuations."""
        return rounded_probability(self.probabilities[self.best] * self.total_probability)


@dataclass(frozen=True, slots=True)
class LabelScorer:
    """A prompt with labels that may follow it. No label is a prefix of another one."""

    prompt: Path
    labels: tuple[Path, ...]

    def requests(self, id: str) -> Iterator[Request]:
        """Requests to run; `scores` takes their results in this order."""
        for index, (prefix, tokens) in enumerate(self._tokens_by_prefix().items()):
            yield Request(
                f"{id}-{index}",
                (*self.prompt, *prefix),
                sampling=SamplingParams(temperature=0.0),
                max_tokens=1,
                ignore_eos=True,
                logprobs=0,
                label_tokens=tokens,
                speculation=SpeculationParams("none"),
            )

    def scores(self, results: Sequence[PromptResult]) -> LabelScores:
        """Probabilities of the labels."""
        logprobs = {
            prefix: _label_logprobs(result) for prefix, result in zip(self._tokens_by_prefix(), results, strict=True)
        }
        weights = [
            sum(logprobs[label[:position]][label[position]] for position in range(len(label))) for label in self.labels
        ]
        max_weight = max(weights)
        parts = [math.exp(weight - max_weight) for weight in weights]
        whole = math.fsum(parts)
        return LabelScores(
            tuple(rounded_probability(part / whole) for part in parts), min(math.exp(max_weight) * whole, 1.0)
        )

    def _tokens_by_prefix(self) -> dict[Path, Path]:
        """Next tokens of the labels, by the tokens before them."""
        tokens_by_prefix: dict[Path, dict[int, None]] = {}
        for label in self.labels:
            for position, token in enumerate(label):
                tokens_by_prefix.setdefault(label[:position], {})[token] = None
        return {prefix: tuple(tokens) for prefix, tokens in tokens_by_prefix.items()}


async def score_labels(
    service: Service, build: Callable[[], Sequence[LabelScorer]], id: str, endpoint: Endpoint
) -> tuple[list[LabelScores], list[PromptResult]]:
    """Scores of the scorers that `build` returns, in order, and the results of their requests.

    `build` and the scoring run in worker threads: there may be thousands of questions and 100,000 labels.
    """
    scorers, requests = await anyio.to_thread.run_sync(_prepare, build, id)
    results = await run_all(service, list(itertools.chain.from_iterable(requests)), endpoint)
    return await anyio.to_thread.run_sync(_scores, scorers, requests, results), results


def rounded_probability(share: float) -> float:
    """A probability rounded to the digits that do not depend on batching."""
    return float(f"{share:.{DIGITS}g}")


def _label_logprobs(result: PromptResult) -> Mapping[int, float]:
    (entry,) = result.logprobs
    return {label.token: max(label.logprob, IMPOSSIBLE) for label in entry.labels}


def _prepare(
    build: Callable[[], Sequence[LabelScorer]], id: str
) -> tuple[Sequence[LabelScorer], list[tuple[Request, ...]]]:
    scorers = build()
    return scorers, [tuple(scorer.requests(f"{id}-{index}")) for index, scorer in enumerate(scorers)]


def _scores(
    scorers: Sequence[LabelScorer], requests: Sequence[Sequence[Request]], results: Sequence[PromptResult]
) -> list[LabelScores]:
    remaining = iter(results)
    pairs = zip(scorers, requests, strict=True)
    return [scorer.scores(list(itertools.islice(remaining, len(scorer_requests)))) for scorer, scorer_requests in pairs]
