"""Prefill beside decoding sequences: inter-token latency and progress of prompts, on a simulated machine."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import pytest

from engine.load.load import LoadedModel
from engine.schedule.prefill_budget import MIN_TOKENS
from engine.types.request import Request
from tests.engine.kit.machine import Machine, smollm
from tests.engine.kit.mixes import prompts
from tests.engine.kit.models import Models, References
from tests.engine.kit.play import ask
from tests.engine.kit.served_contents import token_contents, with_token_contents
from tests.selection import quick

pytestmark = pytest.mark.usefixtures("one_thread")


def text(name: str, length: int, count: int = 4) -> Request:
    """A request with a prompt that no other begins like."""
    chance = random.Random(name)
    return ask(name, [chance.randrange(250) for _ in range(length)], count, ignore_eos=True)


def together(loaded: LoadedModel, target: Literal["auto"] | float) -> Machine:
    """Eight prompts of 256 tokens that arrive at once, and answers of 40."""
    machine = Machine()
    machine.play(machine.engine(loaded, itl_target_ms=target), [(0.0, text(str(at), 256, 40)) for at in range(8)])
    return machine


def test_prefill_keeps_the_inter_token_latency(loaded: Models) -> None:
    """Tokens come within the target, three times as evenly as without; first ones and the whole take little longer."""
    paced, prompts_first = together(loaded("llama"), "auto"), together(loaded("llama"), 0.0)

    assert max(paced.gaps) < 0.1
    assert 3 * max(paced.gaps) < max(prompts_first.gaps)
    assert max(paced.first.values()) < 1.4 * max(prompts_first.first.values())
    assert paced.now < 1.15 * prompts_first.now


@pytest.mark.parametrize(("target", "least", "most"), [(40.0, 33, 42), (80.0, 66, 85), (1.0, 20, 35)])
def test_a_target_is_kept_where_it_can_be(loaded: Models, target: float, least: float, most: float) -> None:
    """Steps with prompts take about as long as they may; where none is so short prompts still get their least rows."""
    steps = together(loaded("llama"), target).mixed[3:-1]

    assert steps
    assert all(least < 1000 * step.seconds < most for step in steps)
    assert all(step.rows >= MIN_TOKENS for step in steps)


def test_prefill_alone_gets_whole_chunks(loaded: Models) -> None:
    """Without decoding sequences the target does not limit chunks; they double until their cost is known."""
    machine = Machine()
    machine.play(machine.engine(loaded("llama"), itl_target_ms=1.0), [(0.0, text("a", 1000, 2))])

    assert [64, 128, 256, 256, 256, 40] == [step.rows for step in machine.steps if step.rows]


def test_chunks_are_small_on_a_slow_machine(loaded: Models) -> None:
    """A row takes a tenth of a second: prompts alone get as few as are still computed well, beside others fewer."""
    machine = Machine(lambda work: 0.1 * work.batch_tokens)
    machine.play(machine.engine(loaded("llama")), [(0.0, text("a", 200, 12)), (20.5, text("b", 50, 2))])

    assert [64, 64, 64, 8, 16, 16, 16, 2] == [step.rows for step in machine.steps if step.rows]


def test_a_long_prompt_gets_fewer_rows_the_farther_it_is(loaded: Models) -> None:
    """Each of its rows looks at all before it; its steps keep to the target all the same."""
    machine = Machine()
    asked = [(0.0, text("speaks", 5, 150)), (0.1, text("long", 2000))]
    machine.play(machine.engine(loaded("llama"), slots=2, itl_target_ms=40.0), asked)
    steps = machine.mixed[4:-1]

    assert all(step.seconds < 0.055 for step in steps)
    assert steps[-1].rows < 0.8 * steps[0].rows


def test_chunks_do_not_swing(loaded: Models) -> None:
    """With step times that vary by a tenth, chunks beside a decoding sequence have nearly equal sizes."""
    chance = random.Random(3)
    machine = Machine(lambda work: smollm(work) * (1 + abs(chance.gauss(0, 0.1))))
    asked = [(0.0, text("speaks", 5, 80)), (0.1, text("long", 1500))]
    machine.play(machine.engine(loaded("llama"), itl_target_ms=40.0), asked)
    rows = [step.rows for step in machine.mixed[4:-1]]

    assert len(rows) > 30
    assert all(0.5 < later / earlier < 2 for earlier, later in zip(rows, rows[1:], strict=False))
    assert 0.1 * sum(rows) / len(rows) > sum(abs(b - a) for a, b in zip(rows, rows[1:], strict=False)) / len(rows)


def test_a_step_that_was_held_up_is_forgotten(loaded: Models) -> None:
    """One of the steps takes a second; a few later the chunks are as they were."""
    machine, seconds = Machine(), iter([0.0] * 12 + [1.0])
    machine.seconds = lambda work: smollm(work) + next(seconds, 0.0)
    machine.play(machine.engine(loaded("llama")), [(0.0, text("speaks", 5, 80)), (0.1, text("long", 1500))])
    slow = next(at for at, step in enumerate(machine.mixed) if step.seconds > 1)
    rows = [step.rows for step in machine.mixed]

    assert 0.8 * rows[slow - 1] < min(rows[slow + 1 : slow + 10])


def test_a_machine_that_becomes_slower_is_followed(loaded: Models) -> None:
    """Steps that take twice as long from some time on get fewer rows, so that tokens come in time again."""
    machine = Machine()
    machine.seconds = lambda work: smollm(work) * (2 if len(machine.steps) > 20 else 1)
    asked = [(0.0, text("speaks", 5, 150)), (0.1, text("long", 1800))]
    machine.play(machine.engine(loaded("llama"), itl_target_ms=80.0), asked)
    steps = [step.seconds for step in machine.mixed if step.end > machine.steps[40].end][:-1]

    assert max(steps) < 0.09
    assert 0.07 < max(steps)


def test_short_prompts_need_not_wait_for_long_ones_and_these_do_not_starve(loaded: Models) -> None:
    """A prompt of 2000 tokens beside one of 40 every 100 ms: they hardly wait, and it is done when it is due."""
    machine = Machine()
    asked = [(0.0, text("speaks", 5, 200)), (0.1, text("long", 2000, 2))]
    asked += [(0.1 * at, text(f"{at}", 40, 2)) for at in range(2, 80)]
    machine.play(machine.engine(loaded("llama")), asked)
    before = [step.rows for step in machine.steps if step.end <= machine.first["long"]]
    beside = sorted(machine.first[name] for name in machine.first if machine.arrived[name] < machine.first["long"])

    assert 1.5 * 2000 < sum(before) < 5 * 2000 + 256
    assert beside[len(beside) // 2] < 0.2


def test_a_leader_is_due_with_its_followers(loaded: Models) -> None:
    """A prompt of the last tier goes first while a follower of the first tier waits for its prefix."""
    machine = Machine()
    engine = machine.engine(loaded("llama"), chunk=64)
    common = text("common", 500).prompt
    flex, default = replace(text("flex", 4), prompt=common, tier="flex"), replace(text("default", 400), tier="default")
    follower = replace(text("follower", 4), prompt=(*common, 7), tier="priority")
    for request in (flex, default):
        engine.submit(request)
        engine.step()
    engine.submit(follower)
    while engine.busy:
        engine.step()
    alone = [next(iter(step.prompt)) for step in machine.steps if len(step.prompt) == 1]

    assert ["flex", "default", "flex"] == [name for at, name in enumerate(alone) if alone[at - 1 : at] != [name]][:3]
    assert max(machine.said["flex"][0], machine.said["follower"][0]) < machine.said["default"][0]


def test_a_bidirectional_range_is_one_chunk_beside_decoding(loaded: Models) -> None:
    """However little a step may take: it would never come else."""
    machine = Machine()
    engine = machine.engine(with_token_contents(loaded("llama")), itl_target_ms=0.001)
    request = text("media", 90)
    request = replace(request, contents=token_contents(request.prompt, (10, 60)))
    machine.play(engine, [(0.0, text("speaks", 5, 40)), (0.1, request)])

    assert [10, 50, 16, 14] == [step.prompt["media"] for step in machine.steps if "media" in step.prompt]


@pytest.mark.parametrize("family", quick(("qwen3_next",), ("llama", "gemma3", "qwen3_next")))
def test_no_text_depends_on_step_times(loaded: Models, reference: References, family: str) -> None:
    """With random step times, and so random chunks, outputs equal transformers."""
    pool = prompts(5)
    for seed in range(3):
        chance = random.Random(seed)
        machine = Machine(lambda work, chance=chance: chance.uniform(0.0005, 0.004) * (work.batch_tokens + 3))
        asked = {str(at): chance.choice(pool) for at in range(8)}
        engine = machine.engine(loaded(family), context=128, slots=4, itl_target_ms=chance.choice(("auto", 20.0)))
        machine.play(
            engine,
            [(chance.uniform(0, 1), ask(name, prompt, 10, ignore_eos=True)) for name, prompt in asked.items()],
        )
        for name, prompt in asked.items():
            expected = list(reference(family).greedy(prompt, 10))
            assert expected == machine.tokens[name][: len(expected)]
        assert machine.mixed
