"""The DRY penalty against a brute-force implementation of llama.cpp's definition, and penalties with a lookback."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.sample.penalties import PenaltyHistory, repetitions
from engine.types.request import Dry, SamplingParams


def brute(tokens: Sequence[int], dry: Dry) -> dict[int, int]:
    """For each token the longest repetition that it would continue, by trying every earlier position."""
    some = list(tokens if dry.lookback < 0 else tokens[max(len(tokens) - dry.lookback, 0) :])
    found: dict[int, int] = {}
    for at in range(1, len(some)):
        length = 0
        while length < at and some[at - 1 - length] == some[-1 - length] and some[-1 - length] not in dry.breakers:
            length += 1
        if length >= dry.allowed_length:
            found[some[at]] = max(found.get(some[at], 0), length)
    return found


CASES = [
    Dry(0.8),
    Dry(0.8, allowed_length=1),
    Dry(1.0, 2.0, 4, lookback=20),
    Dry(1.0, breakers=(0, 3)),
    Dry(1.0, lookback=0),
]


@pytest.mark.parametrize("dry", CASES, ids=str)
def test_dry_finds_repetitions(dry: Dry) -> None:
    chance = random.Random(5)
    for letters in (2, 3, 5):
        for length in (0, 1, 2, 3, 10, 45, 60):
            text = [chance.randrange(letters) for _ in range(length)]
            text += text[: length // 3] + text[-7:]

            assert brute(text, dry) == repetitions(text, dry)


def test_the_dry_penalty_is_limited_for_long_repetitions() -> None:
    assert {1: 66} == repetitions([1] * 500, Dry(1.0))


def test_the_dry_penalty_grows_with_the_repetition() -> None:
    dry = Dry(0.5, base=2.0, allowed_length=2)
    params = SamplingParams(dry=dry)
    history = PenaltyHistory(params, (1, 2, 3, 4, 9, 2, 3, 5, 7, 1), 10)
    for token in (2, 3):
        history.append(token)
    logits = torch.zeros(10)
    history.penalise(logits, params)

    assert [0, 0, 0, 0, -0.5 * 2, -0.5, 0, 0, 0, 0] == logits.tolist()


def test_a_history_does_not_depend_on_how_it_grew() -> None:
    params = SamplingParams(dry=Dry(1.0, allowed_length=1), frequency_penalty=0.3)
    chance = random.Random(2)
    prompt, tokens = [[chance.randrange(6) for _ in range(20)] for _ in range(2)]
    history = PenaltyHistory(params, prompt, 6)
    for at, token in enumerate(tokens):
        there, guessed, before = torch.zeros(6), torch.zeros(6), torch.zeros(6)
        grown = PenaltyHistory(params, prompt, 6)
        for earlier in tokens:
            grown.append(earlier)
        grown.penalise(there, params)
        history.after(tokens[at:]).penalise(guessed, params)
        history.penalise(before, params)
        assert there.equal(guessed)

        again = torch.zeros(6)
        history.penalise(again, params)
        assert before.equal(again)
        history.append(token)


def test_a_huge_base_forbids() -> None:
    params = SamplingParams(dry=Dry(1.0, base=1e30, allowed_length=1))
    logits = torch.zeros(3)
    PenaltyHistory(params, [1] * 80, 3).penalise(logits, params)

    assert [0.0, -torch.inf, 0.0] == logits.tolist()


def penalised(params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Logits of 1 after the penalties."""
    logits = torch.ones(8)
    PenaltyHistory(params, prompt, 8).after(output).penalise(logits, params)
    return logits.tolist()


@pytest.mark.parametrize("lookback", [0, 1, 2, 3, 5, 8, 99])
@pytest.mark.parametrize("length", [0, 1, 4, 7])
def test_a_lookback_counts_the_last_tokens_only(lookback: int, length: int) -> None:
    """Repetition counts prompt and output, frequency and presence the output, each within the last tokens."""
    chance = random.Random(length)
    prompt = [chance.randrange(8) for _ in range(5)]
    output = [chance.randrange(8) for _ in range(length)]
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, penalty_lookback=lookback
    )
    recent = list(enumerate([*prompt, *output]))[max(len(prompt) + length - lookback, 0) :]
    counts = [sum(token == each and at >= len(prompt) for at, each in recent) for token in range(8)]
    seen = [any(token == each for _, each in recent) for token in range(8)]

    assert penalised(params, prompt, output) == [
        (0.5 if was_seen else 1.0) - 0.25 * count - 0.5 * (count > 0)
        for was_seen, count in zip(seen, counts, strict=True)
    ]


def test_a_lookback_behind_everything_is_none() -> None:
    some = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5)
    prompt, output = (1, 2, 3, 2), (4, 2, 4)

    assert penalised(some, prompt, output) == penalised(replace(some, penalty_lookback=100), prompt, output)
