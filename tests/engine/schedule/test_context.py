"""Context shifts: the dropped ranges, and their independence of preemption."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.core import Core
from engine.load.load import LoadedModel
from engine.schedule.context import ContextHistory, DroppedRange
from engine.types.events import Event, Finished
from engine.types.request import Request
from tests.engine.kit.models import core
from tests.engine.kit.play import Job, ask, play

CONTEXT = 24
# Model family, and the mode of recurrent states in a shift.
JUDGED = [
    ("llama", "rebuild"),
    ("gemma3", "rebuild"),
    ("deepseek_v3", "rebuild"),
    ("lfm2", "rebuild"),
    ("lfm2", "carry"),
]
KINDS = [
    *JUDGED,
    ("mistral", "rebuild"),
    ("gpt2", "rebuild"),
    ("qwen3_next", "rebuild"),
    ("qwen3_next", "carry"),
    ("mamba2", "carry"),
]


def history(**fields: object) -> ContextHistory:
    """A context history with a prompt of ten in a context of twenty, two kept."""
    return ContextHistory(range(10), **{"capacity": 20, "keep_tokens": 2, **fields})


@pytest.mark.parametrize(
    ("protected", "expected"),
    [
        ((), DroppedRange(2, 9)),
        # The last user message: older tokens are dropped first, or newer ones if the older ones are few.
        (((8, 12),), DroppedRange(2, 6)),
        (((4, 10),), DroppedRange(10, 5)),
        (((0, 6),), DroppedRange(6, 7)),
        # No range has half of the target length: the longest is dropped.
        (((5, 12), (13, 18)), DroppedRange(2, 3)),
        (((2, 18),), DroppedRange(18, 1)),
        # An image is not split: tokens before or after it are dropped.
        (((6, 14),), DroppedRange(2, 4)),
        (((3, 9), (14, 16)), DroppedRange(9, 5)),
        # The last token is never dropped.
        (((2, 19),), None),
        (((0, 20),), None),
    ],
)
def test_a_shift_drops_the_older_unprotected_half(
    protected: tuple[tuple[int, int], ...], expected: DroppedRange | None
) -> None:
    """After the kept tokens, the oldest range of sufficient length, or the longest."""
    assert expected == history(protected=protected).next_drop()


def test_protected_ranges_move_with_a_shift() -> None:
    own = history(protected=((12, 15),))
    own.tokens[:] = range(21)
    cut = own.next_drop()
    assert cut == DroppedRange(2, 9)

    own.shift(cut, 11)
    assert [0, 1, *range(11, 21)] == own.tokens
    assert DroppedRange(6, 7) == own.next_drop()


def test_undo_shift_reverses_shift() -> None:
    """Repeated shifts have the same ranges and salts."""
    own = history(keep_tokens=3)
    past = []
    for _ in range(4):
        own.tokens += range(100, 121 - len(own.tokens) + 100)
        past.append((list(own.tokens), own.salt, own.restore_length))
        cut = own.next_drop()
        assert cut is not None
        own.shift(cut, 20 - cut.length)
    text = (own.total_shifts, own.dropped_tokens)
    deepest = list(own.tokens)
    while own.shifts:
        own.undo_shift()
        tokens, salt, floor = past[own.shifts]
        assert (tokens, salt, floor) == (own.tokens[: len(tokens)], own.salt, own.restore_length)
    for _ in range(4):
        cut = own.next_drop()
        assert cut is not None
        own.shift(cut, 20 - cut.length)

    assert deepest == own.tokens
    assert text == (own.total_shifts, own.dropped_tokens)


def test_the_salt_depends_on_the_history() -> None:
    """On the dropped tokens, their position, the salt and the state mode."""
    salts = set()
    for fields in ({}, {"keep_tokens": 3}, {"salt": b"x"}, {"state_mode": "carry"}, {"capacity": 22}):
        for first in (0, 50):
            own = history(**fields)
            own.tokens[:] = range(first, first + 24)
            cut = own.next_drop()
            assert cut is not None
            own.shift(cut, 11)
            salts.add(own.salt)

    assert 10 == len(salts)


def test_recomputed_tokens_need_no_salt() -> None:
    """A shift that moved no key leads to the first salt."""
    own = history(salt=b"x")
    own.tokens[:] = range(21)
    own.shift(DroppedRange(2, 9), 2)

    assert (b"x", 0) == (own.salt, own.restore_length)


def traffic(seed: int, states: str) -> list[Job]:
    """Prompts with shared prefixes and several shifts each; some are cancelled."""
    chance = random.Random(seed)
    stem = [chance.randrange(250) for _ in range(CONTEXT)]
    jobs = []
    for number in range(chance.randint(2, 5)):
        prompt = (*stem[: chance.randint(1, 16)], *(chance.randrange(250) for _ in range(chance.randint(0, 6))))
        keep = chance.choice((0, 2, 5, None))
        arrives = chance.choice((0, chance.randint(0, 20)))
        leaves = arrives + chance.randint(5, 60) if chance.random() < 0.2 else None
        start = chance.randrange(len(prompt))
        protected = ((start, chance.randint(start + 1, len(prompt))),) if chance.random() < 0.5 else ()
        fields = {"keep": keep, "protected": protected, "recurrent_shift": states, "ignore_eos": True}
        request: Request = ask(str(number), prompt, chance.randint(20, 70), overflow="shift", **fields)
        jobs.append(Job(request, arrives, leaves))
    return jobs


def disturbed(engine: Core, chance: random.Random) -> Core:
    """Preempts the youngest sequence at random steps, and sometimes resets the prefix cache."""
    step = engine.step

    def shaken() -> list[tuple[str, Event]]:
        if len(engine._scheduler.running) > 1 and chance.random() < 0.1:
            engine._scheduler._preempt()
        if chance.random() < 0.05:
            engine.cache.reset_prefix_cache()
        return step()

    engine.step = shaken  # type: ignore[method-assign]
    return engine


def judge(loaded: LoadedModel, states: str, seeds: range) -> int:
    """Compare each mix with many cells, with preemptions and with few cells; the preemptions, at least one."""
    preemptions = 0
    for seed in seeds:
        chance, jobs = random.Random(seed), traffic(seed, states)
        roomy = play(core(loaded, slots=5, context=CONTEXT, chunk=64), [Job(job.request) for job in jobs])
        settings = {"cells": CONTEXT + chance.choice((1, 5, 20)), "chunk": chance.choice((1, 3, 7, 64))}
        settings["host_cache_bytes"] = chance.choice((0, 10_000, 10**7))
        crowded = disturbed(core(loaded, slots=4, context=CONTEXT, **settings), chance)
        answers = play(crowded, jobs, most_steps=20_000)
        for job in jobs:
            expected, answer = roomy[job.request.id], answers[job.request.id]
            assert expected.tokens[: len(answer.tokens)] == answer.tokens, (seed, job)
            if answer.end is not None:
                assert isinstance(expected.end, Finished)
                assert isinstance(answer.end, Finished)
                assert expected.tokens == answer.tokens, (seed, job)
                assert shifts(expected.end) == shifts(answer.end)
        preemptions += crowded.stats().preemptions_total
        crowded.cache.evict(crowded.cache.cells)
        assert crowded.cache.cells == crowded.cache.free_cells, seed
    return preemptions


def shifts(end: Finished) -> tuple[str, int, int]:
    """The counts that must be equal, besides the text."""
    return end.reason, end.usage.context_shifts, end.usage.shifted_tokens


@pytest.mark.parametrize(("family", "states"), [("llama", "rebuild"), ("gpt2", "rebuild"), ("lfm2", "carry")])
def test_a_preempted_sequence_finds_its_shifted_cells(
    loaded: Callable[..., LoadedModel], family: str, states: str
) -> None:
    """With enough cells, a sequence that is preempted between two shifts computes no token twice."""
    fields = {"overflow": "shift", "recurrent_shift": states, "ignore_eos": True}
    jobs = [Job(ask(name, prompt, 60, **fields)) for name, prompt in (("one", range(9)), ("two", range(20, 27)))]
    calm = core(loaded(family), slots=2, context=CONTEXT, cells=8 * CONTEXT)
    expected = play(calm, jobs)
    engine = core(loaded(family), slots=2, context=CONTEXT, cells=8 * CONTEXT)
    step, count = engine.step, 0

    def shaken() -> list[tuple[str, Event]]:
        nonlocal count
        count += 1
        if count in (10, 23, 41, 42):
            engine._scheduler._preempt()
        return step()

    engine.step = shaken  # type: ignore[method-assign]
    answers = play(engine, jobs)

    assert {name: answer.tokens for name, answer in expected.items()} == {
        name: answer.tokens for name, answer in answers.items()
    }
    assert 4 == engine.stats().preemptions_total
    assert calm.stats().batch_tokens_total == engine.stats().batch_tokens_total


@pytest.mark.slow
@pytest.mark.parametrize(("family", "states"), JUDGED)
def test_shifted_text_survives_preemption(loaded: Callable[..., LoadedModel], family: str, states: str) -> None:
    """With too few cells, sequences are preempted between their shifts."""
    assert judge(loaded(family), states, range(2)) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "states"), KINDS)
def test_a_hundred_shifting_mixes(loaded: Callable[..., LoadedModel], family: str, states: str) -> None:
    assert judge(loaded(family), states, range(1000, 1100)) > 100
