"""Whose texts come next: short batches, turns, and nobody who waits for ever."""

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
    """A model whose state is the token itself. It notes its batches, and breaks at a token of 13 or 66."""

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
    """A head that takes the first state of each text."""

    def __call__(self, output: Any, inputs: Sequence[EmbeddingInput]) -> Tensor:
        return torch.stack([states[0] for states in output.last_hidden_state])


class Clock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make(most: int = 12, spread: int = ALL_LENGTHS, original: int | None = None) -> tuple[EmbeddingScheduler, Recorder]:
    """Turns over a recorder, by a clock of seconds."""
    model = Recorder()
    embedder = Embedder(model, First(), pad=0, threads=1, spread=spread, original=original)
    return EmbeddingScheduler(embedder, max_batch_tokens=most, clock=Clock()), model


def job(id: str, *texts: tuple[int, int]) -> EmbeddingJob:
    """Texts of a token and a length each."""
    return EmbeddingJob(id, tuple(EmbeddingInput((token,) * length) for token, length in texts))


def run(turns: EmbeddingScheduler, others: float = math.inf) -> Iterator[tuple[str, Event]]:
    """All events to the end."""
    while turns.busy:
        yield from turns.step(others)


def vectors(events: Sequence[tuple[str, Event]], id: str) -> list[float]:
    """What one job got."""
    found = [event.vector for name, event in events if name == id and isinstance(event, Embedded)]
    return [float(np.frombuffer(vector, "<f4")[0]) for vector in found]


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.lists(st.tuples(st.integers(20, 60), st.integers(1, 20)), min_size=1, max_size=9), max_size=6),
    most=st.integers(1, 40),
    spread=st.integers(0, 20),
)
def test_everybody_gets_their_own_and_no_batch_is_long(
    jobs: list[list[tuple[int, int]]], most: int, spread: int
) -> None:
    """Each job ends with its vectors in order; a batch of several keeps to its bounds, filling counted."""
    turns, model = make(most, spread)
    for at, texts in enumerate(jobs):
        turns.submit(job(str(at), *texts))
    events = list(run(turns))

    for at, texts in enumerate(jobs):
        mine = [event for name, event in events if name == str(at)]
        assert [float(token) for token, _ in texts] == vectors(events, str(at))
        assert isinstance(mine[0], Started)
        assert isinstance(mine[-1], Finished)
        assert sum(length for _, length in texts) == mine[-1].usage.prompt_tokens == mine[0].prompt_tokens
    for batch in model.batches:
        assert len(batch) == 1 or max(batch) * len(batch) <= most
        assert len(batch) == 1 or max(batch) - min(batch) <= spread
    counts = turns.counts()
    assert (0, sum(map(len, jobs)), len(model.batches)) == (counts.waiting, counts.texts_total, counts.batches_total)


def test_texts_on_both_sides_of_the_original_length_share_no_batch() -> None:
    """transformers rotates a whole batch by its longest text, where rotary factors depend on the length."""
    turns, model = make(most=40, original=5)
    turns.submit(job("one", *((20 + length, length) for length in (3, 4, 5, 6, 7))))
    events = list(run(turns))

    assert [[7, 6], [5, 4, 3]] == model.batches
    assert [23.0, 24.0, 25.0, 26.0, 27.0] == vectors(events, "one")


def test_a_short_job_waits_for_one_batch_of_each_other() -> None:
    """However long the lists before it are, and what is left of its batch goes to them."""
    turns, model = make(most=4)
    turns.submit(job("long", *[(20, 2)] * 50))
    turns.submit(job("short", (30, 1)))
    first, second = turns.step(math.inf), turns.step(math.inf)

    assert [] == vectors(first, "short")
    assert [30.0] == vectors(second, "short")
    assert [[2, 2], [1, 2]] == model.batches


def test_many_jobs_of_one_owner_delay_another_owner_by_one_batch() -> None:
    """However many jobs wait, and whichever came first; within an owner jobs keep their turns."""
    turns, _ = make()
    for number in range(20):
        turns.submit(replace(job(f"a{number}", (20, 10), (21, 10)), owner="a"))
    ended = []
    for step in range(60):
        if step == 5:
            turns.submit(replace(job("b0", (30, 10)), owner="b"))
            turns.submit(replace(job("b1", (31, 10)), owner="b"))
        ended += [(step, name) for name, event in turns.step(math.inf) if isinstance(event, Finished)]

    assert [6, 8] == [step for step, name in ended if name.startswith("b")]
    assert [f"a{number}" for number in range(20)] == [name for _, name in ended if name.startswith("a")]
    assert not turns.busy


def test_a_job_that_was_given_up_is_not_computed() -> None:
    """Not even the rest of it, and what nobody knows can be cancelled too."""
    turns, model = make(most=4)
    turns.submit(job("goes", *[(20, 2)] * 50))
    turns.submit(job("stays", (30, 1)))
    turns.step(math.inf)
    turns.cancel("goes")
    turns.cancel("unknown")
    events = list(run(turns))

    assert {"stays"} == {name for name, _ in events}
    assert [[2, 2], [1]] == model.batches
    assert 0 == turns.counts().waiting


def test_a_batch_that_breaks_fails_those_in_it() -> None:
    """And nobody else, nor the thread."""
    turns, _ = make(most=2)
    for name, token in (("breaks", 13), ("fine", 30)):
        turns.submit(job(name, (token, 2), (token, 2)))
    events = list(run(turns))

    assert [Failed("the embedding model failed (RuntimeError)")] == [
        event for name, event in events if name == "breaks" and not isinstance(event, Started)
    ]
    assert [30.0, 30.0] == vectors(events, "fine")


def test_a_vector_that_is_not_finite_fails_its_job() -> None:
    """Its neighbours in the batch get theirs."""
    turns, _ = make(most=20)
    turns.submit(job("breaks", (30, 2), (66, 2)))
    turns.submit(job("fine", (31, 2)))
    events = list(run(turns))

    assert isinstance([event for name, event in events if name == "breaks"][-1], Failed)
    assert [] == vectors(events, "breaks")
    assert [31.0] == vectors(events, "fine")


def test_others_get_as_much_time_as_a_batch_took() -> None:
    """Then batches are short too: a second a batch is far too long, so it has the fewest tokens."""
    turns, model = make(most=200)
    turns.submit(job("long", *[(20, 1)] * 250))
    seen = []
    for _ in range(9):
        turns.step(0.25)
        seen.append(len(model.batches))

    assert [1, 1, 1, 1, 2, 2, 2, 2, 3] == seen
    assert [200, 16, 16] == [len(batch) for batch in model.batches]


def test_a_text_that_is_longer_than_a_batch_comes_alone() -> None:
    """It cannot be cut: a state may depend on any other."""
    turns, model = make(most=4)
    turns.submit(job("a", (20, 9), (21, 1), (22, 3)))

    assert [20.0, 21.0, 22.0] == vectors(list(run(turns)), "a")
    assert [[9], [3], [1]] == model.batches


def test_the_numbers_say_where_the_time_went() -> None:
    """The wait, the work, and the counts of all jobs so far."""
    turns, _ = make()
    turns.submit(job("a", (20, 2), (21, 3)))
    turns.submit(replace(job("b", (20, 2)), id="b"))
    waiting = turns.counts().waiting
    ends = [event for _, event in run(turns) if isinstance(event, Finished)]

    assert 3 == waiting
    assert all(end.timings.queue_seconds > 0 and end.timings.prompt_seconds > 0 for end in ends)
    assert (3, 7) == (turns.counts().texts_total, turns.counts().tokens_total)
    assert turns.counts().seconds_total > 0
