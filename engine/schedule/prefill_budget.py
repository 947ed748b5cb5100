"""How many rows of prompt a step may compute, so that those who speak are not kept waiting.

A step with rows of prompt takes at most a target of seconds, as far as is known what steps cost (cost.py). Where nobody
speaks it takes longer: so long that who comes next does not wait for it either. A few rows are always granted, so
prompts come to an end whatever the target is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from engine.schedule.step_cost import StepCost, Work

# Without a configured target. 60 ms keep the 99th percentile between tokens of 8 streams below llama.cpp's on small
# models (Gemma 3 270M with int8 on two threads: 63 ms against 76; with 80 ms 82 against 74) at the throughput of 80 ms
# (SmolLM2-135M's shape on one thread: 1 % less; with 50 ms 2 %, with 40 ms 3 to 7 %). Slower models get three times a
# step without prompts: with twice as long the last of 8 prompts is computed 1.1 to 1.4 times as late.
_UNNOTICED_SECONDS, _STRETCH = 0.06, 3.0
# Where nobody speaks.
_ALONE_SECONDS = 0.5
# Rows that are granted whatever they cost, beside those who speak and alone. On the native step of SmolLM2-135M a
# prompt of 512 tokens takes 1.20 times as long in spans of 16 as at once, and 1.07, 1.04, 1.01 and 1.02 times in spans
# of 32, 48, 64 and 96.
LEAST_ROWS, LEAST_ALONE = 16, 64


class Allowance:
    """What one step may still take.

    work     what it computes already
    seconds  that it may take with rows of prompt, asked for only where there are prompts
    least    rows of prompt, whatever they cost
    most     rows of prompt, however little they cost
    """

    def __init__(self, cost: StepCost, work: Work, *, seconds: Callable[[], float], least: int, most: int) -> None:
        self._cost, self._work, self._seconds = cost, work, seconds
        self._left, self._least = most, min(least, most)

    def rows(self, start: int) -> int:
        """Rows that a prompt which stands at `start` may have."""
        if self._left == 0 or math.isinf(seconds := self._seconds()):
            return self._left
        # What was never measured is approached by doubling.
        most = min(self._left, max(self._cost.frontier - self._work.rows, 0))
        fits = np.flatnonzero(self._cost.grown(self._work, start, most) <= seconds)
        return max(int(fits[-1]) + 1 if len(fits) else 0, self._least)

    def take(self, work: Work) -> None:
        """A prompt gets so much."""
        self._work += work
        self._left = max(self._left - work.rows, 0)
        self._least = max(self._least - work.rows, 0)


class Budget:
    """Makes the allowances of all steps.

    most            rows of prompt a step at most, over all sequences
    target_seconds  from token to token; 0: prompts first, each step takes all the rows it can; None: by what steps cost
    """

    def __init__(self, cost: StepCost, *, most: int, target_seconds: float | None) -> None:
        self._cost, self._most, self._target = cost, most, target_seconds

    def allow(self, speaking: Work) -> Allowance:
        """The allowance of a step that computes the rows of those who speak; no work: nobody does."""
        least = LEAST_ROWS if speaking.rows else LEAST_ALONE
        seconds = partial(self._limit, speaking)
        return Allowance(self._cost, speaking, seconds=seconds, least=least, most=self._most)

    def _limit(self, speaking: Work) -> float:
        if self._target == 0:
            return math.inf
        if not speaking.rows:
            return _ALONE_SECONDS
        if self._target is not None:
            return self._target
        return max(_UNNOTICED_SECONDS, _STRETCH * self._cost.estimate(speaking))
