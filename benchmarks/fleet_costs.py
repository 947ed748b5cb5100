"""Costs of a server from the JSON of `cellar bench`: a linear model of its steps, as its own scheduler has one.

prefill of n tokens at position p    token seconds x n + pair seconds x (n p + n (n + 1) / 2)
a step of B sequences in decode      step seconds + sequence seconds x B + cell seconds x (tokens of their contexts)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCosts:
    """Seconds of the work of one replica; `request` is spent outside of steps, such as parsing and templates."""

    request: float
    token: float
    pair: float
    step: float
    sequence: float
    cell: float

    def prefill(self, tokens: int, start: int) -> float:
        """Seconds of prefill tokens behind `start` cached ones."""
        return self.token * tokens + self.pair * (tokens * start + tokens * (tokens + 1) / 2)

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


def costs_of_cells(cells: Sequence[dict[str, Any]]) -> ServerCosts:
    """Costs fitted to the cells of one or more runs of `cellar bench`; ValueError with too few."""
    first, steps = [*first_tokens(cells)], [*decode_steps(cells)]
    if len(first) < 3 or len({sequences for (_, sequences, _), _ in steps}) < 2:
        raise ValueError("costs need three lengths of a lone stream, and two numbers of streams")
    request, token, pair = non_negative_fit(first)
    step, sequence, cell = non_negative_fit(steps)
    return ServerCosts(request=request, token=token, pair=pair, step=step, sequence=sequence, cell=cell)


def first_tokens(cells: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[float, float, float], float]]:
    """(1, computed tokens, pairs) and the seconds to the first token of each length of a lone stream, as medians."""
    for cell in cells:
        if cell["scenario"] == "latency":
            found = [*samples([cell], "latency")]
            cached = median(one["cached_tokens"] or 0 for one in found)
            tokens = median(one["prompt_tokens"] for one in found) - cached
            pairs = tokens * cached + tokens * (tokens + 1) / 2
            yield (1.0, tokens, pairs), median(one["arrivals"][0] for one in found)


def decode_steps(cells: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[float, float, float], float]]:
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


def non_negative_fit(points: Sequence[tuple[tuple[float, float, float], float]]) -> tuple[float, float, float]:
    """Least squares of relative errors with factors of 0 or more: the best subset of the three terms."""
    terms = np.array([term for term, _ in points]) / np.array([[seconds] for _, seconds in points])
    best, least = (0.0, 0.0, 0.0), math.inf
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found = np.linalg.lstsq(terms[:, chosen], np.ones(len(points)), rcond=None)[0]
            error = float(np.square(terms[:, chosen] @ found - 1).sum())
            if (found >= 0).all() and error < least:
                values = dict(zip(chosen, map(float, found), strict=True))
                best, least = (values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)), error
    return best
