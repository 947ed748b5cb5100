"""How long plans are kept, and what trials may cost."""

from __future__ import annotations

import pytest

from engine.draft.plans import Plan, Savings


def test_a_size_pays_for_its_own_trials() -> None:
    """A hundredth of its steps is saved up for the next trial, and no more than that takes."""
    seldom, often = Savings(0.0), Savings(0.0)
    seldom.steps, often.steps = 10, 1000

    assert not seldom.pay(2.0, 0.01, 1.0)
    assert often.pay(2.0, 0.01, 1.0)
    assert (0.1, 0.0) == (pytest.approx(seldom.saved), often.saved)
    seldom.steps += 195
    assert seldom.pay(2.0, 0.01, 1.0)
    assert pytest.approx(0.0) == seldom.saved


@pytest.mark.parametrize(("step", "kept"), [(100, 0), (1000, 3), (100_000, 8)])
def test_a_plan_that_changes_each_time_is_kept_for_some_steps(step: int, kept: int) -> None:
    """The more, the more steps were taken: thinking costs more than what is between such plans."""
    plan = Plan.after(Plan({"a": 1}, 1.0), {"a": 2}, 1.0)
    plan.keep(step, 0)
    used = 0
    for now in range(step, step + 500):
        if now < plan.until:
            plan.use(now)
            used += 1

    assert max(kept, 1) == used
