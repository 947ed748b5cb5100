"""Requests with a shared prompt: it is computed and stored once, and outputs are exact with any number of cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.load.load import LoadedModel
from engine.types.events import Finished
from engine.types.request import Request
from tests.engine.kit.models import Reference, core
from tests.engine.kit.play import GREEDY, Job, play

SYSTEM = tuple((7 * at + 3) % 250 for at in range(90))
LONG = tuple((7 * at + at // 250) % 250 for at in range(2048))


def request(name: str, prompt: tuple[int, ...], tokens: int) -> Request:
    """A greedy request."""
    return Request(id=name, prompt=prompt, sampling=GREEDY, max_tokens=tokens, ignore_eos=True)


def test_a_shared_prefix_is_computed_once(loaded: Callable[..., LoadedModel]) -> None:
    """64 concurrent requests with one system prompt of 2048 tokens; one copy of its cells."""
    engine = core(loaded("llama"), slots=64, context=2304, cells=4000, chunk=256)
    users = [request(f"user {at}", (*LONG, 100 + at, 7), 4) for at in range(64)]

    answers = play(engine, [Job(user) for user in users])

    stats = engine.stats()
    assert all(isinstance(answer.end, Finished) for answer in answers.values())
    assert stats.batch_tokens_total == len(LONG) + 64 * 2 + 64 * 3
    assert stats.cells_used + stats.cells_cached <= len(LONG) + 64 * 6
    assert stats.cached_tokens_total == 63 * len(LONG)


def test_sequences_of_one_prompt_equal_separate_runs(
    loaded: Callable[..., LoadedModel], reference: Callable[..., Reference]
) -> None:
    """With the complete prompt of a leader, or a part of it."""
    engine = core(loaded("qwen3"), slots=5, chunk=11)
    prompts = {f"user {at}": (*SYSTEM[: 30 + 9 * at], 200 - at) for at in range(7)}

    answers = play(engine, [Job(request(name, prompt, 8), at) for at, (name, prompt) in enumerate(prompts.items())])

    expected = {name: _first(reference("qwen3").greedy(prompt, 8)) for name, prompt in prompts.items()}
    assert expected == {name: _first(tuple(answer.tokens)) for name, answer in answers.items()}


def test_a_cancelled_leader_is_replaced(loaded: Callable[..., LoadedModel]) -> None:
    """Its followers reuse the tokens that it computed."""
    engine = core(loaded("llama"), slots=4, chunk=8)
    users = [Job(request(f"user {at}", (*SYSTEM, at), 3), leaves=4 if at == 0 else None) for at in range(4)]

    answers = play(engine, users)

    finished = [answer for answer in answers.values() if isinstance(answer.end, Finished)]
    assert len(finished) == 3
    assert engine.stats().batch_tokens_total == len(SYSTEM) + 3 + 3 * 2


def test_four_sequences_per_slot_equal_separate_runs(
    loaded: Callable[..., LoadedModel], reference: Callable[..., Reference]
) -> None:
    """With a quarter of the cells that all sequences need."""
    prompts = {f"user {at}": tuple((at * 31 + 5 * step) % 250 for step in range(40)) for at in range(8)}
    engine = core(loaded("llama"), slots=8, cells=8 * 60 // 4, chunk=16)

    answers = play(engine, [Job(request(name, prompt, 20)) for name, prompt in prompts.items()])

    expected = {name: _first(reference("llama").greedy(prompt, 20)) for name, prompt in prompts.items()}
    assert expected == {name: _first(tuple(answer.tokens)) for name, answer in answers.items()}


def test_salts_separate_prefixes(loaded: Callable[..., LoadedModel]) -> None:
    """No waiting for, reuse or change of prefixes under another salt."""
    engine = core(loaded("llama"), slots=6, chunk=16)
    users = [
        replace(request(f"{salt} {at}", (*SYSTEM, at, 7), 4), salt=salt.encode()) for salt in "ab" for at in range(3)
    ]

    answers = play(engine, [Job(user) for user in users])
    later = play(engine, [Job(replace(users[0], id=salt, salt=salt.encode())) for salt in "abc"])

    assert engine.stats().batch_tokens_total == 2 * (len(SYSTEM) + 3 * 2 + 3 * 3) + 2 * 4 + len(SYSTEM) + 2 + 3
    assert {"a": len(SYSTEM) + 1, "b": len(SYSTEM) + 1, "c": 0} == {
        salt: answer.started[0].cached_tokens for salt, answer in later.items()
    }
    for at in range(3):
        assert answers[f"a {at}"].tokens == answers[f"b {at}"].tokens


def _first(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens up to the end token, where `generate` stops."""
    return tokens[: tokens.index(257) + 1] if 257 in tokens else tokens
