"""Predicted waits, from numbers."""

from __future__ import annotations

import math
import random
from heapq import heapify, heapreplace

import pytest

from engine.schedule.predicted_wait import SlotUse, free_place_seconds, slot_seconds

TOKEN = 0.001


def use(tokens: int, slice_seconds: float = math.inf) -> SlotUse:
    return SlotUse(tokens, slice_seconds)


def test_a_free_slot_is_no_wait() -> None:
    """Nor is one of a sequence in decode, which may end in the next step."""
    assert slot_seconds([use(900)], [], slots=2, token_seconds=TOKEN) == 0.0
    assert slot_seconds([use(900), use(0)], [], slots=2, token_seconds=TOKEN) == 0.0


@pytest.mark.parametrize(
    ("slice_seconds", "seconds"),
    [(math.inf, 1.6), (0.5, 1.0), (0.0, 0.0)],
)
def test_sequences_ahead_use_a_slot_one_after_another(slice_seconds: float, seconds: float) -> None:
    """Until their prompts are computed or their time slices end."""
    running, ahead = [use(700, slice_seconds)], [use(900, slice_seconds)]

    assert slot_seconds(running, ahead, slots=1, token_seconds=TOKEN) == pytest.approx(seconds)


def test_one_machine_computes_the_prompts_of_all_slots() -> None:
    """Four slots do not make it faster; three of the prompts may still be in their slots."""
    seconds = slot_seconds([use(0)] * 4, [use(1000)] * 8, slots=4, token_seconds=TOKEN)

    assert seconds == pytest.approx(5.0)


def test_time_slices_bound_the_work() -> None:
    """Of five prompts of 1 s that leave four slots, three lose them after 2 s each: as long as the other two take."""
    seconds = slot_seconds([use(0)] * 4, [use(1000, 2.0)] * 8, slots=4, token_seconds=TOKEN)

    assert seconds == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(20))
def test_more_work_is_no_shorter_wait(seed: int) -> None:
    """Any sequence that uses a slot longer, or a further one ahead."""
    chance = random.Random(seed)
    slots = chance.randint(1, 4)
    running = [use(chance.randrange(500), chance.choice((0.1, 1.0, math.inf))) for _ in range(slots)]
    ahead = [use(chance.randrange(500), 0.3) for _ in range(chance.randint(0, 8))]
    before = slot_seconds(running, ahead, slots=slots, token_seconds=TOKEN)

    assert slot_seconds(running, [*ahead, use(100, 0.3)], slots=slots, token_seconds=TOKEN) >= before
    longer = [SlotUse(other.tokens + 50, other.slice_seconds) for other in running]
    assert slot_seconds(longer, ahead, slots=slots, token_seconds=TOKEN) >= before


@pytest.mark.parametrize("seed", range(20))
def test_no_wait_is_longer_than_prompts_one_by_one(seed: int) -> None:
    """A machine that computes one prompt at a time, in order, gives each its slot not before the bound."""
    chance = random.Random(seed)
    slots, tokens = chance.randint(1, 4), [chance.randrange(1, 500) for _ in range(chance.randint(0, 12))]
    running = [chance.randrange(1, 500) for _ in range(slots)]
    ends = [sum(running[: index + 1]) * TOKEN for index in range(slots)]
    heapify(ends)
    now = max(ends)
    for count in tokens:
        now = max(now, ends[0]) + count * TOKEN
        heapreplace(ends, now)

    bound = slot_seconds([use(count) for count in running], [use(c) for c in tokens], slots=slots, token_seconds=TOKEN)
    assert bound <= ends[0] + 1e-9


@pytest.mark.parametrize(
    ("prompts", "remaining", "mean_output", "seconds"),
    [
        ([], [], 100.0, 0.0),
        # Four outputs of 100 tokens on average: one ends after 25 steps.
        ([0, 0, 0, 0], [500] * 4, 100.0, 0.5),
        # One is at its limit earlier.
        ([0, 0, 0, 0], [500, 3, 500, 500], 100.0, 0.06),
        # The shortest prompt is computed first; nothing is known of outputs.
        ([400, 90], [10, 20], math.inf, 0.29),
    ],
)
def test_a_place_is_free_at_the_first_end(
    prompts: list[int], remaining: list[int], mean_output: float, seconds: float
) -> None:
    wait = free_place_seconds(prompts, remaining, mean_output=mean_output, token_seconds=TOKEN, step_seconds=0.02)

    assert wait == pytest.approx(seconds)
