"""Sampled text is a function of prompt, parameters and seed only."""

from __future__ import annotations

import random

import pytest

from engine.core import Core
from engine.load.load import LoadedModel
from engine.types.request import Request, SamplingParams
from tests.engine.kit.mixes import prompts
from tests.engine.kit.models import CONTEXT, VOCABULARY, Models, core
from tests.engine.kit.play import Job, ask, play

COUNT = 12


def requests(number: int, chance: random.Random) -> list[Request]:
    """Requests at temperature 1, with seeds and all kinds of filters."""
    pool = prompts(5)
    return [
        ask(
            f"request {at}",
            chance.choice(pool),
            COUNT,
            sampling=SamplingParams(
                temperature=1.0,
                top_k=chance.choice((0, 0, 5)),
                top_p=chance.choice((1.0, 1.0, 0.9)),
                min_p=chance.choice((0.0, 0.0, 0.05)),
                frequency_penalty=chance.choice((0.0, 0.0, 0.5)),
                repetition_penalty=chance.choice((1.0, 1.0, 1.2)),
                seed=chance.randrange(-(2**63), 2**63),
            ),
        )
        for at in range(number)
    ]


def texts(engine: Core, jobs: list[Job]) -> dict[str, list[int]]:
    """The tokens of each job."""
    return {name: answer.tokens for name, answer in play(engine, jobs, most_steps=20_000).items()}


def alone(loaded: LoadedModel, request: Request) -> list[int]:
    """The tokens of a request in an engine of its own."""
    return texts(core(loaded, slots=1), [Job(request)])[request.id]


def differences(loaded: LoadedModel, number: int) -> int:
    """The number of requests with other tokens in a batch, in other chunks, in another order or with too few cells."""
    chance = random.Random(number)
    some = requests(number, chance)
    expected = {request.id: alone(loaded, request) for request in some}
    crowd = [Job(request, at // 3) for at, request in enumerate(some)]
    shuffled = [Job(request, chance.randint(0, number)) for request in reversed(some)]
    schedules = (
        texts(core(loaded, slots=8, chunk=5), crowd),
        texts(core(loaded, slots=3, chunk=256), shuffled),
        texts(core(loaded, slots=6, chunk=32, cells=CONTEXT + 60), shuffled),
    )
    return sum(expected[name] != found[name] for found in schedules for name in expected)


def test_seeded_text_depends_on_the_seed_only(loaded: Models) -> None:
    """Fifteen requests alone, in two batches and with too few cells."""
    assert 0 == differences(loaded("llama"), 15)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_thousand_seeded_texts_depend_on_the_seed_only(loaded: Models, family: str) -> None:
    assert 0 == differences(loaded(family), 1000)


def test_a_prefix_hit_does_not_change_sampled_text(loaded: Models) -> None:
    prompt = prompts(5)[3] + tuple(range(40))
    sampling = SamplingParams(temperature=1.0, seed=7)
    engine = core(loaded("llama"))
    first = play(engine, [Job(ask("first", prompt, sampling=sampling))])["first"]
    second = play(engine, [Job(ask("second", prompt, sampling=sampling))])["second"]

    assert first.tokens == second.tokens
    assert len(prompt) - 1 == second.started[0].cached_tokens


def test_seeds_give_different_texts(loaded: Models) -> None:
    """Negative and large seeds too."""
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**32 + 1]
    engine = core(loaded("llama"))
    jobs = [Job(ask(str(seed), (1, 2, 3), sampling=SamplingParams(temperature=1.0, seed=seed))) for seed in seeds]
    answers = play(engine, jobs)

    assert len(seeds) == len({tuple(answer.tokens) for answer in answers.values()})
    assert seeds == [answers[str(seed)].started[0].seed for seed in seeds]


def test_a_reported_seed_repeats_the_text(loaded: Models) -> None:
    """Without a seed texts differ; Started reports the random seed."""
    engine = core(loaded("llama"))
    answers = play(engine, [Job(ask(str(at), (1, 2, 3), sampling=SamplingParams(temperature=1.0))) for at in range(4)])
    drawn = answers["0"].started[0].seed
    again = play(engine, [Job(ask("again", (1, 2, 3), sampling=SamplingParams(temperature=1.0, seed=drawn)))])["again"]

    assert 4 == len({tuple(answer.tokens) for answer in answers.values()})
    assert answers["0"].tokens == again.tokens


def test_temperature_one_is_not_greedy(loaded: Models) -> None:
    """Sampled texts spread over the vocabulary."""
    engine = core(loaded("llama"), slots=8)
    jobs = [Job(ask(str(at), (1, 2, 3), 8, sampling=SamplingParams(seed=at))) for at in range(40)]
    answers = play(engine, jobs)

    assert VOCABULARY // 4 < len({token for answer in answers.values() for token in answer.tokens})
