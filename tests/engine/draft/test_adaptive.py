"""The depth that pays: on worlds whose best depth is known, against every fixed depth."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from statistics import mean

import pytest

from engine.draft.adaptive import AdaptiveDepth
from engine.draft.depth import FixedDepth
from engine.draft.offer import Candidate
from engine.schedule.work import Work
from tests.engine.draft.simulate import (
    KIND,
    Cost,
    World,
    best_fixed,
    flat,
    linear,
    play,
    roof,
    tiles,
    two_cores,
)

DEEPEST = 8
WARM = 20
COSTS: dict[str, Cost] = {
    "flat": flat,
    "linear 0.05": linear(0.05),
    "linear 0.15": linear(0.15),
    "linear 0.3": linear(0.3),
    "linear 0.6": linear(0.6),
    "linear 1": linear(1.0),
    "roof 4": roof(4),
    "roof 8": roof(8),
    "tiles of 4": tiles(4, 0.5),
    "two rows cost more than one": lambda rows: 1.0 if rows == 1 else 1.6,
    "two cores": two_cores,
}
CHANCES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
by_cost = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)


def world(cost: Cost, chance: float, level: float = 0.0) -> World:
    """Drafts that are right equally often at every position."""
    return World(cost, [chance] * DEEPEST, level)


def share(worlds: list[World], *, batch: int = 1, seed: int = 0, cold: float = 0.0) -> float:
    """What the adaptive depth brings, measured by the best fixed depth of the same rounds."""
    score = play(AdaptiveDepth(), worlds, batch=batch, warm=WARM, seed=seed, cold=cold)
    return score.rate / best_fixed(worlds[WARM:], batch=batch)


@by_cost
def test_one_sequence_loses_little_while_it_learns(cost: Cost) -> None:
    """Within 500 rounds: 0.97 of the best depth on average, 0.85 at worst."""
    shares = [share([world(cost, chance, level)] * 500) for chance in (0.1, 0.5, 0.8, 0.98) for level in (0.0, 0.24)]

    assert sum(shares) / len(shares) > 0.97
    assert min(shares) > 0.85


@pytest.mark.slow
@by_cost
@pytest.mark.parametrize("level", [0.0, 0.1, 0.24])
def test_one_sequence_comes_close_to_the_best_depth(cost: Cost, level: float) -> None:
    """Over 2,000 rounds after the first 20, drawn three times: 0.985 of the best depth on average, 0.95 at worst."""
    shares = {
        chance: mean(share([world(cost, chance, level)] * 2000, seed=seed) for seed in range(3)) for chance in CHANCES
    }

    assert {} == {chance: found for chance, found in shares.items() if found < 0.95}
    assert mean(shares.values()) > 0.985


@by_cost
def test_no_drafts_are_judged_by_steps_that_follow_their_like(cost: Cost) -> None:
    """A step without drafts takes half as long again behind one with drafts: drafts that do not pay still end."""
    shares = [share([world(cost, 0.1, level)] * 1000, cold=0.5) for level in (0.0, 0.1, 0.24)]

    assert min(shares) > 0.95


@pytest.mark.parametrize("batch", [4, 32])
def test_a_batch_comes_close_to_the_best_depth(batch: int) -> None:
    """One round tells much about many sequences: 0.96 of the best depth in 200 rounds, on average of three draws."""
    shares = [
        sum(share([world(cost, chance, level)] * 200, batch=batch, seed=seed) for seed in range(3)) / 3
        for cost in (flat, linear(0.3), roof(8))
        for chance in (0.3, 0.8)
        for level in (0.0, 0.3)
    ]

    assert min(shares) > 0.96


CHANGES = [(0.1, 0.95), (0.95, 0.1), (0.5, 0.8)]


@pytest.mark.slow
@pytest.mark.parametrize("cost", [linear(0.15), linear(0.6), roof(8), two_cores])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_drafts_that_become_better_or_worse_are_noticed(cost: Cost, before: float, after: float) -> None:
    """With a change in the middle it does better than any fixed depth, or nearly as well."""
    assert share([world(cost, before, 0.1)] * 1000 + [world(cost, after, 0.1)] * 1000) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("change", [(flat, linear(0.6)), (linear(0.6), flat), (linear(0.3), roof(4))])
@pytest.mark.parametrize("chance", [0.5, 0.8])
def test_steps_that_become_dearer_or_cheaper_are_noticed(change: tuple[Cost, Cost], chance: float) -> None:
    """What was measured long ago gives way."""
    first, second = change

    assert share([world(first, chance, 0.1)] * 1000 + [world(second, chance, 0.1)] * 1000) > 0.93


def test_a_large_batch_with_costly_rows_drafts_nothing() -> None:
    """256 sequences whose rows cost in full: after 20 rounds no draft but to learn, and that costs next to nothing."""
    score = play(AdaptiveDepth(), [world(linear(1.0), 0.8, 0.3)] * 100, batch=256, warm=WARM)

    assert score.depths[-40:].count([0] * 256) > 20
    assert score.rate > 0.98 * best_fixed([world(linear(1.0), 0.8, 0.3)], batch=256)


def test_drafts_that_are_always_wrong_cost_next_to_nothing() -> None:
    """Nobody is slower for trying: 0.98 of no drafts at all, in 300 rounds, the first ones not counted."""
    for cost in (linear(0.15), linear(0.6), two_cores):
        assert share([World(cost, [0.0] * DEEPEST, 0.2)] * 300) > 0.98


def test_the_first_rounds_are_careful() -> None:
    """Nothing is drafted before a step was measured, and from then on the rows double at most."""
    depth, most = AdaptiveDepth(), 1

    assert [0] == depth.choose([Candidate(KIND, 16)], rows=1)

    depth.stepped(1, 1.0)
    for _ in range(20):
        (chosen,) = depth.choose([Candidate(KIND, 16)], rows=1)

        assert 1 + chosen <= 2 * most

        most = max(most, 1 + chosen)
        depth.verified(KIND, chosen, chosen)
        depth.stepped(1 + chosen, 1.0)

    assert 17 == most


def test_equal_inputs_give_equal_depths() -> None:
    """There is no hidden clock and no hidden chance."""
    worlds = [world(two_cores, 0.6, 0.1)] * 200
    runs = [play(AdaptiveDepth(), worlds, batch=3, warm=0, seed=5).depths for _ in range(2)]

    assert runs[0] == runs[1]


def test_limits_are_kept() -> None:
    """However well drafts do, nobody gets more than his limit; without any limit nothing breaks."""
    depth, chance = AdaptiveDepth(), random.Random(1)
    for _ in range(300):
        limits = [chance.choice((0, 0, 1, 3, 8)) for _ in range(chance.randint(0, 5))]
        depths = depth.choose([Candidate(chance.choice("ab"), limit) for limit in limits], rows=max(1, len(limits)))

        assert len(depths) == len(limits)
        assert all(0 <= chosen <= limit for chosen, limit in zip(depths, limits, strict=True))

        for chosen in depths:
            depth.verified("a", chosen, chosen)
        depth.stepped(max(1, len(limits)) + sum(depths), 1.0)


def test_the_better_drafts_go_first() -> None:
    """Of two kinds where only a few rows pay, the kind that is right gets them."""
    depth = AdaptiveDepth()
    candidates = [Candidate("good", 4), Candidate("bad", 4)]
    total = {"good": 0, "bad": 0}
    for _ in range(200):
        depths = dict(zip(("good", "bad"), depth.choose(candidates, rows=2), strict=True))
        depth.verified("good", depths["good"], depths["good"])
        depth.verified("bad", min(depths["bad"], 1), 0)
        depth.stepped(2 + sum(depths.values()), 1 + 0.2 * sum(depths.values()))
        total = {kind: total[kind] + depths[kind] for kind in total}

    assert total["good"] > 700
    assert total["bad"] < 100


def test_levels_of_drafting_are_paid_for() -> None:
    """Where rows are free but a level of drafting costs a step and a half, nothing is drafted."""
    score = play(AdaptiveDepth(), [world(flat, 0.9, 1.5)] * 200, batch=1, warm=WARM)

    assert sum(map(sum, score.depths)) < 0.05 * 180


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    """Steps of no time and of no rows are passed over."""
    depth = AdaptiveDepth()
    depth.stepped(1, 0.0)
    depth.stepped(0, 1.0)

    assert [0] == depth.choose([Candidate(KIND, 4)], rows=1)


def test_a_single_slow_step_does_not_decide() -> None:
    """A step that waited for the machine, first or later, does not keep drafts away that pay."""
    for slow in (1, 3, 50):
        depth, chosen = AdaptiveDepth(), [0]
        for number in range(300):
            chosen = depth.choose([Candidate(KIND, 4)], rows=1)
            depth.verified(KIND, chosen[0], chosen[0])
            depth.stepped(1 + chosen[0], 20.0 if number == slow else 1.0)

        assert [4] == chosen


def test_a_kind_that_does_not_pay_rests() -> None:
    """Always wrong, it is soon left in peace for most steps; it is tried again, and the other kind never rests."""
    depth, asked = AdaptiveDepth(), {"good": 0, "bad": 0}
    for number in range(600):
        awake = [kind for kind in asked if not depth.rests(kind, 2)]
        depths = depth.choose([Candidate(kind, 4) for kind in awake], rows=2)
        for kind, chosen in zip(awake, depths, strict=True):
            asked[kind] += number >= 100
            depth.verified(kind, min(chosen, 1) if kind == "bad" else chosen, 0 if kind == "bad" else chosen)
        depth.stepped(2 + sum(depths), 1 + 0.1 * sum(depths))

    assert 500 == asked["good"]
    assert 5 < asked["bad"] < 100


def test_reading_for_a_trial_is_paid_from_what_was_saved() -> None:
    """A drafter that has to read a text for ten steps' time is tried much more seldom, not forgotten."""
    trials = {}
    for reading in (0.0, 10.0):
        depth, trials[reading], trying = AdaptiveDepth(), 0, False
        for number in range(20_000):
            unread = 1 if trying else 500
            chosen = [] if depth.rests(KIND, 1) else depth.choose([Candidate(KIND, 4, unread)], rows=1)
            if any(chosen):
                depth.verified(KIND, 1, 0)
                trials[reading] += number > 1000 and not trying
                if trying:
                    depth.drafted(KIND, 1, max(chosen), 0.3 * max(chosen))
                else:
                    depth.caught_up(KIND, 1, max(chosen), 0.3 * max(chosen) + reading, unread)
            trying = any(chosen)
            depth.stepped(1 + sum(chosen), 1 + 0.3 * sum(chosen))

    assert 10 < trials[0.0]
    assert 1 < trials[10.0] < trials[0.0] / 2


