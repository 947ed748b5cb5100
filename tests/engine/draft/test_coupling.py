"""Drafts sampled with the noise of the target: tokens follow the target's distribution, drafts are often accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext, sample_tokens
from engine.sample.verify import VerifyTokens, contexts_of, verify
from engine.types.request import SamplingParams
from tests.selection import quick

WARM = SamplingParams()
VOCABULARY = 50


def draws(seeds: range, position: int = 7, params: SamplingParams = WARM) -> list[SamplingContext]:
    """The same position of one text for each seed."""
    history = PenaltyHistory(params, (), VOCABULARY)
    return [SamplingContext(params, seed, position, history) for seed in seeds]


def tokens(row: Tensor, seeds: range, position: int = 7) -> Tensor:
    """The tokens sampled from one row, one for each seed."""
    return torch.tensor(sample_tokens(row.expand(len(seeds), -1), draws(seeds, position)))


def pairs(sharpness: float, drift: float, count: int) -> list[tuple[Tensor, Tensor]]:
    """Logits of a target and of a drafter that differs by a drift."""
    chance = torch.Generator().manual_seed(11)
    target = torch.randn(count, VOCABULARY, generator=chance) * sharpness
    return list(zip(target, target + torch.randn(count, VOCABULARY, generator=chance) * drift, strict=True))


def overlap(target: Tensor, draft: Tensor) -> float:
    """The largest possible acceptance rate: 1 - total variation."""
    return float(torch.minimum(target.double().softmax(-1), draft.double().softmax(-1)).sum())


@pytest.mark.parametrize("count", [30_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_tokens_over_seeds_follow_the_softmax(count: int) -> None:
    """For consecutive seeds: a chi-square statistic within chance, for several rows."""
    for number, (long, _) in enumerate(pairs(1.5, 0.0, 2)):
        row = long[:12]
        found = torch.zeros(len(row), dtype=torch.long)
        for start in range(0, count, 10_000):
            found += torch.bincount(tokens(row, range(start, start + 10_000), number), minlength=len(row))

        assert z_score(found, row.double().softmax(-1)) < 5


def test_neighbouring_positions_are_independent() -> None:
    """Two tokens of one seed follow the product of their distributions."""
    (row, _) = pairs(1.0, 0.0, 1)[0]
    row = row[:4]
    first, second = (tokens(row, range(40_000), position) for position in (7, 8))
    spread = row.double().softmax(-1)

    assert z_score(torch.bincount(first * 4 + second, minlength=16), torch.outer(spread, spread).flatten()) < 5


# From logits [2, 3, 3] of target and drafter, by position and previous token: two tokens for each draw [draws, 2].
SamplePair = Callable[[Tensor, Tensor, Sequence[SamplingContext]], Tensor]


def verified_pair(target: Tensor, draft_logits: Tensor, draws: Sequence[SamplingContext]) -> Tensor:
    """As the engine: the first token is drafted with the noise of its draw, then verified."""
    drafts = drawn(draft_logits[0, :1].expand(len(draws), -1), draws)
    rows = torch.stack((target[0, 0].expand(len(draws), -1), target[1, drafts]), 1).flatten(0, 1)
    verifications = [
        VerifyTokens((draft,), draw, lambda token: False) for draft, draw in zip(drafts.tolist(), draws, strict=True)
    ]
    sampled = verify(verifications, sample_tokens(rows, contexts_of(verifications)))
    first = torch.tensor([tokens[0] for tokens in sampled])
    second = drawn(target[1, first], later(draws, first))
    drafted = [number for number, tokens in enumerate(sampled) if len(tokens) == 2]
    second[drafted] = torch.tensor([sampled[number][1] for number in drafted])
    return torch.stack((first, second), -1)


def keeps_likely_drafts(target: Tensor, draft_logits: Tensor, draws: Sequence[SamplingContext]) -> Tensor:
    """A planted error: a draft token that is likely by the target is accepted regardless of the noise."""
    drafts = drawn(draft_logits[0, :1].expand(len(draws), -1), draws)
    first = drawn(target[0, :1].expand(len(draws), -1), draws)
    first = torch.where(target[0, 0].softmax(-1)[drafts] > 0.2, drafts, first)
    return torch.stack((first, drawn(target[1, first], later(draws, first))), -1)


def draws_anew(target: Tensor, draft_logits: Tensor, draws: Sequence[SamplingContext]) -> Tensor:
    """A planted error: new noise selects the token in place of a rejected draft token."""
    drafts = drawn(draft_logits[0, :1].expand(len(draws), -1), draws)
    first = drawn(target[0, :1].expand(len(draws), -1), draws)
    again = drawn(target[0, :1].expand(len(draws), -1), [replace(draw, seed=draw.seed + 10**6) for draw in draws])
    first = torch.where(first == drafts, first, again)
    return torch.stack((first, drawn(target[1, first], later(draws, first))), -1)


def uses_noise_twice(target: Tensor, draft_logits: Tensor, draws: Sequence[SamplingContext]) -> Tensor:
    """A planted error: the token after the draft is sampled with the noise of the draft."""
    first = drawn(target[0, :1].expand(len(draws), -1), draws)
    return torch.stack((first, drawn(target[1, first], draws)), -1)


def drawn(rows: Tensor, draws: Sequence[SamplingContext]) -> Tensor:
    """One token for each row."""
    return torch.tensor(sample_tokens(rows, draws))


def later(draws: Sequence[SamplingContext], tokens: Tensor) -> list[SamplingContext]:
    """The draws after one more token each."""
    return [draw.after([token]) for draw, token in zip(draws, tokens.tolist(), strict=True)]


def joint(sample_pair: SamplePair, count: int) -> float:
    """Deviation of the pairs of `count` seeds from the product of probabilities, in standard deviations."""
    chance = torch.Generator().manual_seed(3)
    target = torch.randn(2, 3, 3, generator=chance)
    draft_logits = target + torch.randn(2, 3, 3, generator=chance)
    found = torch.zeros(9, dtype=torch.long)
    for start in range(0, count, 10_000):
        first, second = sample_pair(target, draft_logits, draws(range(start, start + 10_000))).unbind(-1)
        found += torch.bincount(3 * first + second, minlength=9)
    spread = target.double().softmax(-1)
    return z_score(found, (spread[0, 0][:, None] * spread[1]).flatten())


@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_drafted_texts_are_distributed_as_the_targets(count: int) -> None:
    """With any drafter two tokens have the target's joint distribution over seeds."""
    assert joint(verified_pair, count) < 5


