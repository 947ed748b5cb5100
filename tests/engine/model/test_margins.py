"""Margins of decisions by tolerance."""

from __future__ import annotations

import math

import pytest

from engine.model.margins import Margin, recording, within


@pytest.mark.parametrize(
    ("measured", "allowed", "holds", "factor"),
    [(0.01, 0.04, True, 4.0), (0.4, 0.04, False, 10.0), (0.0, 0.04, True, math.inf), (math.nan, 0.04, False, math.inf)],
)
def test_margin_is_the_factor_between_error_and_tolerance(
    measured: float, allowed: float, holds: bool, factor: float
) -> None:
    """NaN is within no tolerance."""
    margin = Margin("same", measured, allowed)

    assert (holds, pytest.approx(factor)) == (margin.holds, margin.factor)


def test_narrowest_margin_of_each_outcome_is_recorded() -> None:
    with recording() as margins:
        decided = [within("same", error, 1.0) for error in (0.1, 0.5, 2.0, 9.0)]

    assert [True, True, False, False] == decided
    assert {0.5, 2.0} == {margin.measured for margin in margins.narrowest}


def test_margins_are_recorded_inside_the_block_only() -> None:
    with recording() as margins:
        pass
    assert within("same", 0.5, 1.0)

    assert () == margins.narrowest
