"""Schedules the batches of the embedding model on the engine thread: submit, cancel, step.

A step computes one batch of a bounded number of tokens, or a single longer text. Owners alternate in starting a batch,
and so do the jobs of an owner; the remaining tokens of the batch go to the next jobs in order. A long job therefore
delays a short one of the same owner by one batch for each job, and another owner by one batch. While generation shares
the thread, batches are limited to a short time, and generation gets as much time after each batch.
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

# Target time of a batch while generation shares the thread, about that of a prefill step.
_SHORT_BATCH_SECONDS = 0.05
# Fewest tokens of such a batch: fewer are hardly faster.
_MIN_BATCH_TOKENS = 16


class _QueuedJob:
    """A job with its remaining inputs in ascending length, and the vectors of the computed ones."""

    def __init__(self, job: EmbeddingJob, now: float) -> None:
        self.job, self.submitted = job, now
        self.started: float | None = None
        self.remaining = sorted(range(len(job.inputs)), key=lambda index: len(job.inputs[index].tokens))
        self.vectors: dict[int, bytes] = {}
        self.tokens = sum(len(text.tokens) for text in job.inputs)

    @property
    def next(self) -> EmbeddingInput:
        """The longest remaining input: texts that share a batch then have similar lengths."""
        return self.job.inputs[self.remaining[-1]]


class EmbeddingScheduler:
    """The jobs of one embedding model. Owned by one thread.

    max_batch_tokens  tokens of a batch, with padding
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
        """Whether any job is queued, or an event is left to deliver."""
        return bool(self._jobs or self._events)

    def submit(self, job: EmbeddingJob) -> None:
        """Queue a job of at least one input; its first event is Started. An exception fails it."""
        try:
            self._jobs.append(_QueuedJob(job, self._clock()))
        except Exception as error:
            log.exception("a job could not be queued")
            self._events.append((job.id, Failed(f"it could not be queued ({type(error).__name__})")))

    def cancel(self, id: str) -> None:
        """Remove a job; unknown and finished ones are ignored."""
        self._jobs = deque(queued for queued in self._jobs if queued.job.id != id)

    def step(self, others_seconds: float) -> list[tuple[str, Event]]:
        """Compute a batch unless generation is due; the events of its jobs.

        others_seconds  time used by generation since the last step; infinite: it has no work
        """
        self._yield_seconds = max(self._yield_seconds - others_seconds, 0.0)
        if not self._jobs or self._yield_seconds > 0:
            return self._take_events()
        batch = self._batch(self._max_batch_tokens if others_seconds == math.inf else self._short_batch_tokens())
        start = self._clock()
        try:
            self._deliver(batch, self._embedder.vectors([queued.job.inputs[index] for queued, index in batch]))
        except Exception as error:
            log.exception("a batch of the embedding model failed")
            for queued, _ in batch:
                self._fail(queued, f"the embedding model failed ({type(error).__name__})")
        self._yield_seconds = self._clock() - start
        self._seconds += self._yield_seconds
        self._seconds_per_token = self._yield_seconds / sum(
            len(queued.job.inputs[index].tokens) for queued, index in batch
        )
        return self._take_events()

    def _take_events(self) -> list[tuple[str, Event]]:
        events, self._events = self._events, []
        return events

    def counts(self) -> EmbeddingCounts:
        """Current totals."""
        waiting = sum(len(queued.remaining) for queued in self._jobs)
        return EmbeddingCounts(waiting, self._texts, self._tokens, self._batches, self._seconds)

    def _short_batch_tokens(self) -> int:
        """Tokens of a batch of the target time, by the speed of the last batch."""
        if not self._seconds_per_token:
            return self._max_batch_tokens
        tokens = int(_SHORT_BATCH_SECONDS / self._seconds_per_token)
        return min(max(tokens, _MIN_BATCH_TOKENS), self._max_batch_tokens)

    def _batch(self, max_tokens: int) -> list[tuple[_QueuedJob, int]]:
        batch: list[tuple[_QueuedJob, int]] = []
        lengths: list[int] = []
        order = self._order()
        for queued in order:
            while queued.remaining and self._fits([*lengths, len(queued.next.tokens)], max_tokens):
                lengths.append(len(queued.next.tokens))
                batch.append((queued, queued.remaining.pop()))
        for queued, _ in batch:
            if queued.started is None:
                queued.started = self._clock()
                self._events.append((queued.job.id, Started(queued.tokens, 0, 0)))
        self._requeue(order[0])
        return batch

    def _order(self) -> list[_QueuedJob]:
        """Jobs in the order in which they start: owners alternate, and so do the jobs of an owner."""
        jobs: dict[str, list[_QueuedJob]] = {}
        for queued in self._jobs:
            jobs.setdefault(queued.job.owner, []).append(queued)
        return [queued for round in zip_longest(*jobs.values()) for queued in round if queued is not None]

    def _requeue(self, first: _QueuedJob) -> None:
        """Move the job that started to the end of its owner's jobs, and its owner to the end."""
        other_owners = [queued for queued in self._jobs if queued.job.owner != first.job.owner]
        same_owner = [queued for queued in self._jobs if queued.job.owner == first.job.owner and queued is not first]
        self._jobs = deque([*other_owners, *same_owner, first])

    def _fits(self, lengths: Sequence[int], max_tokens: int) -> bool:
        within = max(lengths) * len(lengths) <= max_tokens and self._embedder.can_batch(lengths)
        return within or len(lengths) == 1

    def _deliver(self, batch: Sequence[tuple[_QueuedJob, int]], vectors: Tensor) -> None:
        finite = vectors.isfinite().all(-1).tolist()
        for (queued, index), vector, is_finite in zip(batch, vectors.numpy().astype("<f4"), finite, strict=True):
            if not is_finite:
                self._fail(queued, "the embedding of an input is not finite")
                continue
            queued.vectors[index] = vector.tobytes()
            if len(queued.vectors) == len(queued.job.inputs):
                self._finish(queued)
        self._batches += 1
        self._texts += len(batch)
        self._tokens += sum(len(queued.job.inputs[index].tokens) for queued, index in batch)

    def _finish(self, queued: _QueuedJob) -> None:
        assert queued.started is not None, "an input was computed"
        timings = Timings(queued.started - queued.submitted, self._clock() - queued.started, 0.0)
        self._events += [(queued.job.id, Embedded(queued.vectors[index])) for index in range(len(queued.job.inputs))]
        self._events.append((queued.job.id, Finished("length", None, Usage(queued.tokens, 0, 0), timings)))
        self._jobs.remove(queued)

    def _fail(self, queued: _QueuedJob, reason: str) -> None:
        if queued in self._jobs:
            self._events.append((queued.job.id, Failed(reason)))
            self._jobs.remove(queued)