@pytest.mark.parametrize("row", [0.05, 0.1])
def test_what_a_first_level_takes_is_not_said_of_reading(row: float) -> None:
    """All first drafts of a drafter stand behind a text that is new to it; one that reads for nothing is tried soon."""
    depth, drafted, unread = AdaptiveDepth(), 0, 100
    for number in range(250):
        chosen = [] if depth.rests(KIND, 4) else depth.choose([Candidate(KIND, 4, unread)] * 4, rows=4)
        if any(chosen):
            # They are wrong to begin with, so that they rest.
            for deep in chosen:
                depth.verified(KIND, deep if number > 20 else 1, deep if number > 20 else 0)
            if unread > 1:
                depth.caught_up(KIND, 4, max(chosen), 0.1 * max(chosen), 4 * unread)
            else:
                depth.drafted(KIND, 4, max(chosen), 0.1 * max(chosen))
        drafted, unread = drafted + any(chosen), 1 if any(chosen) else 100
        depth.stepped(4 + sum(chosen), 1.0 + row * sum(chosen))

    assert drafted > 20


def test_drafts_that_are_never_seen_without_reading_are_paid_for() -> None:
    """Somebody is new in every step, so no level is ever seen alone: what drafting takes is known all the same."""
    depth, late = AdaptiveDepth(), 0
    for number in range(400):
        chosen = [] if depth.rests(KIND, 4) else depth.choose([Candidate(KIND, 4, 100, room=20)] * 4, rows=4)
        if any(chosen):
            for deep in chosen:
                depth.verified(KIND, deep, deep)
            depth.caught_up(KIND, 4, max(chosen), 30.0, 400)
        late += number >= 100 and any(chosen)
        depth.stepped(4 + sum(chosen), 1.0)

    assert late < 10


