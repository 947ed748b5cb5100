"""The sampling rule against transformers' logits processors, row by row and by distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext, sample_tokens
from engine.types.request import SamplingParams
from tests.selection import quick

VOCABULARY = 24
DRAWS = 6_000
GREEDY = SamplingParams(temperature=0.0)


def context(
    params: SamplingParams,
    *,
    seed: int = 0,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    vocabulary: int = VOCABULARY,
) -> SamplingContext:
    """A sampling context behind a prompt and an output."""
    history = PenaltyHistory(params, prompt, vocabulary)
    for token in output:
        history.append(token)
    return SamplingContext(params, seed, position, history)


def random_logits(seed: int, rows: int = 1, vocabulary: int = VOCABULARY, spread: float = 2.0) -> Tensor:
    """Rows of random logits."""
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def sampled(row: Tensor, params: SamplingParams, count: int, **history: Sequence[int]) -> Tensor:
    """How often each token is sampled over many positions."""
    tokens = []
    for start in range(0, count, 2000):
        contexts = [context(params, seed=9, position=start + at, vocabulary=len(row), **history) for at in range(2000)]
        tokens += sample_tokens(row.expand(2000, -1), contexts)
    return torch.bincount(torch.tensor(tokens), minlength=len(row))


def processed(row: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Probabilities by transformers' processors, with OpenAI's formula for frequency and presence penalty."""
    shaped = row.double().clone()
    for token, bias in params.logit_bias:
        shaped[token] += bias
    seen = torch.tensor([[*prompt, *output]], dtype=torch.long)
    if params.repetition_penalty != 1.0:
        shaped = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, shaped[None])[0]
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=len(row))
    shaped = shaped - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(seen, shaped[None])[0].softmax(-1)


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.95, temperature=1.5),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=12, top_p=0.8, min_p=0.03),
    SamplingParams(top_k=3, top_p=0.99, temperature=0.7),
    SamplingParams(logit_bias=((3, 4.0), (7, -100.0))),
    SamplingParams(frequency_penalty=0.7, presence_penalty=0.4),
    SamplingParams(frequency_penalty=-0.7, presence_penalty=-0.4),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.8, top_p=0.9),
    SamplingParams(
        temperature=0.9,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=((1, 2.0),),
    ),
]


@pytest.mark.parametrize("params", quick(CASES[::2], CASES), ids=str)
def test_sampled_tokens_follow_the_filtered_distribution(params: SamplingParams) -> None:
    prompt, output = (1, 2, 3, 1), (4, 5, 4, 4, 2)
    row = random_logits(3)[0]
    expected = processed(row, params, prompt, output) * DRAWS
    counts = sampled(row, params, DRAWS, prompt=prompt, output=output)
    rare = expected < 5
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    found = torch.cat((counts[~rare], counts[rare].sum()[None]))

    assert not counts[processed(row, params, prompt, output) == 0].any()
    assert chi_square_is_chance(found, expected)


def chi_square_is_chance(found: Tensor, expected: Tensor) -> bool:
    """Whether a chi-square statistic is below six standard deviations (Wilson and Hilferty)."""
    used = expected > 1e-9
    freedom = int(used.sum()) - 1
    if freedom == 0:
        return True
    statistic = float(((found[used] - expected[used]) ** 2 / expected[used]).sum())
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return z < 6


def test_a_wrong_distribution_is_detected() -> None:
    """Power of the chi-square test: a temperature that is off by a third fails it."""
    counts = sampled(random_logits(3)[0], SamplingParams(), DRAWS)
    wrong = processed(random_logits(3)[0], SamplingParams(temperature=1.3), (), ()) * DRAWS

    assert not chi_square_is_chance(counts, wrong)


def test_gumbel_sampling_follows_the_softmax() -> None:
    row = random_logits(5, vocabulary=8)[0]

    assert chi_square_is_chance(sampled(row, SamplingParams(), 50_000), row.double().softmax(-1) * 50_000)


@pytest.mark.parametrize("params", quick(CASES[1::2], CASES), ids=str)
def test_the_filters_agree_with_transformers(params: SamplingParams) -> None:
    prompt, output = (1, 2, 3, 1), (4, 5, 4, 4, 2)
    for at in range(100):
        row = random_logits(at, spread=(0.1, 1.0, 4.0, 30.0)[at % 4])[0]
        (token,) = sample_tokens(row[None], [context(params, seed=at, prompt=prompt, output=output)])

        assert processed(row, params, prompt, output)[token] > 0


def mixed_contexts(rows: int) -> list[SamplingContext]:
    """Sampling contexts with different parameters, one for each row."""
    kinds = [GREEDY, *CASES]
    return [
        context(kinds[at % len(kinds)], seed=at * 7919 - 50, position=at, prompt=(at % VOCABULARY,), output=(1, 1, 2))
        for at in range(rows)
    ]


