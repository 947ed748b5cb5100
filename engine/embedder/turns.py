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
_SHORT_SECONDS, _FEWEST = 0.05, 16


class _Work:
    """What is left of a job, its shortest input first, and what came of the rest."""

    def __init__(self, job: EmbeddingJob, now: float) -> None:
        self.job, self.submitted = job, now
        self.started: float | None = None
        self.left = sorted(range(len(job.inputs)), key=lambda at: len(job.inputs[at].tokens))
        self.vectors: dict[int, bytes] = {}
        self.tokens = sum(len(each.tokens) for each in job.inputs)

    @property
    def next(self) -> EmbeddingInput:
        """The longest that is left: those that share a batch with it are little shorter."""
        return self.job.inputs[self.left[-1]]


class Turns:
    """The jobs of one embedding model. One thread owns it.

    most  tokens of a batch, those that fill it up included
    """

    def __init__(self, embedder: Embedder, *, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._embedder, self._most, self._clock = embedder, most, clock
        self._works: deque[_Work] = deque()
        self._events: list[tuple[str, Event]] = []
        self._owed = self._pace = 0.0
        self._texts = self._tokens = self._batches = 0
        self._seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a job is left."""
        return bool(self._works)

    def submit(self, job: EmbeddingJob) -> None:
        """Queue a job of at least one input; its first event is Started."""
        self._works.append(_Work(job, self._clock()))

    def cancel(self, id: str) -> None:
        """Forget a job; unknown and finished ones are no error."""
        self._works = deque(work for work in self._works if work.job.id != id)

    def step(self, others: float) -> list[tuple[str, Event]]:
        """Compute a batch, unless it is the others' time; the events of the jobs that it moved on.

        others  seconds that others have used since the last step; infinite where they want none
        """
        self._owed = max(self._owed - others, 0.0)
        if not self._works or self._owed > 0:
            return []
        batch = self._batch(self._most if others == math.inf else self._few())
        began = self._clock()
        try:
            self._told(batch, self._embedder.vectors([work.job.inputs[at] for work, at in batch]))
        except Exception as error:
            log.exception("a batch of the embedding model failed")
            for work, _ in batch:
                self._fail(work, f"the embedding model failed ({type(error).__name__})")
        self._owed = self._clock() - began
        self._seconds += self._owed
        self._pace = self._owed / sum(len(work.job.inputs[at].tokens) for work, at in batch)
        events, self._events = self._events, []
        return events

    def counts(self) -> EmbeddingCounts:
        """The state now."""
        waiting = sum(len(work.left) for work in self._works)
        return EmbeddingCounts(waiting, self._texts, self._tokens, self._batches, self._seconds)

    def _few(self) -> int:
        """Tokens of a batch that seems short enough."""
        return self._most if not self._pace else min(max(int(_SHORT_SECONDS / self._pace), _FEWEST), self._most)

    def _batch(self, most: int) -> list[tuple[_Work, int]]:
        batch: list[tuple[_Work, int]] = []
        lengths: list[int] = []
        line = self._line()
        for work in line:
            while work.left and self._fits([*lengths, len(work.next.tokens)], most):
                lengths.append(len(work.next.tokens))
                batch.append((work, work.left.pop()))
        for work, _ in batch:
            if work.started is None:
                work.started = self._clock()
                self._events.append((work.job.id, Started(work.tokens, 0, 0)))
        self._end_turn(line[0])
        return batch

    def _line(self) -> list[_Work]:
        """The jobs in the order in which they begin: owners take turns, and so do the jobs of an owner."""
        owned: dict[str, list[_Work]] = {}
        for work in self._works:
            owned.setdefault(work.job.owner, []).append(work)
        return [work for turn in zip_longest(*owned.values()) for work in turn if work is not None]

    def _end_turn(self, first: _Work) -> None:
        """The job that began comes last among those of its owner, and these come last of all."""
        others = [work for work in self._works if work.job.owner != first.job.owner]
        same = [work for work in self._works if work.job.owner == first.job.owner and work is not first]
        self._works = deque([*others, *same, first])

    def _fits(self, lengths: Sequence[int], most: int) -> bool:
        within = max(lengths) * len(lengths) <= most and self._embedder.shares(lengths)
        return within or len(lengths) == 1

    def _told(self, batch: Sequence[tuple[_Work, int]], vectors: Tensor) -> None:
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

    def _finish(self, work: _Work) -> None:
        assert work.started is not None, "an input was computed"
        timings = Timings(work.started - work.submitted, self._clock() - work.started, 0.0)
        self._events += [(work.job.id, Embedded(work.vectors[at])) for at in range(len(work.job.inputs))]
        self._events.append((work.job.id, Finished("length", None, Usage(work.tokens, 0, 0), timings)))
        self._works.remove(work)

    def _fail(self, work: _Work, reason: str) -> None:
        if work in self._works:
            self._events.append((work.job.id, Failed(reason)))
            self._works.remove(work)