@pytest.mark.parametrize("reading", [0.001, 1.0])
@pytest.mark.parametrize("rows", [4, 20])
def test_a_text_that_takes_long_to_read_does_not_keep_others_from_drafts(rows: int, reading: float) -> None:
    """It has none itself, beside prompts and without; if it is read sooner it has as many as they."""
    depth = AdaptiveDepth()
    play(depth, [world(flat, 0.95, 0.1)] * 60, batch=4, warm=0)
    for _ in range(10):
        depth.caught_up(KIND, 4, 4, reading * 400 + 0.4, 400)
    play(depth, [world(flat, 0.95, 0.1)] * 60, batch=4, warm=0)
    depth.cost.expect(Work(rows, told=4))
    depth.cost.observe(rows, 1.0)
    candidates = [Candidate(KIND, 4, 500, 2), *[Candidate(KIND, 4, 1, 2)] * 3]
    found = [depth.choose(candidates, rows=rows) for _ in range(20)]

    assert all(depths[1] for depths in found)
    assert {reading < 1} == {depths[0] > 0 for depths in found}


@pytest.mark.parametrize(("lengths", "drafted"), [([400] * 20, True), ([4] * 20, False)])
def test_reading_has_to_pay_before_a_text_ends(lengths: list[int], drafted: bool) -> None:
    """Drafts that save half of the time are worth ten steps' reading where texts go on for long, and only there."""
    depth = AdaptiveDepth()
    for length in lengths:
        depth.ended(length)
    for number in range(400):
        # Half of the texts are new, as where one ends and the next one begins.
        new = number % 8 == 7
        candidates = [Candidate(KIND, 4, 500 if new else 1)]
        chosen = [] if depth.rests(KIND, 1) else depth.choose(candidates, rows=1)
        if any(chosen):
            depth.verified(KIND, max(chosen), max(chosen))
            if new:
                depth.caught_up(KIND, 1, max(chosen), 10.0 + 0.1 * max(chosen), 500)
            else:
                depth.drafted(KIND, 1, max(chosen), 0.1 * max(chosen))
        depth.stepped(1 + sum(chosen), 1.0 + 0.3 * sum(chosen))
    found = [depth.choose([Candidate(KIND, 4, 500)], rows=1) for _ in range(8)]

    assert drafted == ([4] in found[2:])


