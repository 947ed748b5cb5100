"""Sampling filters against their definitions in llama.cpp, token by token on small vocabularies."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from engine.sample.filters import filter_mask
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext, sample_tokens
from engine.types.request import SamplingParams, Xtc

HEADS, TAILS = 0.0, 1.0


def shares(logits: dict[int, float]) -> dict[int, float]:
    """Probabilities of the remaining tokens."""
    best = max(logits.values())
    weights = {token: math.exp(value - best) for token, value in logits.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def first(ranked: list[int], probability: dict[int, float], share: float) -> set[int]:
    """The first ranked tokens with a share of the mass."""
    total, taken = 0.0, set()
    for token in ranked:
        taken.add(token)
        total += probability[token]
        if total >= share:
            break
    return taken


def filtered(row: list[float], params: SamplingParams, coin: float) -> set[int]:
    """The tokens that pass one filter after the other, each by its definition."""
    left = {token: value for token, value in enumerate(row) if value > -math.inf}
    if params.top_n_sigma:
        mean = sum(left.values()) / len(left)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in left.values()) / len(left))
        floor = max(left.values()) - params.top_n_sigma * deviation
        left = {token: value for token, value in left.items() if value >= floor}
    if params.top_k:
        left = dict(sorted(left.items(), key=lambda item: -item[1])[: params.top_k])
    if params.typical_p < 1:
        probability = shares(left)
        entropy = -sum(p * math.log(p) for p in probability.values())
        ranked = sorted(left, key=lambda token: abs(-math.log(probability[token]) - entropy))
        left = {token: left[token] for token in first(ranked, probability, params.typical_p)}
    if params.top_p < 1:
        probability = shares(left)
        left = {token: left[token] for token in first(sorted(left, key=lambda t: -left[t]), probability, params.top_p)}
    if params.min_p:
        floor = max(left.values()) + math.log(params.min_p)
        left = {token: value for token, value in left.items() if value >= floor}
    if params.xtc is not None and coin < params.xtc.probability:
        probability = shares(left)
        top = [token for token in sorted(left, key=lambda t: -left[t]) if probability[token] >= params.xtc.threshold]
        left = {token: value for token, value in left.items() if token not in top[:-1]}
    return set(left)


ALONE = [
    *(SamplingParams(typical_p=share) for share in (0.05, 0.3, 0.7, 0.95)),
    *(SamplingParams(top_n_sigma=count) for count in (0.3, 1.0, 2.0)),
    *(SamplingParams(xtc=Xtc(1.0, threshold)) for threshold in (0.0, 0.05, 0.1, 0.3, 0.6)),
]
TOGETHER = [
    SamplingParams(top_n_sigma=sigma, top_k=k, typical_p=typical, top_p=p, min_p=least, xtc=xtc)
    for sigma, k, typical, p, least, xtc in itertools.product(
        (0.0, 1.5), (0, 9), (1.0, 0.8), (1.0, 0.85), (0.0, 0.1), (None, Xtc(0.5, 0.12))
    )
]


@pytest.mark.parametrize("coin", [HEADS, TAILS])
def test_filters_match_their_definitions(coin: float) -> None:
    chance = random.Random(7)
    for at, params in enumerate([*ALONE, *TOGETHER] * 6):
        spread = (0.3, 1.0, 3.0)[at % 3]
        row = [chance.gauss(0, spread) if chance.random() < 0.9 else -math.inf for _ in range(24)] + [0.1]
        mask = filter_mask(torch.tensor([row], dtype=torch.float64), [params], [coin])[0]

        assert filtered(row, params, coin) == set(mask.nonzero()[:, 0].tolist()), params


def test_tokens_with_equal_logits_are_kept_together() -> None:
    row = torch.tensor([[2.0, 1.0, 1.0, 1.0, -1.0]])

    assert [[True, True, True, True, False]] == filter_mask(row, [SamplingParams(typical_p=0.7)], [TAILS]).tolist()
    assert [[False, True, True, True, True]] == filter_mask(row, [SamplingParams(xtc=Xtc(1.0, 0.1))], [HEADS]).tolist()


def sampled(row: Tensor, params: SamplingParams, count: int, seed: int = 3) -> list[int | None]:
    """Sampled tokens at many positions."""
    history = PenaltyHistory(params, (), len(row))
    return sample_tokens(
        row.expand(count, -1), [SamplingContext(params, seed, position, history) for position in range(count)]
    )


@pytest.mark.slow
def test_xtc_applies_with_its_probability() -> None:
    row = torch.tensor([5.0, 3.4, -20.0])
    params = SamplingParams(xtc=Xtc(0.3, 0.1))
    tokens = sampled(row, params, 3000)
    plain = sampled(row, SamplingParams(), 3000)
    excluded = [at for at, token in enumerate(tokens) if token != plain[at]]

    assert 0.3 * 0.83 * 3000 == pytest.approx(len(excluded), rel=0.15)
    assert {1} == {tokens[at] for at in excluded}
    assert tokens == sampled(row, params, 3000)
    assert tokens != sampled(row, params, 3000, seed=4)


@pytest.mark.parametrize("params", ALONE[:1] + ALONE[4:5] + ALONE[7:8], ids=str)
def test_no_filter_applies_at_zero_temperature(params: SamplingParams) -> None:
    greedy = SamplingParams(temperature=0.0, typical_p=params.typical_p, top_n_sigma=params.top_n_sigma, xtc=params.xtc)
    row = torch.randn(30, generator=torch.Generator().manual_seed(1))

    assert [int(row.argmax())] * 20 == sampled(row, greedy, 20)
