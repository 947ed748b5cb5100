"""Costs of a server from the JSON of `cellar bench`: a linear model of its steps, as its own scheduler has one.

a request with a prompt of n tokens  request seconds + text seconds x n, cached tokens included
prefill of n tokens at position p    token seconds x n + pair seconds x (n p + n (n + 1) / 2)
a step of B sequences in decode      step seconds + sequence seconds x B + cell seconds x (tokens of their contexts)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCosts:
    """Seconds of the work of one replica; `request` and `text` are spent outside of steps, such as in the tokenizer."""

    request: float
    text: float = 0.0
    token: float
    pair: float
    step: float
    sequence: float
    cell: float

    def reading(self, prompt: int) -> float:
        """Seconds before the prefill of a prompt."""
        return self.request + self.text * prompt

    def prefill(self, tokens: int, start: int) -> float:
        """Seconds of prefill tokens behind `start` cached ones."""
        return self.token * tokens + self.pair * (tokens * start + tokens * (tokens + 1) / 2)

    def first_token(self, prompt: int, cached: int) -> float:
        """Seconds to the first token of a lone request."""
        return self.reading(prompt) + self.prefill(prompt - cached, cached)

    def decode(self, sequences: int, context: float) -> float:
        """Seconds of a step of sequences in decode with `context` tokens together; 0 without sequences."""
        return self.step + self.sequence * sequences + self.cell * context if sequences else 0.0

    def fitting_tokens(self, seconds: float, start: int) -> int:
        """Prefill tokens behind `start` cached ones that take at most `seconds`."""
        linear = self.token + self.pair * (start + 0.5)
        if self.pair == 0:
            return int(seconds / linear)
        return int((math.sqrt(linear**2 + 2 * self.pair * max(seconds, 0.0)) - linear) / self.pair)


def read_costs(path: Path) -> ServerCosts:
    """Costs fitted to bench.json with latency and throughput, or those of a result of benchmarks.fleet."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if "cells" in content:
        return costs_of_cells(content["cells"])
    rows = [row for document in (content if isinstance(content, list) else [content]) for row in document["rows"]]
    return ServerCosts(**next(row["costs"] for row in rows if "costs" in row))


Point = tuple[tuple[float, ...], float]


def costs_of_cells(cells: Sequence[dict[str, Any]], paced: Sequence[dict[str, Any]] = ()) -> ServerCosts:
    """Costs fitted to the cells of one or more runs of `cellar bench`; ValueError with too few.

    paced  cells of requests with pauses between them, for `request`: after a pause the caches of a processor are cold
    """
    first, steps = [*first_tokens(cells)], [*decode_steps(cells)]
    if len({terms[2] for terms, _ in first}) < 3 or len({terms[1] for terms, _ in steps}) < 2:
        raise ValueError("costs need three lengths of a lone stream, and two numbers of streams")
    # Without cached prefixes a token of the prompt and a computed one are the same.
    can_tell = any(terms[1] > 2 * terms[2] for terms, _ in first)
    request, text, token, pair = non_negative_fit(first, range(4) if can_tell else (0, 2, 3))
    step, sequence, cell = non_negative_fit(steps, range(3))
    costs = ServerCosts(request=request, text=text, token=token, pair=pair, step=step, sequence=sequence, cell=cell)
    return costs if not paced else replace(costs, request=paced_request(costs, paced))


def paced_request(costs: ServerCosts, cells: Sequence[dict[str, Any]]) -> float:
    """Median seconds to the first token of paced requests, beyond the costs of their tokens."""
    others = replace(costs, request=0.0)
    found = [one for cell in cells for one in samples([cell], cell["scenario"])]
    return max(0.0, median(one["arrivals"][0] - others.first_token(*prompt_of(one)) for one in found))


def first_tokens(cells: Sequence[dict[str, Any]]) -> Iterator[Point]:
    """(1, prompt tokens, computed tokens, pairs) and the seconds to the first token of a lone stream.

    Of each length, medians; of prompts with a cached prefix, each.
    """
    for cell in cells:
        found = [*samples([cell], cell["scenario"])] if cell["scenario"] in ("latency", "reuse") else []
        groups = [found] if cell["scenario"] == "latency" else [[one] for one in found]
        for group in groups:
            prompt, cached = (median(numbers) for numbers in zip(*map(prompt_of, group), strict=True))
            tokens = prompt - cached
            pairs = tokens * cached + tokens * (tokens + 1) / 2
            yield (1.0, prompt, tokens, pairs), median(one["arrivals"][0] for one in group)


def prompt_of(sample: dict[str, Any]) -> tuple[int, int]:
    """Tokens of a prompt, and the cached ones among them."""
    return sample["prompt_tokens"], sample["cached_tokens"] or 0


def decode_steps(cells: Sequence[dict[str, Any]]) -> Iterator[Point]:
    """(1, sequences, tokens of their contexts) and the median seconds of a step, of each cell.

    With many streams some gaps between tokens contain prefill; their median does not, at bench's default lengths.
    """
    for cell in cells:
        sequences = cell["at"] if cell["scenario"] == "throughput" else 1
        found = [*samples([cell], cell["scenario"])] if cell["scenario"] in ("latency", "throughput") else []
        gaps = [later - earlier for one in found for earlier, later in pairwise(one["arrivals"])]
        if gaps:
            length = median(one["prompt_tokens"] + one["completion_tokens"] / 2 for one in found)
            yield (1.0, sequences, sequences * length), median(gaps)


def samples(cells: Sequence[dict[str, Any]], scenario: str) -> Iterator[dict[str, Any]]:
    """The complete answers of a scenario."""
    for cell in cells:
        for run in cell["runs"] if cell["scenario"] == scenario else ():
            yield from (one for one in run["samples"] if one["outcome"] == "ok" and one["arrivals"])


def non_negative_fit(points: Sequence[Point], allowed: Sequence[int]) -> tuple[float, ...]:
    """Least squares of relative errors with factors of 0 or more: the best subset of the allowed terms."""
    terms = np.array([term for term, _ in points]) / np.array([[seconds] for _, seconds in points])
    best, least = np.zeros(terms.shape[1]), math.inf
    for count in range(1, len(allowed) + 1):
        for chosen in combinations(allowed, count):
            found = np.linalg.lstsq(terms[:, chosen], np.ones(len(points)), rcond=None)[0]
            error = float(np.square(terms[:, chosen] @ found - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(terms.shape[1]), error
                best[list(chosen)] = found
    return tuple(map(float, best))
