"""The costs of a drafter's calls, found from calls of a few depths and batch sizes."""

from __future__ import annotations

import random
from itertools import product

import pytest

from engine.draft.draft_cost import DraftCost


def seconds(depth: int, batch_tokens: int) -> float:
    """A call with all three costs."""
    return 3e-4 + depth * (1e-4 + 2e-5 * batch_tokens)


def test_costs_of_depths_that_were_not_measured() -> None:
    """Calls of two depths at two batch sizes give all others, beside noise within 5 %."""
    cost, chance = DraftCost(0.99), random.Random(0)
    for _ in range(50):
        for depth, batch_tokens in product((3, 8), (2, 12)):
            cost.observe(depth, batch_tokens, seconds(depth, batch_tokens) * chance.uniform(0.98, 1.02))
    for depth, batch_tokens in product((1, 2, 5, 12), (1, 8, 16)):
        assert cost.seconds(depth, batch_tokens) == pytest.approx(seconds(depth, batch_tokens), rel=0.05)


def test_one_measured_depth_scales_with_depth_and_batch_size() -> None:
    """No base cost is invented, and none is negative."""
    cost = DraftCost(0.99)
    cost.observe(4, 8, 0.004)
    assert cost.seconds(4, 8) == pytest.approx(0.004)
    assert 0.0075 < cost.seconds(8, 8) <= 0.0081
    assert 0 < cost.seconds(1, 8) < 0.0015


def test_a_slower_drafter_replaces_earlier_calls() -> None:
    """A change of the machine counts as soon as the memory has faded."""
    cost = DraftCost(0.9)
    for factor in (1, 3):
        for _ in range(100):
            cost.observe(2, 4, factor * seconds(2, 4))
            cost.observe(6, 4, factor * seconds(6, 4))
    assert cost.seconds(4, 4) == pytest.approx(3 * seconds(4, 4), rel=0.02)


def test_no_cost_before_a_call_and_for_calls_below_the_resolution_of_the_clock() -> None:
    """Calls of 0 seconds, as of a lookup, are no measurement."""
    cost = DraftCost(0.99)
    assert cost.seconds(4, 1) == 0
    cost.observe(4, 1, 0.0)
    assert cost.seconds(4, 1) == 0


def test_costs_are_never_negative() -> None:
    """Deep calls that are faster than shallow ones, by chance, give no negative level."""
    cost = DraftCost(0.99)
    for depth, measured in ((1, 0.004), (8, 0.002), (2, 0.004), (4, 0.003)):
        cost.observe(depth, 4, measured)
    assert all(cost.seconds(depth, batch_tokens) > 0 for depth, batch_tokens in product((1, 4, 16), (1, 16)))