@pytest.mark.parametrize("reading", [0.0, 100.0])
def test_a_text_is_read_beside_prompts_where_that_pays_without_them(reading: float) -> None:
    """What is read already is drafted for, and so is what takes little time to read."""
    depth = AdaptiveDepth()
    play(depth, [world(flat, 0.95, 0.1)] * 60, batch=3, warm=0)
    for _ in range(10):
        depth.caught_up(KIND, 3, 4, reading + 0.4, 100)
    play(depth, [world(flat, 0.95, 0.1)] * 60, batch=3, warm=0)
    depth.cost.expect(Work(20, told=3))
    depth.cost.observe(20, 1.0)
    read, young = ([Candidate(KIND, 4, unread, 2)] * 3 for unread in (1, 100))

    assert any(map(any, [depth.choose(read, rows=20) for _ in range(20)]))
    assert (reading == 0.0) == any(map(any, [depth.choose(young, rows=20) for _ in range(20)]))


@pytest.mark.parametrize("running", [2, 16])
def test_who_drafts_beside_prompts_is_told_by_who_will_speak_when_they_are_read(running: int) -> None:
    """One alone gains by drafts, sixteen together do not: then a token is worth what it costs there."""

    def cost(rows: int) -> float:
        return max(1.0, rows / 8)

    depth = AdaptiveDepth()
    for batch in (16, 2):
        play(depth, [world(cost, 0.9, 0.02)] * 200, batch=batch, warm=0)
    depth.cost.expect(Work(40, told=2))
    depth.cost.observe(40, 5.0)
    depth.cost.observe(60, 6.0)
    found = [depth.choose([Candidate(KIND, 4)] * 2, rows=40, running=running) for _ in range(20)]

    assert (running == 2) == any(map(any, found))


