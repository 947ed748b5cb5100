"""The order of embedding jobs: short batches, alternating owners, no starvation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engine.embedder.embedder import Embedder
from engine.embedder.scheduler import EmbeddingScheduler
from engine.types.events import Embedded, Event, Failed, Finished, Started
from engine.types.request import EmbeddingInput, EmbeddingJob

ALL_LENGTHS = 1000


class Recorder(nn.Module):
    """A model with tokens as hidden states; records its batches, and fails at a token of 13 or 66."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        self.batches.append(attention_mask.sum(1).tolist())
        if (input_ids == 13).any():
            raise RuntimeError("unlucky")
        states = input_ids[..., None].float()
        return SimpleNamespace(last_hidden_state=states.where(states != 66, math.nan))


class First:
    """A head that returns the first hidden state of each text."""

    def __call__(self, output: Any, inputs: Sequence[EmbeddingInput]) -> Tensor:
        return torch.stack([states[0] for states in output.last_hidden_state])


class Clock:
    """Each call takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make(most: int = 12, spread: int = ALL_LENGTHS, original: int | None = None) -> tuple[EmbeddingScheduler, Recorder]:
    """A scheduler over a recorder, with a clock of seconds."""
    model = Recorder()
    embedder = Embedder(model, First(), pad_token=0, threads=1, max_length_difference=spread, original_length=original)
    return EmbeddingScheduler(embedder, max_batch_tokens=most, clock=Clock()), model


def job(id: str, *texts: tuple[int, int]) -> EmbeddingJob:
    """A job with texts of one token and a length each."""
    return EmbeddingJob(id, tuple(EmbeddingInput((token,) * length) for token, length in texts))


def run(scheduler: EmbeddingScheduler, others: float = math.inf) -> Iterator[tuple[str, Event]]:
    """All events until the scheduler is idle."""
    while scheduler.busy:
        yield from scheduler.step(others)


def vectors(events: Sequence[tuple[str, Event]], id: str) -> list[float]:
    """The vectors of one job."""
    found = [event.vector for name, event in events if name == id and isinstance(event, Embedded)]
    return [float(np.frombuffer(vector, "<f4")[0]) for vector in found]


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.lists(st.tuples(st.integers(20, 60), st.integers(1, 20)), min_size=1, max_size=9), max_size=6),
    most=st.integers(1, 40),
    spread=st.integers(0, 20),
)
def test_every_job_gets_its_vectors_in_bounded_batches(
    jobs: list[list[tuple[int, int]]], most: int, spread: int
) -> None:
    """Each job ends with its vectors in order; a batch of several keeps to its bounds, filling counted."""
    scheduler, model = make(most, spread)
    for at, texts in enumerate(jobs):
        scheduler.submit(job(str(at), *texts))
    events = list(run(scheduler))

    for at, texts in enumerate(jobs):
        mine = [event for name, event in events if name == str(at)]
        assert [float(token) for token, _ in texts] == vectors(events, str(at))
        assert isinstance(mine[0], Started)
        assert isinstance(mine[-1], Finished)
        assert sum(length for _, length in texts) == mine[-1].usage.prompt_tokens == mine[0].prompt_tokens
    for batch in model.batches:
        assert len(batch) == 1 or max(batch) * len(batch) <= most
        assert len(batch) == 1 or max(batch) - min(batch) <= spread
    counts = scheduler.counts()
    assert (0, sum(map(len, jobs)), len(model.batches)) == (counts.waiting, counts.texts_total, counts.batches_total)


def test_texts_on_both_sides_of_the_original_length_share_no_batch() -> None:
    """transformers chooses the rotary factors of a whole batch by its longest text."""
    scheduler, model = make(most=40, original=5)
    scheduler.submit(job("one", *((20 + length, length) for length in (3, 4, 5, 6, 7))))
    events = list(run(scheduler))

    assert [[7, 6], [5, 4, 3]] == model.batches
    assert [23.0, 24.0, 25.0, 26.0, 27.0] == vectors(events, "one")


def test_short_job_waits_for_one_batch_of_each_job() -> None:
    """The rest of each batch goes to the next jobs in order."""
    scheduler, model = make(most=4)
    scheduler.submit(job("long", *[(20, 2)] * 50))
    scheduler.submit(job("short", (30, 1)))
    first, second = scheduler.step(math.inf), scheduler.step(math.inf)

    assert [] == vectors(first, "short")
    assert [30.0] == vectors(second, "short")
    assert [[2, 2], [1, 2]] == model.batches


def test_many_jobs_of_one_owner_delay_another_by_one_batch() -> None:
    """Jobs of one owner alternate."""
    scheduler, _ = make()
    for number in range(20):
        scheduler.submit(replace(job(f"a{number}", (20, 10), (21, 10)), owner="a"))
    ended = []
    for step in range(60):
        if step == 5:
            scheduler.submit(replace(job("b0", (30, 10)), owner="b"))
            scheduler.submit(replace(job("b1", (31, 10)), owner="b"))
        ended += [(step, name) for name, event in scheduler.step(math.inf) if isinstance(event, Finished)]

    assert [6, 8] == [step for step, name in ended if name.startswith("b")]
    assert [f"a{number}" for number in range(20)] == [name for _, name in ended if name.startswith("a")]
    assert not scheduler.busy


def test_cancelled_job_is_not_computed() -> None:
    """Unknown jobs can be cancelled too."""
    scheduler, model = make(most=4)
    scheduler.submit(job("goes", *[(20, 2)] * 50))
    scheduler.submit(job("stays", (30, 1)))
    scheduler.step(math.inf)
    scheduler.cancel("goes")
    scheduler.cancel("unknown")
    events = list(run(scheduler))

    assert {"stays"} == {name for name, _ in events}
    assert [[2, 2], [1]] == model.batches
    assert 0 == scheduler.counts().waiting


def test_failed_batch_fails_its_own_jobs_only() -> None:
    scheduler, _ = make(most=2)
    for name, token in (("breaks", 13), ("fine", 30)):
        scheduler.submit(job(name, (token, 2), (token, 2)))
    events = list(run(scheduler))

    assert [Failed("the embedding model failed (RuntimeError)")] == [
        event for name, event in events if name == "breaks" and not isinstance(event, Started)
    ]
    assert [30.0, 30.0] == vectors(events, "fine")


def test_vector_that_is_not_finite_fails_its_own_job_only() -> None:
    scheduler, _ = make(most=20)
    scheduler.submit(job("breaks", (30, 2), (66, 2)))
    scheduler.submit(job("fine", (31, 2)))
    events = list(run(scheduler))

    assert isinstance([event for name, event in events if name == "breaks"][-1], Failed)
    assert [] == vectors(events, "breaks")
    assert [31.0] == vectors(events, "fine")


def test_generation_gets_as_much_time_as_each_batch() -> None:
    """Batches are short then: at a second a token they have the fewest tokens."""
    scheduler, model = make(most=200)
    scheduler.submit(job("long", *[(20, 1)] * 250))
    seen = []
    for _ in range(9):
        scheduler.step(0.25)
        seen.append(len(model.batches))

    assert [1, 1, 1, 1, 2, 2, 2, 2, 3] == seen
    assert [200, 16, 16] == [len(batch) for batch in model.batches]


def test_text_longer_than_a_batch_is_computed_alone() -> None:
    scheduler, model = make(most=4)
    scheduler.submit(job("a", (20, 9), (21, 1), (22, 3)))

    assert [20.0, 21.0, 22.0] == vectors(list(run(scheduler)), "a")
    assert [[9], [3], [1]] == model.batches


def test_timings_and_counts_of_embedding_jobs() -> None:
    scheduler, _ = make()
    scheduler.submit(job("a", (20, 2), (21, 3)))
    scheduler.submit(replace(job("b", (20, 2)), id="b"))
    waiting = scheduler.counts().waiting
    ends = [event for _, event in run(scheduler) if isinstance(event, Finished)]

    assert 3 == waiting
    assert all(end.timings.queue_seconds > 0 and end.timings.prompt_seconds > 0 for end in ends)
    assert (3, 7) == (scheduler.counts().texts_total, scheduler.counts().tokens_total)
    assert scheduler.counts().seconds_total > 0
