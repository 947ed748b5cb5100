"""The depth controller: on simulated machines with a known best depth, and step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

import pytest

from engine.draft.controller import EXPLORATION_STEPS, LONGEST_COOLDOWN, PLAN_STEPS, DepthController
from engine.draft.depth import Candidate, Depth, DraftCall, FixedDepth, StepOutcome, VerifiedDraft
from engine.schedule.step_cost import Work
from tests.engine.draft.simulate import (
    COSTS,
    DEEPEST,
    KIND,
    Cost,
    best_fixed,
    flat,
    linear,
    roof,
    run,
    share,
    shares,
    steady,
    two_cores,
)
from tests.selection import quick

by_cost = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)


def step(
    depth: Depth,
    candidates: Sequence[Candidate],
    *,
    accepts: bool = True,
    step_seconds: float = 1.0,
    draft_seconds: float = 0.0,
    batch_tokens: int | None = None,
) -> list[int]:
    """One step: the depths of the candidates without a drafter in cooldown, all or no drafts accepted."""
    batch_tokens = batch_tokens or len(candidates)
    depth.cost.expect(Work(batch_tokens, logit_tokens=batch_tokens))
    asked = [one for one in candidates if not depth.cooldown(one.kind, batch_tokens)]
    depths = depth.choose(asked, batch_tokens=batch_tokens) if asked else []
    outcome = StepOutcome(batch_tokens, sum(depths), step_seconds)
    for one, deep in zip(asked, depths, strict=True):
        if deep:
            outcome.calls.append(DraftCall(one.kind, deep, draft_seconds))
            verified = VerifiedDraft(one.kind, deep, deep) if accepts else VerifiedDraft(one.kind, 1, 0)
            outcome.verified.append(verified)
    depth.observe(outcome)
    return depths


@by_cost
def test_short_runs_come_close_to_the_best_fixed_depth(cost: Cost) -> None:
    """In 500 rounds: 0.97 of it in the mean, 0.85 in the worst world."""
    found = [share(steady(cost, rate, seconds, 500)) for rate in (0.1, 0.5, 0.8, 0.98) for seconds in (0.0, 0.24)]

    assert mean(found) > 0.97
    assert min(found) > 0.85


@pytest.mark.slow
@by_cost
def test_long_runs_come_close_to_the_best_fixed_depth(cost: Cost) -> None:
    """In 2,000 rounds, of three seeds: 0.97 of it in the mean, 0.90 in the worst world."""
    found = shares(cost, seeds=3)

    assert mean(found) >= 0.97
    assert min(found) >= 0.90


@by_cost
@pytest.mark.parametrize("draft_seconds", [0.0, 0.2])
def test_drafts_stop_where_they_never_pay(cost: Cost, draft_seconds: float) -> None:
    """No draft is ever accepted: 0.97 of the speed without drafts."""
    score = run(DepthController(), steady(cost, 0.0, draft_seconds, 500), batch=1)

    assert score.rate >= 0.97 / cost(1)
    assert score.depths[-400:].count([0]) > 360 or not draft_seconds


def test_high_acceptance_makes_drafts_deep() -> None:
    """Where further tokens take no time, the depth grows with the acceptance rate."""
    for rate, least, most in ((0.98, 7, 8), (0.05, 0, 2)):
        score = run(DepthController(), steady(linear(0.05), rate, 0.05, 600), batch=1)

        assert least <= mean(depth for (depth,) in score.depths[-200:]) <= most


def test_the_batch_size_changes_the_depth() -> None:
    """The same drafts pay where the batch leaves the machine idle, and not where every token takes its time."""
    depth = DepthController()
    found = {}
    for batch in (1, 32, 1):
        score = run(depth, steady(roof(8), 0.8, 0.02, 300), batch=batch)
        found[batch] = mean(max(depths) for depths in score.depths[-100:])

    assert found[1] > 4
    assert found[32] < 0.5


@pytest.mark.parametrize("batch", quick((32,), (4, 32)))
def test_batches_come_close_to_the_best_fixed_depth(batch: int) -> None:
    """In 200 rounds, of three seeds: 0.90 of it in the worst world."""
    found = [
        mean(share(steady(cost, rate, seconds, 200), batch=batch, seed=seed) for seed in range(3))
        for cost in (flat, linear(0.3), roof(8))
        for rate in (0.3, 0.8)
        for seconds in (0.0, 0.3)
    ]

    assert min(found) > 0.90


@by_cost
def test_cold_processor_caches_do_not_hide_the_speed_without_drafts(cost: Cost) -> None:
    """A step without drafts takes half as long again after one with drafts."""
    assert min(share(steady(cost, 0.1, seconds, 1000), cold=0.5) for seconds in (0.0, 0.1, 0.24)) > 0.93


@pytest.mark.parametrize("cost", [linear(0.15), roof(8), *quick((), (linear(0.6), two_cores))])
@pytest.mark.parametrize(("before", "after"), [(0.1, 0.95), (0.95, 0.1), *quick((), ((0.5, 0.8),))])
def test_a_change_of_the_acceptance_rate_is_followed(cost: Cost, before: float, after: float) -> None:
    """About as fast as the best depth that is fixed over the change, or faster."""
    assert share(steady(cost, before, 0.1, 1000) + steady(cost, after, 0.1, 1000)) > 0.95


@pytest.mark.parametrize("change", [(flat, linear(0.6)), (linear(0.6), flat), (linear(0.3), roof(4))])
@pytest.mark.parametrize("rate", quick((0.8,), (0.5, 0.8)))
def test_a_change_of_the_step_cost_is_followed(change: tuple[Cost, Cost], rate: float) -> None:
    """About as fast as the best depth that is fixed over the change, or faster."""
    before, after = change

    assert share(steady(before, rate, 0.1, 1000) + steady(after, rate, 0.1, 1000)) > 0.90


def test_exploration_is_bounded() -> None:
    """Over 20,000 rounds depths other than the best one lose at most 1 % of the time, and are chosen all the same."""
    worlds = steady(linear(0.6), 0.1, 0.24, 20_000)
    score = run(DepthController(), worlds, batch=1)

    assert score.rate >= 0.99 * best_fixed(worlds)
    assert 0 < sum(depths != [0] for depths in score.depths[10_000:])


def cooldowns(steps: int, *, draft_seconds: float) -> list[tuple[int, int]]:
    """Where no draft is accepted: steps in a row for which the drafter is asked, and steps to the next ones."""
    depth, asked = DepthController(), list[int]()
    for number in range(steps):
        if not depth.cooldown(KIND, 1):
            asked.append(number)
        step(depth, [Candidate(KIND, 4)], accepts=False, draft_seconds=draft_seconds)
    ends = [index for index, (before, after) in enumerate(pairwise(asked)) if after > before + 1]
    runs = [after - before for before, after in pairwise([-1, *ends])]
    return [(run, asked[end + 1] - asked[end]) for run, end in zip(runs, ends, strict=True)]


def test_the_cooldown_doubles() -> None:
    """After each exploration that changes nothing the drafter is not asked for twice as many steps, up to a limit."""
    explored = [cooldown for run, cooldown in cooldowns(4000, draft_seconds=0.5) if run == EXPLORATION_STEPS + 1]

    assert [2 * PLAN_STEPS, 4 * PLAN_STEPS, LONGEST_COOLDOWN] == explored[:3]
    assert {LONGEST_COOLDOWN} == set(explored[2:])


def test_a_drafter_is_not_asked_until_its_exploration_is_within_the_budget() -> None:
    """The exploration takes half a percent of 1600 steps; hidden states are read before the end of each cooldown."""
    waited = cooldowns(1300, draft_seconds=1.0)

    assert [LONGEST_COOLDOWN] * 5 == [cooldown for _, cooldown in waited]
    assert [1] * 4 == [run for run, _ in waited[1:]]


def test_a_drafter_without_proposals_is_called_less_often() -> None:
    """The cooldown doubles, to where its calls take half a percent of the time; a draft ends it."""
    for seconds, most in ((0.001, 0), (0.1, 20), (100.0, LONGEST_COOLDOWN)):
        depth, asked = DepthController(), list[int]()
        for number in range(2000):
            outcome = StepOutcome(4, 0, 1.0)
            if not depth.cooldown("lookup", 4):
                asked.append(number)
                outcome.unused["lookup"] = seconds
            depth.observe(outcome)
        cooldowns = [after - before - 1 for before, after in pairwise(asked)]

        assert most == max(cooldowns) == cooldowns[-1]
    assert [1, 3, 7] == cooldowns[:3]
    assert not depth.cooldown("lookup", 2)


def test_depths_are_within_limits() -> None:
    """Also where the limits of the candidates differ, or are 0."""
    depth = DepthController()
    candidates = [Candidate("a", 0), Candidate("a", 1), Candidate("b", 3), Candidate("b", 8)]
    for number in range(300):
        depths = step(depth, candidates[number % 3 :], batch_tokens=4)

        assert all(deep <= one.limit for deep, one in zip(depths, candidates[number % 3 :], strict=False))
    assert [8] == depths[-1:]


def test_equal_measurements_give_equal_depths() -> None:
    """There is no clock and no random number."""
    runs = [run(DepthController(), steady(two_cores, 0.6, 0.1, 300), batch=3, seed=5).depths for _ in range(2)]

    assert runs[0] == runs[1]


def test_depths_grow_with_what_is_measured() -> None:
    """No drafts before a step was measured, and then at most twice the batch tokens of any step before."""
    depth, most = DepthController(), 1
    for number in range(60):
        (deep,) = step(depth, [Candidate(KIND, 16)])

        assert deep == 0 or number > 0
        assert 1 + deep <= 2 * most

        most = max(most, 1 + deep)

    assert 17 == most


def test_the_drafter_with_the_higher_rate_gets_the_tokens() -> None:
    """Of two drafters where each further token takes time."""
    depth, total = DepthController(), {"good": 0, "bad": 0}
    depth.cost.expect(Work(2, logit_tokens=2))
    for _ in range(400):
        asked = [Candidate(kind, 4) for kind in total if not depth.cooldown(kind, 2)]
        depths = dict(zip([one.kind for one in asked], depth.choose(asked, batch_tokens=2), strict=True))
        outcome = StepOutcome(2, sum(depths.values()), 1 + 0.2 * sum(depths.values()))
        for kind, deep in depths.items():
            outcome.verified.append(
                VerifiedDraft(kind, min(deep, 1) if kind == "bad" else deep, deep * (kind == "good"))
            )
            total[kind] += deep
        depth.observe(outcome)

    assert total["good"] > 1300
    assert total["bad"] < 150


def test_a_drafter_is_preferred_by_its_acceptance_rate() -> None:
    """And again after long without a verified draft, so that its rate is measured anew."""
    depth = DepthController()
    for number in range(2 * LONGEST_COOLDOWN):
        outcome = StepOutcome(1, 4, 1.0, verified=[VerifiedDraft("model", 4, 4)])
        if number < PLAN_STEPS:
            outcome.verified.append(VerifiedDraft("lookup", 1, 0))
        depth.observe(outcome)
        if number == LONGEST_COOLDOWN:
            assert (False, True) == (depth.prefers("lookup", "model"), depth.prefers("model", "lookup"))

    assert depth.prefers("lookup", "model")


def test_draft_costs_count() -> None:
    """Where further tokens take no time but a draft token takes a step and a half, nothing is drafted."""
    score = run(DepthController(), steady(flat, 0.9, 1.5, 300), batch=1)

    assert sum(map(sum, score.depths)) < 0.05 * len(score.depths)


@pytest.mark.parametrize(("texts", "drafts"), [(100, True), (4, False)])
def test_computing_new_texts_counts(texts: int, drafts: bool) -> None:
    """A draft model computes each new text for 30 steps' time: that pays in long texts only."""
    depth, chosen, computed = DepthController(), list[int](), False
    depth.cost.expect(Work(1, logit_tokens=1))
    for number in range(2000):
        computed = computed and number % texts > 0
        deep = 0
        if not depth.cooldown(KIND, 1):
            (deep,) = depth.choose([Candidate(KIND, 4)], batch_tokens=1)
        outcome = StepOutcome(1, deep, 1.0 + 0.1 * deep)
        if deep:
            seconds = 0.1 * deep + (0.0 if computed else 30.0)
            outcome.calls.append(DraftCall(KIND, deep, seconds, catches_up=not computed))
            outcome.verified.append(VerifiedDraft(KIND, deep, deep))
        computed = computed or deep > 0
        depth.observe(outcome)
        chosen.append(deep)

    assert drafts == (mean(map(bool, chosen[-1000:])) > 0.5)