def test_a_size_begins_without_drafts() -> None:
    """What drafts have to be better than is known first, however much is known of other sizes."""
    depth = AdaptiveDepth()
    play(depth, [world(flat, 0.95)] * 60, batch=8, warm=0)
    score = play(depth, [world(flat, 0.95)] * 60, batch=1, warm=0)

    assert not any(map(any, score.depths[:5]))
    assert all(map(any, score.depths[20:40]))


def test_the_likelier_of_two_kinds_is_known_and_the_other_is_not_given_up() -> None:
    """By what was judged; what was not tried for long is taken once more."""
    depth = AdaptiveDepth()
    for number in range(200):
        for kind, chosen in (("a", 4), ("b", 4)) if number < 20 else (("b", 4),):
            depth.choose([Candidate(kind, chosen)], rows=1)
            depth.verified(kind, chosen, 0 if kind == "a" else chosen)
        depth.stepped(2, 1.0)
        if number == 19:
            assert (False, True) == (depth.likelier("a", "b"), depth.likelier("b", "a"))

    assert depth.likelier("a", "b")


def test_a_kind_that_is_trusted_is_tried_at_once() -> None:
    """Where a row costs two thirds of a step, a draft that is right half of the time does not pay; a sure one does."""
    drafted = {}
    for kind in ("sure", "unsure"):
        depth, chosen = AdaptiveDepth(trusted=("sure",)), []
        depth.stepped(1, 1.0)
        depth.stepped(2, 1.66)
        for _ in range(15):
            chosen += depth.choose([Candidate(kind, 1)], rows=1)
            depth.verified(kind, chosen[-1], chosen[-1])
            depth.stepped(1 + chosen[-1], 1.0 + 0.66 * chosen[-1])
        # Both ways are tried to begin with.
        drafted[kind] = chosen[10:]

    assert {"sure": [1] * 5, "unsure": [0] * 5} == drafted


def test_a_kind_that_is_outdone_rests() -> None:
    """The oftener, the longer; it is asked again all the same."""
    depth, asked = AdaptiveDepth(), 0
    for _ in range(400):
        if not depth.rests("lookup", 4):
            asked += 1
            depth.outdone("lookup", 4)
        depth.stepped(1, 1.0)

    assert 10 < asked < 30
    assert depth.rests("lookup", 4)
    assert not depth.rests("lookup", 2), "what does not pay beside many rows may pay beside few"


def test_a_kind_that_has_nothing_to_say_is_asked_again_soon() -> None:
    """The sooner, the less asking costs of a step; one that was outdone before rests as long as it did then."""
    for seconds, most in ((0.001, 1), (0.02, 14), (0.2, 64)):
        depth, asked = AdaptiveDepth(), []
        for step in range(400):
            if not depth.rests("lookup", 4):
                asked.append(step)
                depth.silent("lookup", 4, seconds)
            depth.stepped(4, 1.0)

        rests = [after - before for before, after in pairwise(asked)]
        assert most - 1 <= max(rests) == rests[-1] <= most
    for _ in range(9):
        depth.outdone("lookup", 4)
    depth.silent("lookup", 4, 0.001)
    assert all(depth.rests("lookup", 4) for _ in range(40))


