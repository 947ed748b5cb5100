"""Prefill tokens a step may compute, so that sequences in decode get their next token in time.

A step with prefill takes at most a target of seconds, estimated from measured step costs (step_cost.py). Without
sequences in decode it takes up to half a second, so that a new request does not wait long either. A few tokens are
allowed at any cost, so that every prefill ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from engine.schedule.step_cost import StepCost, Work

# Seconds of a step with prefill without a configured target. 60 ms keep the 99th percentile between tokens of 8 streams
# below llama.cpp's on small models (Gemma 3 270M with int8 on two threads: 63 ms against 76; with 80 ms 82 against 74)
# at the throughput of 80 ms (SmolLM2-135M's shape on one thread: 1 % less; with 50 ms 2 %, with 40 ms 3 to 7 %).
_TARGET_SECONDS = 0.06
# The same for slow models, in steps without prefill. With 2 the last of 8 prompts is computed 1.1 to 1.4 times as late.
_TARGET_STEPS = 3.0
# Seconds of a step without sequences in decode.
_ALONE_SECONDS = 0.5
# Seconds of an encoding of an image or a sound between two steps with sequences in decode, and the share of a longer
# step: the time between tokens is 1.5 times that without the encoding, which takes three times as long as alone.
_ENCODING_SECONDS, _ENCODING_SHARE = 0.01, 0.5
# Prefill tokens allowed at any cost, with sequences in decode and without. On the native step of SmolLM2-135M a
# prompt of 512 tokens takes 1.20 times as long in chunks of 16 as at once, and 1.07, 1.04, 1.01 and 1.02 times in
# chunks of 32, 48, 64 and 96.
MIN_TOKENS, MIN_TOKENS_ALONE = 16, 64


class Allowance:
    """Prefill tokens that one step may still get.

    work        of the step so far
    seconds     maximum duration of the step; called only for steps with prefill
    least       prefill tokens at any cost
    max_tokens  maximum prefill tokens
    """

    def __init__(
        self, cost: StepCost, work: Work, *, seconds: Callable[[], float], least: int, max_tokens: int
    ) -> None:
        self._cost, self._work, self._seconds = cost, work, seconds
        self._left, self._least = max_tokens, min(least, max_tokens)

    def tokens(self, start: int) -> int:
        """Tokens for a prefill that continues at position `start`."""
        if self._left == 0 or math.isinf(seconds := self._seconds()):
            return self._left
        # Larger steps than measured ones are tried by doubling.
        max_tokens = min(self._left, max(self._cost.frontier - self._work.batch_tokens, 0))
        fits = np.flatnonzero(self._cost.grown(self._work, start, max_tokens) <= seconds)
        return max(int(fits[-1]) + 1 if len(fits) else 0, self._least)

    def take(self, work: Work) -> None:
        """Count the work of a chunk."""
        self._work += work
        self._left = max(self._left - work.batch_tokens, 0)
        self._least = max(self._least - work.batch_tokens, 0)


class Budget:
    """Makes the allowance of each step.

    max_tokens      maximum prefill tokens per step, of all sequences
    target_seconds  between tokens; 0: prefill first, with as many tokens as possible; None: from step costs
    """

    def __init__(self, cost: StepCost, *, max_tokens: int, target_seconds: float | None) -> None:
        self._cost, self._max_tokens, self._target = cost, max_tokens, target_seconds

    def allow(self, decode: Work) -> Allowance:
        """The allowance of a step with this work of sequences in decode; no work: there are none."""
        least = MIN_TOKENS if decode.batch_tokens else MIN_TOKENS_ALONE
        seconds = partial(self._limit, decode)
        return Allowance(self._cost, decode, seconds=seconds, least=least, max_tokens=self._max_tokens)

    def encoding_seconds(self, decode: Work, step_seconds: float) -> float:
        """Seconds of an encoding after a step of `step_seconds`, with this work of sequences in decode."""
        limit = self._limit(decode)
        if not decode.batch_tokens or math.isinf(limit):
            return limit
        share = max(_ENCODING_SECONDS, _ENCODING_SHARE * step_seconds)
        return max(min(share, limit - step_seconds), 0.0)

    def token_seconds(self) -> float:
        """Least seconds of a prefill token: without attention, in the most efficient step."""
        return self._cost.token_seconds(self._max_tokens)

    def decode_seconds(self, decode: Work) -> float:
        """Estimated seconds of a step without prefill."""
        return self._cost.estimate(decode)

    def exhausted_seconds(self) -> float:
        """Least seconds of a step that uses up its allowance."""
        seconds = min(self._max_tokens, max(self._cost.frontier, MIN_TOKENS)) * self.token_seconds()
        return min(seconds, self._target or math.inf) if self._target is not None else min(seconds, _TARGET_SECONDS)

    def _limit(self, decode: Work) -> float:
        if self._target == 0:
            return math.inf
        if not decode.batch_tokens:
            return _ALONE_SECONDS
        if self._target is not None:
            return self._target
        return max(_TARGET_SECONDS, _TARGET_STEPS * self._cost.estimate(decode))