def test_a_batch_equals_its_rows_one_by_one() -> None:
    logits, contexts = random_logits(1, rows=300), mixed_contexts(300)
    alone = [sample_tokens(logits[at : at + 1], [contexts[at]])[0] for at in range(300)]
    reversed_rows = sample_tokens(logits.flip(0), contexts[::-1])

    assert alone == sample_tokens(logits, contexts)
    assert alone == reversed_rows[::-1]


def test_sampling_keeps_the_input_logits() -> None:
    logits = random_logits(1, rows=60)
    sample_tokens(logits, mixed_contexts(60))

    assert random_logits(1, rows=60).equal(logits)


def test_zero_temperature_is_greedy() -> None:
    logits = random_logits(2, rows=50)

    assert logits.argmax(-1).tolist() == sample_tokens(logits, [context(GREEDY, seed=at) for at in range(50)])


def test_a_falling_temperature_becomes_greedy() -> None:
    logits = random_logits(2, rows=50)
    for temperature in (1e-3, 1e-5, 1e-12, 1e-45, 5e-324):
        drawn = sample_tokens(logits, [context(SamplingParams(temperature=temperature), seed=at) for at in range(50)])

        assert logits.argmax(-1).tolist() == drawn


def test_greedy_ties_go_to_the_lowest_id() -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, [5, 9, 20]] = 1.0

    assert [5] == sample_tokens(row, [context(GREEDY)])
    assert [5] == sample_tokens(row.to(torch.bfloat16), [context(GREEDY)])


def test_ties_at_a_filter_threshold_are_kept_together() -> None:
    row = torch.full((VOCABULARY,), -5.0)
    row[[5, 9, 20]] = 1.0
    row[0] = 2.0

    assert [0, 5, 9, 20] == sampled(row, SamplingParams(top_k=2), 4000).nonzero()[:, 0].tolist()


def test_filters_that_are_off_change_nothing() -> None:
    logits = random_logits(4, rows=200)
    plain = sample_tokens(logits, [context(SamplingParams(), seed=at) for at in range(200)])
    for off in (SamplingParams(top_k=VOCABULARY), SamplingParams(top_k=10**9), SamplingParams(top_p=1.0, min_p=0.0)):
        assert plain == sample_tokens(logits, [context(off, seed=at) for at in range(200)])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=3, top_p=0.5)], ids=str)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: SamplingParams) -> None:
    logits = random_logits(6, rows=5)
    contexts = [context(params, seed=at) for at in range(5)]
    expected = sample_tokens(logits, contexts)
    logits[2, 7] = bad

    assert [*expected[:2], None, *expected[3:]] == sample_tokens(logits, contexts)


def test_a_row_without_allowed_token_has_no_sample() -> None:
    assert [None] == sample_tokens(torch.full((1, VOCABULARY), -math.inf), [context(SamplingParams())])


def test_a_row_with_forbidden_tokens_is_sampled() -> None:
    row = torch.full((VOCABULARY,), -math.inf)
    row[[3, 4]] = 0.0

    assert [3, 4] == sampled(row, SamplingParams(top_p=0.99), 4000).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_huge_and_tiny_logits_are_sampled(dtype: torch.dtype) -> None:
    row = torch.zeros(1, VOCABULARY, dtype=dtype)
    row[0, 3], row[0, 4] = torch.finfo(dtype).max / 4, -torch.finfo(dtype).max / 4

    assert [3] == sample_tokens(row, [context(SamplingParams(top_k=4, top_p=0.9, min_p=0.1))])


def test_a_vocabulary_of_one_token_is_sampled() -> None:
    assert [0] == sample_tokens(torch.zeros(1, 1), [context(SamplingParams(top_k=5, top_p=0.1), vocabulary=1)])


def test_bias_can_force_and_forbid() -> None:
    row = random_logits(8)[0]
    forced = sampled(row, SamplingParams(logit_bias=((11, 100.0),)), 4000)
    banned = sampled(row, SamplingParams(logit_bias=((int(row.argmax()), -100.0),)), 4000)

    assert 4000 == int(forced[11])
    assert 0 == int(banned[int(row.argmax())])


def test_repeated_biases_add_up() -> None:
    row = torch.zeros(1, VOCABULARY)

    assert [6] == sample_tokens(
        row, [context(SamplingParams(temperature=0.0, logit_bias=((6, 1.0), (5, 1.5), (6, 1.0))))]
    )


def test_penalties_count_the_output_and_repetition_the_prompt_too() -> None:
    row = torch.full((1, VOCABULARY), -10.0)
    row[0, 1], row[0, 2] = 5.0, 4.5
    in_prompt = {"prompt": (1,), "output": ()}
    in_output = {"prompt": (), "output": (1, 1)}

    assert [1] == sample_tokens(row, [context(SamplingParams(temperature=0.0, presence_penalty=2.0), **in_prompt)])
    assert [2] == sample_tokens(row, [context(SamplingParams(temperature=0.0, repetition_penalty=2.0), **in_prompt)])
    assert [1] == sample_tokens(row, [context(SamplingParams(temperature=0.0, presence_penalty=0.4), **in_output)])
    assert [2] == sample_tokens(row, [context(SamplingParams(temperature=0.0, frequency_penalty=0.4), **in_output)])
