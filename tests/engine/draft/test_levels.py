"""What drafting costs by its levels: lines that are known, found from what drafting took."""

from __future__ import annotations

import pytest

from engine.draft.levels import DraftCost, LevelCost


def learnt(*measured: tuple[int, float]) -> list[float]:
    """What 1, 2 and 4 levels cost, after some measurements."""
    cost = LevelCost()
    for levels, seconds in measured:
        cost.observe(levels, seconds)
    start, level = cost.line()
    return [start + level * levels for levels in (1, 2, 4)]


def test_a_start_is_told_from_levels() -> None:
    """Drafts of different depths show what each level costs, and what drafting costs at all."""
    line = [(levels, 3.0 + levels) for levels in (1, 4, 2, 6) * 20]

    assert [4, 5, 7] == pytest.approx(learnt(*line), rel=0.1)


def test_where_all_drafts_are_alike_a_level_is_its_share() -> None:
    """Nothing tells what of it is the start."""
    assert [2, 4, 8] == pytest.approx(learnt(*[(2, 4.0)] * 10))


def test_a_measurement_that_waited_for_the_machine_pulls_little() -> None:
    """A quarter of what was expected, at a tenth of the weight; and what took no time is no measurement."""
    assert 4 * 1.03 > learnt(*[(2, 4.0)] * 30, (2, 400.0), (2, 0.0), (0, 1.0))[1]


def test_nothing_is_known_at_first() -> None:
    """What was not measured seems to cost nothing, so it is tried."""
    assert [0, 0, 0] == learnt()


def test_drafting_for_many_costs_more_than_for_one() -> None:
    """What was not measured follows from the nearest number of sequences: fewer cost their share, more as much."""
    cost = DraftCost()
    assert (0.0, 0.0) == cost.line(4)
    for levels in (1, 4) * 40:
        cost.observe(8, levels, 8.0 * levels)
    assert cost.line(8) == cost.line(16) == pytest.approx((0.0, 8.0), abs=0.01)
    assert (0.0, 1.0) == pytest.approx(cost.line(1), abs=0.01)

    for levels in (1, 4) * 40:
        cost.observe(1, levels, 3.0 + levels)
    assert (3.0, 1.0) == pytest.approx(cost.line(1), rel=0.15)
    assert (0.0, 8.0) == pytest.approx(cost.line(8), abs=0.01)


def test_reading_is_paid_by_the_token() -> None:
    """What a call took that did not come to a text's end counts for the one that does."""
    cost = DraftCost()
    assert 0.0 == cost.token
    for _ in range(5):
        cost.read(0, 2.0)
        cost.read(400, 2.0)
    assert 0.01 == pytest.approx(cost.token, rel=0.02)