@pytest.mark.parametrize("sample_pair", [keeps_likely_drafts, draws_anew, uses_noise_twice])
def test_wrong_samplers_are_found(sample_pair: SamplePair) -> None:
    """Each is far outside of chance with the same number of seeds."""
    assert joint(sample_pair, 10_000) > 8


def z_score(found: Tensor, probabilities: Tensor) -> float:
    """A chi-square statistic in standard deviations from its mean (Wilson and Hilferty)."""
    count, used = int(found.sum()), probabilities > 0
    expected = probabilities[used] * count
    freedom = int(used.sum()) - 1
    statistic = float(((found[used] - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


# Sharpness, drift, the largest possible acceptance rate, and the one with shared noise, from an earlier measurement.
TABLE = [(2.5, 1.0, 0.674, 0.623), (5.0, 1.0, 0.751, 0.727), (5.0, 2.0, 0.559, 0.530), (10.0, 2.0, 0.717, 0.707)]


@pytest.mark.slow
@pytest.mark.parametrize(("sharpness", "drift", "best", "shared"), quick(TABLE[1:3], TABLE))
def test_the_acceptance_rate_of_drafts_with_shared_noise(
    sharpness: float, drift: float, best: float, shared: float
) -> None:
    """The acceptance rate is the measured share of the largest possible one.

    The random models of that measurement are unknown; the largest rate depends on them, the share hardly does.
    """
    models = pairs(sharpness, drift, 400)
    target, draft_logits = (torch.stack(side).repeat_interleave(25, 0) for side in zip(*models, strict=True))
    seeds = draws(range(len(target)))
    right = torch.tensor(sample_tokens(target, seeds)) == torch.tensor(sample_tokens(draft_logits, seeds))
    apart = torch.tensor(sample_tokens(target, seeds)) == torch.tensor(
        sample_tokens(draft_logits, draws(range(10**6, 10**6 + len(draft_logits))))
    )
    limit = sum(overlap(*pair) for pair in models) / len(models)

    assert pytest.approx(best, abs=0.07) == limit
    assert pytest.approx(shared / best, abs=0.02) == float(right.double().mean()) / limit
    assert float(apart.double().mean()) < float(right.double().mean()) - 0.02


def test_the_acceptance_rate_has_its_lower_bound_for_every_pair() -> None:
    """P(right) is at least (1 - TV) / (1 + TV) (Daliri et al., arXiv 2408.07978), but for the error of 4,000 draws."""
    seeds = draws(range(4_000))
    for target, draft_logits in pairs(2.5, 1.5, 8):
        found = [torch.tensor(sample_tokens(row.expand(4_000, -1), seeds)) for row in (target, draft_logits)]
        shared = overlap(target, draft_logits)

        assert float((found[0] == found[1]).double().mean()) > shared / (2 - shared) - 0.03
