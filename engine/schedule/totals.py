"""Counts of one core since its start."""

from __future__ import annotations

import math
from bisect import bisect_left

from engine.schedule.sequence import Sequence
from engine.types.status import BATCH_BUCKETS

# Weight of a new output in the mean length of outputs.
_WEIGHT = 0.1


class Totals:
    """What steps computed and how sequences ended. Belongs to the engine thread.

    batch_sizes    steps by the number of their tokens, in the ranges of BATCH_BUCKETS
    prefix_hits    sequences that reused tokens of the prefix cache
    """

    def __init__(self) -> None:
        self.steps = self.batch_tokens = self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.context_shifts = self.prefix_hits = self.failed = 0
        self.step_seconds = 0.0
        # Of the latest ends, exponentially weighted; infinite before the first one.
        self.mean_output_tokens = math.inf
        self.batch_sizes = [0] * (len(BATCH_BUCKETS) + 1)

    def record_batch(self, tokens: int) -> None:
        """Count a batch of so many tokens."""
        self.batch_tokens += tokens
        self.batch_sizes[bisect_left(BATCH_BUCKETS, tokens)] += 1

    def record_end(self, sequence: Sequence) -> None:
        """Count a sequence that leaves the engine."""
        usage = sequence.usage()
        # Of a request that was cancelled in the queue no prompt token was computed or reused.
        self.prompt_tokens += 0 if sequence.stats.cached_tokens is None else usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.prefix_hits += usage.cached_tokens > 0
        if sequence.has_started:
            output, mean = usage.completion_tokens, self.mean_output_tokens
            self.mean_output_tokens = output if math.isinf(mean) else mean + _WEIGHT * (output - mean)
        self.context_shifts += usage.context_shifts
