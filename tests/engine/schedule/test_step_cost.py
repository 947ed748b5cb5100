"""What steps cost, learnt on machines that are formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import mean

import numpy as np
import pytest

from engine.schedule.step_cost import StepCost, Work
from kvcache.spec import Span

CELL, PAIR = 4e-6, 4e-7


def true(work: Work) -> float:
    """Rows by the tile, cells to read, pairs to compute."""
    return 0.006 + 0.004 * ((work.batch_tokens + 3) // 4) + CELL * work.cells + PAIR * work.pairs


def mix(chance: random.Random) -> Work:
    """A step of some decoding sequences with texts of any length, and often a chunk of a prompt."""
    spans = [Span(slot, chance.randrange(4000), 1) for slot in range(chance.randrange(1, 9))]
    if chance.random() < 0.6:
        spans.append(Span(9, chance.randrange(4000), chance.choice((16, 24, 40, 64, 128))))
    return Work.of(spans)


def learn(steps: int, seconds: Callable[[Work], float], *, seed: int = 0, noise: float = 0.05) -> StepCost:
    """The model after `steps` measured steps; measured seconds are never less than the true ones."""
    chance, cost = random.Random(seed), StepCost()
    for _ in range(steps):
        work = mix(chance)
        cost.expect(work)
        cost.observe(work.batch_tokens, seconds(work) * (1 + abs(chance.gauss(0, noise))))
    return cost


def test_work_counts_what_rows_see() -> None:
    """A row sees itself and all cells before it; the cells of a sequence are read once."""
    assert Work(4, 3 + 11, 1 + 2 + 3 + 11, 2) == Work.of([Span(0, 0, 3), Span(1, 10, 1)])
    assert Work() == Work.of([])
    assert Work.of([Span(0, 4, 2), Span(1, 0, 1)]) == Work.of([Span(0, 4, 2)]) + Work.of([Span(1, 0, 1)])


def test_context_and_batch_tokens_are_separated() -> None:
    """After 300 mixed steps most of the next 200 are predicted within a tenth; by batch tokens alone they are not."""
    cost, chance = learn(300, true), random.Random(99)
    works = [mix(chance) for _ in range(200)]
    errors = [abs(cost.estimate(work) / true(work) - 1) for work in works]
    without = [abs(cost.estimate(Work(work.batch_tokens)) / true(work) - 1) for work in works]

    assert 0.1 > np.quantile(errors, 0.8)
    assert 0.2 < np.quantile(without, 0.8)


def test_estimates_of_depths_and_of_the_budget_agree() -> None:
    """Tokens added to the expected step have the context lengths of its own tokens."""
    cost = learn(300, true)
    work = Work.of([Span(slot, 2000, 1) for slot in range(4)])
    cost.expect(work)

    assert cost.estimate(work) == cost.seconds([4])[0]
    assert cost.estimate(Work(8, work.cells, 2 * work.pairs, 8)) == cost.seconds([8])[0]
    grown = cost.grown(work, 500, 64)
    longer = [cost.estimate(work + Work.of([Span(9, 500, length)])) for length in (2, 64)]
    assert longer == pytest.approx([grown[1], grown[-1]], rel=1e-12)


def test_texts_of_another_length_are_followed() -> None:
    """After all sequences become forty times as long, and short again, the estimates are right within some steps."""
    cost = StepCost()
    for length in (100, 4000, 100):
        work = Work.of([Span(slot, length, 1) for slot in range(8)])
        for _ in range(40):
            cost.expect(work)
            cost.observe(8, true(work))

        assert cost.estimate(work) == pytest.approx(true(work), rel=0.15)


def test_no_slope_without_a_cause() -> None:
    """Where context costs nothing, noise does not make it seem to: a whole context more adds less than a tenth."""
    cost = learn(500, lambda work: 0.01 + 0.001 * work.batch_tokens)
    near, far = (Work.of([Span(0, start, 1)]) for start in (0, 4000))

    assert cost.estimate(far) < 1.1 * cost.estimate(near)


def test_one_slow_step_changes_little() -> None:
    """A step that waited for the machine a hundred times as long as it takes."""
    cost = learn(300, true)
    work = Work.of([Span(slot, 1000, 1) for slot in range(4)])
    before = cost.estimate(work)
    cost.expect(work)
    cost.observe(4, 100 * true(work))

    assert cost.estimate(work) < 1.15 * before


@pytest.mark.parametrize("usual", [4, 12])
def test_sizes_keep_their_ratio(usual: int) -> None:
    """After long runs of one batch size, estimates of rare sizes and the slowdown are right.

    The speed of the machine changes all the time, and the first steps after another size take up to a fifth longer.
    """
    chance, cost, errors = random.Random(0), StepCost(), list[float]()
    took = {4: 0.85e-3, 8: 1.17e-3, 12: 1.37e-3}
    pace, age, before, other = 1.0, 0, usual, usual
    for number in range(16_000):
        if number % 30 == 0:
            pace = math.exp(chance.gauss(0, 0.2))
        if number % 200 == 50:
            other = chance.choice([rows for rows in took if rows != usual])
        rows = other if number % 200 in range(50, 59) else usual
        age, before = age + 1 if rows == before else 0, rows
        late = 1 + 0.2 * 0.5**age
        cost.expect(Work(4, 800, 800, 4))
        cost.observe(rows, took[rows] * pace * late * (1 + abs(chance.gauss(0, 0.1))))
        if number > 1000 and number % 50 == 0:
            plain, *drafts = cost.seconds([*took])
            ratios = [took[size] / took[4] for size in (8, 12)]
            errors += [math.log(found / plain / ratio) for found, ratio in zip(drafts, ratios, strict=True)]
    assert 0.04 > abs(mean(errors))
    assert 0.6 < cost._slowdown < 1.7


def test_steps_with_drafts_are_measured_on_their_own() -> None:
    """Below the fewest tokens that were measured with drafts, steps with drafts are estimated like steps without."""
    cost, plain = StepCost(), {4: 4.0, 8: 6.0, 16: 10.0}
    for sequences, drafts, seconds in ((4, 0, 4.0), (8, 0, 6.0), (16, 0, 10.0), (4, 8, 12.0)):
        cost.expect(Work(sequences, logit_tokens=sequences))
        for _ in range(20):
            cost.observe(sequences + drafts, seconds)

    for tokens, seconds in plain.items():
        assert seconds == pytest.approx(cost.estimate(Work(tokens, logit_tokens=tokens)), rel=1e-9)
    cost.expect(Work(4, logit_tokens=4))
    assert [4.0, 6.0, 12.0, 12.0] == pytest.approx(cost.seconds([4, 8, 12, 16]), rel=1e-9)
    assert 32 == cost.reach
    assert 0 == cost.age(12) < cost.age(16)


def test_nothing_is_learnt_from_nothing() -> None:
    """Steps without rows or time, and a cost that was never told any."""
    cost = StepCost()
    cost.observe(0, 1.0)
    cost.observe(1, 0.0)

    assert (0, 0.0) == (cost.frontier, cost.estimate(Work(5, 100, 100)))
