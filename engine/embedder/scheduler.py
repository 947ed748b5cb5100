"""Whose texts the embedding model computes next. On the engine thread: submit, cancel, step.

A step computes one batch of a bounded number of tokens, a single long text aside. Owners take turns to begin a batch,
and so do the jobs of an owner; what it has left goes to those behind them: a long list delays a short one by a batch a
job, and the jobs of another owner by a batch. While others want the
thread, batches are short, as far as is known what a token costs, and behind each the thread is theirs for as long.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest

from torch import Tensor

from engine.embedder.embedder import Embedder
from engine.types.events import Embedded, Event, Failed, Finished, Started, Timings, Usage
from engine.types.request import EmbeddingInput, EmbeddingJob
from engine.types.status import EmbeddingCounts

log = logging.getLogger("cellar.engine")

# What a batch beside others may take: about as long as a step with prompts in it (budget.py). Below so few tokens a
# batch is hardly any faster.
_SHORT_BATCH_SECONDS, _MIN_BATCH_TOKENS = 0.05, 16


class _QueuedJob:
    """What is left of a job, its shortest input first, and what came of the rest."""

    def __init__(self, job: EmbeddingJob, now: float) -> None:
        self.job, self.submitted = job, now
        self.started: float | None = None
        self.remaining = sorted(range(len(job.inputs)), key=lambda at: len(job.inputs[at].tokens))
        self.vectors: dict[int, bytes] = {}
        self.tokens = sum(len(each.tokens) for each in job.inputs)

    @property
    def next(self) -> EmbeddingInput:
        """The longest that is left: those that share a batch with it are little shorter."""
        return self.job.inputs[self.remaining[-1]]


class EmbeddingScheduler:
    """The jobs of one embedding model. One thread owns it.

    most  tokens of a batch, those that fill it up included
    """

    def __init__(
        self, embedder: Embedder, *, max_batch_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._embedder, self._max_batch_tokens, self._clock = embedder, max_batch_tokens, clock
        self._jobs: deque[_QueuedJob] = deque()
        self._events: list[tuple[str, Event]] = []
        self._yield_seconds = self._seconds_per_token = 0.0
        self._texts = self._tokens = self._batches = 0
        self._seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a job is left."""
        return bool(self._jobs)

    def submit(self, job: EmbeddingJob) -> None:
        """Queue a job of at least one input; its first event is Started."""
        self._jobs.append(_QueuedJob(job, self._clock()))

    def cancel(self, id: str) -> None:
        """Forget a job; unknown and finished ones are no error."""
        self._jobs = deque(work for work in self._jobs if work.job.id != id)

    def step(self, others_seconds: float) -> list[tuple[str, Event]]:
        """Compute a batch, unless it is the others' time; the events of the jobs that it moved on.

        others  seconds that others have used since the last step; infinite where they want none
        """
        self._yield_seconds = max(self._yield_seconds - others_seconds, 0.0)
        if not self._jobs or self._yield_seconds > 0:
            return []
        batch = self._batch(self._max_batch_tokens if others_seconds == math.inf else self._short_batch_tokens())
        began = self._clock()
        try:
            self._deliver(batch, self._embedder.vectors([work.job.inputs[at] for work, at in batch]))
        except Exception as error:
            log.exception("a batch of the embedding model failed")
            for work, _ in batch:
                self._fail(work, f"the embedding model failed ({type(error).__name__})")
        self._yield_seconds = self._clock() - began
        self._seconds += self._yield_seconds
        self._seconds_per_token = self._yield_seconds / sum(len(work.job.inputs[at].tokens) for work, at in batch)
        events, self._events = self._events, []
        return events

    def counts(self) -> EmbeddingCounts:
        """The state now."""
        waiting = sum(len(work.remaining) for work in self._jobs)
        return EmbeddingCounts(waiting, self._texts, self._tokens, self._batches, self._seconds)

    def _short_batch_tokens(self) -> int:
        """Tokens of a batch that seems short enough."""
        return (
            self._max_batch_tokens
            if not self._seconds_per_token
            else min(
                max(int(_SHORT_BATCH_SECONDS / self._seconds_per_token), _MIN_BATCH_TOKENS), self._max_batch_tokens
            )
        )

    def _batch(self, most: int) -> list[tuple[_QueuedJob, int]]:
        batch: list[tuple[_QueuedJob, int]] = []
        lengths: list[int] = []
        line = self._order()
        for work in line:
            while work.remaining and self._fits([*lengths, len(work.next.tokens)], most):
                lengths.append(len(work.next.tokens))
                batch.append((work, work.remaining.pop()))
        for work, _ in batch:
            if work.started is None:
                work.started = self._clock()
                self._events.append((work.job.id, Started(work.tokens, 0, 0)))
        self._requeue(line[0])
        return batch

    def _order(self) -> list[_QueuedJob]:
        """The jobs in the order in which they begin: owners take turns, and so do the jobs of an owner."""
        owned: dict[str, list[_QueuedJob]] = {}
        for work in self._jobs:
            owned.setdefault(work.job.owner, []).append(work)
        return [work for turn in zip_longest(*owned.values()) for work in turn if work is not None]

    def _requeue(self, first: _QueuedJob) -> None:
        """The job that began comes last among those of its owner, and these come last of all."""
        others = [work for work in self._jobs if work.job.owner != first.job.owner]
        same = [work for work in self._jobs if work.job.owner == first.job.owner and work is not first]
        self._jobs = deque([*others, *same, first])

    def _fits(self, lengths: Sequence[int], most: int) -> bool:
        within = max(lengths) * len(lengths) <= most and self._embedder.can_batch(lengths)
        return within or len(lengths) == 1

    def _deliver(self, batch: Sequence[tuple[_QueuedJob, int]], vectors: Tensor) -> None:
        sound = vectors.isfinite().all(-1).tolist()
        for (work, at), vector, fine in zip(batch, vectors.numpy().astype("<f4"), sound, strict=True):
            if not fine:
                self._fail(work, "the embedding model's output has no finite value here")
                continue
            work.vectors[at] = vector.tobytes()
            if len(work.vectors) == len(work.job.inputs):
                self._finish(work)
        self._batches += 1
        self._texts += len(batch)
        self._tokens += sum(len(work.job.inputs[at].tokens) for work, at in batch)

    def _finish(self, work: _QueuedJob) -> None:
        assert work.started is not None, "an input was computed"
        timings = Timings(work.started - work.submitted, self._clock() - work.started, 0.0)
        self._events += [(work.job.id, Embedded(work.vectors[at])) for at in range(len(work.job.inputs))]
        self._events.append((work.job.id, Finished("length", None, Usage(work.tokens, 0, 0), timings)))
        self._jobs.remove(work)

    def _fail(self, work: _QueuedJob, reason: str) -> None:
        if work in self._jobs:
            self._events.append((work.job.id, Failed(reason)))
            self._jobs.remove(work)
