"""The device sampler: the tokens of the CPU's, one upload and one wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.sample.constraints import Constraints
from engine.sample.device_sampler import DeviceSampler
from engine.sample.logprobs import SAMPLED, LogprobQuery
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import Sampler, SamplingContext, TorchSampler, sample_tokens
from engine.types.events import Logprob, TokenLogprob
from engine.types.request import Dry, ReasoningLimit, Request, SamplingParams, Xtc
from kvcache.staging import StagingBuffer
from tests.fake_device import FAKE, fake_device
from tests.selection import quick

VOCABULARY = 203
FILTERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    "bias": {"logit_bias": ((3, 2.5), (4, -1.0))},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3, "top_p": 0.9},
    "dry": {"dry": Dry(2.0, allowed_length=1)},
    "allowed": {"allowed_tokens": tuple(range(0, VOCABULARY, 3)), "top_k": 12},
    "bad_words": {"bad_words": ((5,), (1, 2), (7, 9))},
}
HOST_FILTERS: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.6},
    "sigma": {"top_n_sigma": 1.0},
    "xtc": {"xtc": Xtc(0.5, 0.05)},
}
TEXT = (7, 9, 1, 2, 7, 9, 1)


def context(params: SamplingParams, row: int) -> SamplingContext:
    """The context of a row behind a text, with its own seed, position and output."""
    request = Request("r", TEXT, params)
    history = PenaltyHistory(params, TEXT, VOCABULARY)
    constraints = Constraints.for_request(request, TEXT, vocabulary=VOCABULARY, end_tokens=(0,), matcher=None)
    for token in (row % VOCABULARY, 1, 2, 7):
        history.append(token)
        if constraints is not None:
            constraints.append(token)
    return SamplingContext(params, 2**63 + 5 * row, 100 + row, history, constraints)


def contexts(rows: int, **params: Any) -> list[SamplingContext]:
    """A context for each row."""
    own = SamplingParams(**{"temperature": 1.0, **params})
    return [context(own, row) for row in range(rows)]


def logits_of(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits with ties, in float32 or rounded to bfloat16."""
    logits = 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))
    return ((8 * logits).round() / 8).to(dtype)


def sampler_on(device: str) -> DeviceSampler:
    """A sampler for logits on a device."""
    return DeviceSampler(StagingBuffer(torch.device(device)))


@pytest.mark.parametrize("rows", quick([1000], [1000, 10_000]))
@pytest.mark.parametrize("name", [*FILTERS, *HOST_FILTERS])
def test_tokens_are_those_of_the_cpu(name: str, rows: int, device: str) -> None:
    """The logits are not modified."""
    rows = rows if name in FILTERS else rows // 10
    logits, own = logits_of(rows), contexts(rows, **(FILTERS | HOST_FILTERS)[name])
    before = logits.clone()

    assert sample_tokens(logits, own) == sampler_on(device).sample(logits.to(device), own)
    assert torch.equal(before, logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_with_different_filters_share_a_batch(dtype: torch.dtype, device: str) -> None:
    params = [SamplingParams(**{"temperature": 1.0, **own}) for own in (FILTERS | HOST_FILTERS).values()]
    own = [context(params[row % len(params)], row) for row in range(8 * len(params))]
    logits = logits_of(len(own), dtype)
    sampler, copied = sampler_on(device), logits.to(device)

    assert sample_tokens(logits, own) == sampler.sample(copied, own)
    assert sample_tokens(logits[3:5], own[3:5]) == sampler.sample(copied[3:5], own[3:5])


@pytest.mark.parametrize("name", ["greedy", "temperature", "all"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_row_affects_itself_only(name: str, value: float, device: str) -> None:
    """Minus infinity is no error."""
    logits, own = logits_of(5), contexts(5, **FILTERS[name])
    logits[1, 0] = logits[4, VOCABULARY - 1] = value
    logits[3] = -torch.inf
    logits[0, ::2] = -torch.inf
    tokens = sampler_on(device).sample(logits.to(device), own)

    assert sample_tokens(logits, own) == tokens
    assert [1, 3, 4] == [row for row, token in enumerate(tokens) if token is None]


def test_spent_reasoning_budget_forces_its_end() -> None:
    params = SamplingParams(temperature=1.0)
    request = Request("r", TEXT, params, reasoning_limit=ReasoningLimit(None, (5, 6), budget=0))
    constraints = Constraints.for_request(request, TEXT, vocabulary=VOCABULARY, end_tokens=(0,), matcher=None)
    own = SamplingContext(params, 1, 2, PenaltyHistory(params, TEXT, VOCABULARY), constraints)

    assert [5] == sampler_on("cpu").sample(logits_of(1), [own])


def described(token: int, logprob: float) -> Logprob:
    """A token without text."""
    return Logprob(token, "", b"", logprob)


def reported(
    sampler: Sampler, logits: Tensor, own: list[SamplingContext]
) -> tuple[list[int | None], list[TokenLogprob | None]]:
    """Tokens of the rows from 2 on, and log-probabilities of each row but one: with top tokens, labels or neither."""
    rows = list(range(2, len(logits)))
    queries = [LogprobQuery(row, 7 if row < 2 else SAMPLED, 5 * (row % 3), (1, 9)[: row % 4]) for row in range(9)]
    report = sampler.report(logits, rows, queries)
    tokens = report.sample(own)
    asked = [
        replace(query, token=7 if query.row < 2 else token)
        for query in queries
        if (token := tokens[max(query.row - 2, 0)]) is not None
    ]
    return tokens, list(report.token_logprobs(asked, described))


@pytest.mark.parametrize("name", ["greedy", "all", "penalties", "typical_p"])
def test_log_probabilities_are_those_of_the_cpu(name: str) -> None:
    """Ties are ordered by token; a row without finite maximum has none."""
    logits, own = logits_of(10), contexts(8, **(FILTERS | HOST_FILTERS)[name])
    logits[1, 3] = logits[4, 5] = torch.nan
    on_device = reported(sampler_on("cpu"), logits, own)

    assert reported(TorchSampler(), logits, own) == on_device
    assert on_device[1][1] is None
    assert on_device[0][2] is None


def test_log_probabilities_are_read_with_the_tokens() -> None:
    """Sampling and log-probabilities of a step take one upload and one wait."""
    logits, own = logits_of(10), contexts(8, **FILTERS["all"])
    with fake_device() as device, torch.inference_mode():
        sampler, copied = sampler_on(FAKE), logits.to(FAKE)
        device.clear()
        found = reported(sampler, copied, own)

    assert reported(TorchSampler(), logits, own) == found
    assert (1, 1) == (len(device.uploads), len(device.waits))


@pytest.mark.parametrize("name", [*FILTERS, *HOST_FILTERS])
def test_a_device_gets_one_upload_and_is_waited_for_once(name: str) -> None:
    """Rows that are sampled on the host take another wait."""
    logits, own = logits_of(4), contexts(4, **(FILTERS | HOST_FILTERS)[name])
    with fake_device() as recorder, torch.inference_mode():
        sampler, on_device = sampler_on(FAKE), logits.to(FAKE)
        recorder.clear()
        tokens = sampler.sample(on_device, own)

    assert sample_tokens(logits, own) == tokens
    assert len(recorder.uploads) == (name != "greedy")
    assert len(recorder.waits) == (1 if name in FILTERS else 2)