def test_drafts_beside_a_prompt_are_worth_what_tokens_cost_without_one() -> None:
    """Beside 60 rows of a prompt the rate of a step says nothing; where further rows are free drafts pay."""
    for row, drafted in ((0.0, True), (3.0, False)):
        depth = AdaptiveDepth()
        play(depth, [world(flat, 0.9)] * 200, batch=2, warm=0)
        depths = []
        for _ in range(40):
            depth.cost.expect(Work(62, 200, 200, 3))
            depths.append(depth.choose([Candidate(KIND, 8)] * 2, rows=62))
            for chosen in depths[-1]:
                depth.verified(KIND, chosen, chosen)
            depth.stepped(62 + sum(depths[-1]), 5.0 + row * sum(depths[-1]))

        assert drafted == all(min(chosen) > 4 for chosen in depths[-5:])
        assert drafted == any(max(chosen) > 0 for chosen in depths[-5:])


def test_what_is_settled_is_thought_over_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world that does not change, most choices are those made before."""
    thoughts = []
    monkeypatch.setattr(AdaptiveDepth, "_think", _counting(AdaptiveDepth._think, thoughts))
    play(AdaptiveDepth(), [world(flat, 0.9, 0.1)] * 1000, batch=4, warm=WARM)

    assert 20 < len(thoughts) < 100


def _counting(think: Callable[..., list[int]], thoughts: list[int]) -> Callable[..., list[int]]:
    def counted(*arguments: object) -> list[int]:
        thoughts.append(1)
        return think(*arguments)

    return counted


def test_a_plan_stands_for_some_of_its_uses() -> None:
    """They are used up by that. What is new, or a trial, does not stand at all."""
    depth, most, stood = AdaptiveDepth(), 0, 0
    candidates = [Candidate(KIND, 8)] * 4
    for _ in range(600):
        chosen = depth.choose(candidates, rows=4)
        deep, again = depth.again(KIND, 100)
        assert again == 0 or [deep] * 4 == chosen
        most, stood = max(most, again), stood + again
        for _ in range(1 + again):
            for each in chosen:
                depth.verified(KIND, each, each)
            depth.stepped(4 + sum(chosen), 1.0)

    assert 8 == most
    assert stood > 600
    depth.choose(candidates, rows=4)
    assert depth.again(KIND, 0)[1] == 0
    assert (3, 17) == FixedDepth(3).again(KIND, 17)


def test_what_became_of_drafts_is_kept_for_a_while_only() -> None:
    """Where requests choose depths themselves nobody asks for it."""
    depth = AdaptiveDepth()
    for _ in range(5000):
        depth.verified(KIND, 2, 1)
        depth.drafted(KIND, 1, 2, 0.1)
        depth.caught_up(KIND, 1, 2, 1.0, 50)

    assert max(len(depth._judged), len(depth._drafted), len(depth._caught_up)) < 1024
    assert depth.likelier(KIND, "other")
    assert not depth.likelier("other", KIND)


def test_a_fixed_depth_is_fixed() -> None:
    """The same for all, less where the limit is less, whatever it is told."""
    depth = FixedDepth(3)
    depth.verified(KIND, 3, 0)
    depth.drafted(KIND, 1, 3, 100.0)
    depth.caught_up(KIND, 1, 3, 100.0, 9)
    depth.outdone(KIND, 4)
    depth.silent(KIND, 4, 1.0)
    depth.ended(7)
    depth.stepped(4, 100.0)

    assert [3, 1, 0] == depth.choose([Candidate(KIND, 9), Candidate(KIND, 1), Candidate(KIND, 0)], rows=3)
    assert not depth.rests(KIND, 1)
    assert depth.likelier(KIND, "other")
    assert FixedDepth(0).rests(KIND, 1)
