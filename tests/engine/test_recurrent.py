"""Recurrent and hybrid models: batched, chunked, resumed and preempted, their output equals separate runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from engine.load.load import LoadedModel
from engine.types.request import Request
from tests.engine.kit.models import END, Reference, core
from tests.engine.kit.play import GREEDY, Job, play
from tests.selection import quick

FAMILIES = ["qwen3_next", "olmo_hybrid", "mamba", "mamba2", "jamba", "bamba", "lfm2"]


def request(name: str, prompt: tuple[int, ...], tokens: int) -> Request:
    """A greedy request."""
    return Request(id=name, prompt=prompt, sampling=GREEDY, max_tokens=tokens)


def text(answer: tuple[int, ...]) -> tuple[int, ...]:
    """The answer of `generate` without its end token."""
    return answer[: answer.index(END)] if END in answer else answer


# Other chunks with a delta rule and with a state space.
QUICK = {("qwen3_next", 1), ("mamba2", 64), ("jamba", 5), ("lfm2", 5)}


@pytest.mark.parametrize(("family", "chunk"), quick(QUICK, itertools.product(FAMILIES, (1, 5, 64))))
def test_any_batch_equals_separate_runs(
    family: str, chunk: int, loaded: Callable[..., LoadedModel], reference: Callable[..., Reference]
) -> None:
    """Prompts of unequal lengths with shared prefixes, in fewer slots than requests."""
    draw = random.Random(chunk)
    base = [draw.randrange(250) for _ in range(40)]
    prompts = {f"{at}": (*base[: draw.randrange(1, 40)], draw.randrange(250), at) for at in range(7)}
    engine = core(loaded(family), slots=3, chunk=chunk)

    answers = play(engine, [Job(request(name, prompt, 6), at) for at, (name, prompt) in enumerate(prompts.items())])

    expected = {name: text(reference(family).greedy(prompt, 6)) for name, prompt in prompts.items()}
    assert expected == {name: tuple(answer.tokens) for name, answer in answers.items()}


@pytest.mark.parametrize("step", quick((3,), (1, 3)))
@pytest.mark.parametrize("family", quick(("qwen3_next", "lfm2"), FAMILIES))
def test_a_conversation_resumes_at_any_length(
    family: str, step: int, loaded: Callable[..., LoadedModel], reference: Callable[..., Reference]
) -> None:
    """A prompt that diverges from a long conversation at any position gets the answer of an empty cache."""
    draw = random.Random(3)
    base = [draw.randrange(250) for _ in range(48)]
    engine = core(loaded(family), slots=2, chunk=16)
    play(engine, [Job(request("first", tuple(base), 5))])

    for at in range(1, 48, step):
        prompt = (*base[:at], 251)
        answers = play(engine, [Job(request(f"{at}", prompt, 3))])

        assert text(reference(family).greedy(prompt, 3)) == tuple(answers[f"{at}"].tokens), at


@pytest.mark.parametrize("family", quick(FAMILIES[::2], FAMILIES))
def test_the_next_turn_resumes_at_the_last_token(family: str, loaded: Callable[..., LoadedModel]) -> None:
    """The same prompt again computes its last token only."""
    engine = core(loaded(family), slots=2, chunk=16)
    prompt = tuple(range(30, 70))
    first = play(engine, [Job(Request(id="1", prompt=prompt, sampling=GREEDY, max_tokens=6, ignore_eos=True))])["1"]
    again = play(engine, [Job(request("2", prompt, 1))])["2"]
    turn = (*prompt, *first.tokens, 5, 6, 7)
    later = play(engine, [Job(request("3", turn, 1))])["3"]

    assert len(prompt) - 1 == again.started[0].cached_tokens
    assert len(prompt) + len(first.tokens) - 1 == later.started[0].cached_tokens


@pytest.mark.parametrize("family", quick(("qwen3_next", "jamba"), ("qwen3_next", "mamba2", "jamba")))
def test_preemption_does_not_change_the_text(
    family: str, loaded: Callable[..., LoadedModel], reference: Callable[..., Reference]
) -> None:
    """With too few cells."""
    prompts = {f"{at}": tuple((at * 31 + 5 * step) % 250 for step in range(30)) for at in range(6)}
    engine = core(loaded(family), slots=6, cells=6 * 45 // 3, chunk=16)

    answers = play(engine, [Job(request(name, prompt, 15)) for name, prompt in prompts.items()])

    expected = {name: text(reference(family).greedy(prompt, 15)) for name, prompt in prompts.items()}
    assert expected == {name: tuple(answer.tokens) for name, answer in answers.items()}
