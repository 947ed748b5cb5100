"""Tiers, preemption, deadlines and progress, step by step."""

from __future__ import annotations

import pytest

from engine.core import Core
from engine.types.events import Delta, Finished, PrefillProgress, Started
from engine.types.request import Tier
from tests.engine.kit.mixes import prompts
from tests.engine.kit.models import Models, References, core
from tests.engine.kit.play import Answer, Job, ask, play
from tests.selection import quick

PROMPT = tuple(range(40))


def started(engine: Core) -> list[str]:
    """Run to the end; the ids in the order of their slots."""
    names = []
    while engine.busy:
        names += [name for name, event in engine.step() if isinstance(event, Started)]
    return names


def test_tiers_are_served_in_order(loaded: Models) -> None:
    """Waiting requests by tier, then by arrival; running ones are not preempted for them."""
    engine = core(loaded("llama"), slots=1)
    tiers: list[Tier] = ["flex", "flex", "default", "priority", "default", "priority"]
    engine.submit(ask("runs", (7, 8), 3, tier="flex"))
    engine.step()
    for number, tier in enumerate(tiers):
        engine.submit(ask(f"{tier} {number}", (number, 9), 3, tier=tier))

    assert ["priority 3", "priority 5", "default 2", "default 4", "flex 0", "flex 1"] == started(engine)
    assert 0 == engine.stats().preemptions_total


def test_the_lowest_tier_is_preempted_first(loaded: Models) -> None:
    """When cells run out, its youngest sequence, however old that is."""
    engine = core(loaded("llama"), slots=4, cells=128, chunk=256)
    tiers: dict[str, Tier] = {"a flex": "flex", "old": "default", "another flex": "flex", "young": "default"}
    for name, tier in tiers.items():
        engine.submit(ask(name, [len(name), *range(26)], 24, ignore_eos=True, tier=tier))
    requeued: list[list[str]] = []
    while engine.busy:
        engine.step()
        waiting = [sequence.request.id for sequence in engine._scheduler.waiting]
        if engine.stats().preemptions_total > len(requeued):
            requeued.append(waiting)

    assert [["another flex"], ["a flex", "another flex"]] == requeued[:2]


def test_leaders_form_no_cycle(loaded: Models, reference: References) -> None:
    """A preempted leader is queued after its followers: they continue, and it waits for them."""
    engine, prompt = core(loaded("llama"), chunk=8), tuple((7 * at + 3) % 250 for at in range(60))
    requests = [ask(tier, (*prompt, at), 8, ignore_eos=True, tier=tier) for at, tier in enumerate(("flex", "default"))]
    for request in requests:
        engine.submit(request)
        engine.step()
    engine.step()
    engine._scheduler._preempt()
    assert ["flex"] == [sequence.request.id for sequence in engine._scheduler.waiting]

    outputs: dict[str, list[int]] = {"flex": [], "default": []}
    for _ in range(40):
        for name, event in engine.step():
            outputs[name] += event.tokens if isinstance(event, Delta) else ()
    for request in requests:
        assert list(reference("llama").greedy(request.prompt, 8)) == outputs[request.id]
    assert 62 + 2 * 7 == engine.stats().batch_tokens_total


@pytest.mark.parametrize("chunk", quick((3,), (3, 16)))
def test_tiers_do_not_change_the_text(loaded: Models, reference: References, chunk: int) -> None:
    """With too few cells, and preempted leaders that follow their followers."""
    tiers: list[Tier] = ["flex", "default", "priority"]
    pool = prompts(3)
    preempted = 0
    for seed in range(9):
        engine = core(loaded("llama"), slots=4, cells=130, chunk=chunk)
        asked = [pool[(seed * 7 + at) % 9 + 20] for at in range(8)]
        jobs = [
            Job(ask(str(at), prompt, 12, ignore_eos=True, tier=tiers[at % 3]), at) for at, prompt in enumerate(asked)
        ]
        answers = play(engine, jobs)
        for at, prompt in enumerate(asked):
            expected = reference("llama").greedy(prompt, 12)
            assert list(expected) == answers[str(at)].tokens[: len(expected)]
        preempted += engine.stats().preemptions_total + engine.stats().time_slices_total

    assert 5 < preempted


def test_a_deadline_finishes_a_request_in_any_state(loaded: Models) -> None:
    """The running request keeps its tokens, the waiting one never started, the third has time."""
    engine, now = core(loaded("llama"), slots=1), [0.0]
    engine._clock = lambda: now[0]
    engine.submit(ask("runs", PROMPT, 50, ignore_eos=True, timeout_seconds=5.0))
    engine.submit(ask("waits", PROMPT, 50, ignore_eos=True, timeout_seconds=4.0))
    engine.submit(ask("lasts", (9, 8), 3, ignore_eos=True, timeout_seconds=500.0))
    answers = {name: Answer() for name in ("runs", "waits", "lasts")}
    for step in range(20):
        now[0] = float(step)
        for name, event in engine.step():
            if isinstance(event, Finished):
                answers[name].end = event
            elif isinstance(event, Started):
                answers[name].started.append(event)

    ends = {name: answer.end for name, answer in answers.items()}
    assert all(isinstance(end, Finished) for end in ends.values())
    finished = {name: (end.reason, end.stop, end.usage.completion_tokens) for name, end in ends.items() if end}
    assert {
        "runs": ("length", "deadline", 5),
        "waits": ("length", "deadline", 0),
        "lasts": ("length", None, 3),
    } == finished
    assert [] == answers["waits"].started
    assert ends["waits"].timings.queue_seconds == 4.0
    assert engine.cache.cells == engine.cache.free_cells + engine.cache.evictable_cells()


def test_progress_reports_computed_tokens(loaded: Models) -> None:
    """Once a step during prefill, cached tokens included; only on request.

    Of the first 16 tokens 3 are of the short prompt, which has the earlier deadline.
    """
    engine = core(loaded("llama"), chunk=16)
    play(engine, [Job(ask("before", PROMPT[:11], 1))])
    answers = play(engine, [Job(ask("tells", PROMPT, 3, progress=True)), Job(ask("silent", (9, 8, 7), 3))])

    assert [PrefillProgress(24, 40), PrefillProgress(40, 40)] == answers["tells"].progress
    assert [] == answers["silent"].progress