@pytest.mark.parametrize(("token_seconds", "drafts"), [(0.0, True), (3.0, False)])
def test_drafts_beside_prefill_cost_no_more_a_token_than_without(token_seconds: float, drafts: bool) -> None:
    """The depth of steps without prefill, if further tokens are cheap beside prefill too."""
    depth = DepthController()
    run(depth, steady(flat, 0.9, 0.0, 200), batch=2)
    for _ in range(40):
        depth.cost.expect(Work(62, 200, 200, 3))
        depths = depth.choose([Candidate(KIND, DEEPEST)] * 2, batch_tokens=62)
        depth.observe(StepOutcome(62, sum(depths), 5.0 + token_seconds * sum(depths)))

    assert drafts == all(deep > 4 for deep in depths)
    assert drafts == any(depths)


def test_one_slow_step_does_not_decide() -> None:
    """Whenever it comes, drafts that pay are chosen."""
    for slow in (1, 3, 50):
        depth = DepthController()
        for number in range(400):
            depths = step(depth, [Candidate(KIND, 4)], step_seconds=20.0 if number == slow else 1.0)

        assert [4] == depths


def test_measurements_are_bounded_where_no_depth_is_chosen() -> None:
    """With fixed depths in all requests nothing is chosen; the measurements are learnt from all the same."""
    depth = DepthController()
    for _ in range(1000):
        depth.observe(StepOutcome(1, 2, 1.0, [DraftCall(KIND, 2, 0.1)], [VerifiedDraft(KIND, 2, 2)]))

    assert len(depth._outcomes) < PLAN_STEPS
    assert depth.prefers(KIND, "other")
    assert min(depth._rates(KIND).survival(2)) > 0.9


def test_a_fixed_depth_is_the_same_for_all() -> None:
    """Within the limits, whatever is measured; its step costs are measured too."""
    depth = FixedDepth(3)
    depth.cost.expect(Work(4, logit_tokens=4))
    depth.observe(StepOutcome(4, 2, 100.0, [DraftCall(KIND, 3, 100.0)], [VerifiedDraft(KIND, 3, 0)], {"lookup": 1.0}))

    assert [3, 1, 0] == depth.choose([Candidate(KIND, 9), Candidate(KIND, 1), Candidate(KIND, 0)], batch_tokens=3)
    assert not depth.cooldown(KIND, 1)
    assert depth.prefers(KIND, "other")
    assert [100.0] == depth.cost.seconds([6])
    assert FixedDepth(0).cooldown(KIND, 1)
