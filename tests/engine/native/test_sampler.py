"""The native sampler equals `sample_tokens`, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.sample.constraints import Constraints
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext, sample_tokens
from engine.step.input import Sampling, StepInput
from engine.types.request import Request, SamplingParams
from kvcache.spec import Span
from tests.engine.native.decoders import native, token
from tests.engine.native.test_draft_loop import GREEDY, WARM, Session, context, runner_of
from tests.libraries import built

built("step")

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, VOCABULARY = 6, 5003
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.999, top_k=700),
    SamplingParams(temperature=1.5, top_k=40),
    SamplingParams(temperature=2.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=0.0),
    # Not native.
    SamplingParams(temperature=1.0, typical_p=0.5),
    SamplingParams(temperature=0.0, logit_bias=((3, 100.0),)),
    # Native filters on modified logits.
    SamplingParams(temperature=0.7, top_p=0.9, logit_bias=((3, 2.5), (4, -1.0))),
    SamplingParams(temperature=1.0, top_k=50, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, allowed_tokens=(1, 2, 700, 5002)),
    SamplingParams(temperature=0.9, min_p=0.05, top_p=0.99, allowed_tokens=tuple(range(0, 5003, 3))),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, allowed_tokens=tuple(range(5000))),
)


def contexts(*params: SamplingParams) -> list[SamplingContext]:
    """A sampling context for each row, with its own seed and position."""
    return [
        SamplingContext(
            own, 2**63 + 7 * row, 100 + row, PenaltyHistory(own, range(0, VOCABULARY, 7), VOCABULARY), constraints(own)
        )
        for row, own in zip(range(ROWS), ROWS * params, strict=False)
    ]


def constraints(params: SamplingParams) -> Constraints | None:
    """The constraints of the parameters."""
    return Constraints.for_request(
        Request("r", (1,), sampling=params), (1,), vocabulary=VOCABULARY, end_tokens=(0,), matcher=None
    )


def rows(spread: float) -> Tensor:
    """Logits with a given spread and many equal ones."""
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(5))
    return (8 * spread * logits).round() / 8


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("params", PARAMS)
def test_native_sampler_equals_sample_tokens(params: SamplingParams, spread: float) -> None:
    """The logits are not modified."""
    logits, own_contexts = rows(spread), contexts(params)
    before = logits.clone()

    assert sample_tokens(logits, own_contexts) == runner_of(native("llama")).sampler.sample(logits, own_contexts)
    assert torch.equal(before, logits)


def test_token_of_a_row_does_not_depend_on_the_batch() -> None:
    """Native contexts beside others."""
    runner, logits, own_contexts = runner_of(native("llama")), rows(3.0), contexts(*PARAMS[2:])
    together = runner.sampler.sample(logits, own_contexts)

    assert together == [runner.sampler.sample(logits[row : row + 1], [own_contexts[row]])[0] for row in range(ROWS)]
    assert together == runner.sampler.sample(logits.flip(0), own_contexts[::-1])[::-1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_row_affects_itself_only(value: float) -> None:
    """Minus infinity is no error."""
    logits = rows(1.0)
    logits[1, 0] = logits[2, 77] = logits[4, VOCABULARY - 1] = value
    logits[3] = -torch.inf
    logits[0, ::2] = -torch.inf
    tokens_of_rows = runner_of(native("llama")).sampler.sample(logits, contexts(PARAMS[0], PARAMS[2]))

    assert tokens_of_rows == sample_tokens(logits, contexts(PARAMS[0], PARAMS[2]))
    assert [row for row, token in enumerate(tokens_of_rows) if token is None] == [1, 2, 3, 4]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("params", [(GREEDY, WARM), (WARM, PARAMS[-1])])
def test_run_and_sample_equals_run_then_sample(family: str, params: tuple[SamplingParams, ...]) -> None:
    """With softcaps and constraints."""
    runner = runner_of(native(family))
    sampled, from_logits = Session(runner), Session(runner)
    for rows in (9, 1, 4):
        start = sampled.cache.cached_length(0)
        spans = [Span(slot, start, rows) for slot in range(3)]
        tokens = [token(span.slot, at) for span in spans for at in range(span.start, span.stop)]
        logit_rows = [rows - 1, 2 * rows - 1, 3 * rows - 1]
        own_contexts = [context(params[slot % 2], slot, start + rows) for slot in range(3)]
        with from_logits.cache.forward(spans) as forward:
            expected = runner.sampler.sample(runner.run(StepInput(forward, tokens, logit_rows)).logits, own_contexts)
        with sampled.cache.forward(spans) as forward:
            tokens_of_rows = runner.run(StepInput(forward, tokens, logit_rows, sampling=Sampling(own_contexts))).tokens

        assert expected == tokens_of_rows
        assert None not in tokens_of_rows
