"""The native choice of tokens is the engine's own rule, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.sample.constraints import Constraints
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext, sample_tokens
from engine.types.request import Request, SamplingParams
from kvcache.spec import Span
from tests.engine.native.decoders import native, token
from tests.engine.native.test_draft_loop import GREEDY, WARM, Talk, draw, runner_of
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
    # What only the rule itself knows.
    SamplingParams(temperature=1.0, typical_p=0.5),
    SamplingParams(temperature=0.0, logit_bias=((3, 100.0),)),
    # What is changed before it is drawn from.
    SamplingParams(temperature=0.7, top_p=0.9, logit_bias=((3, 2.5), (4, -1.0))),
    SamplingParams(temperature=1.0, top_k=50, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, allowed_tokens=(1, 2, 700, 5002)),
    SamplingParams(temperature=0.9, min_p=0.05, top_p=0.99, allowed_tokens=tuple(range(0, 5003, 3))),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, allowed_tokens=tuple(range(5000))),
)


def draws(*params: SamplingParams) -> list[SamplingContext]:
    """One for each row, of seeds and positions of its own."""
    return [
        SamplingContext(
            own, 2**63 + 7 * row, 100 + row, PenaltyHistory(own, range(0, VOCABULARY, 7), VOCABULARY), rules(own)
        )
        for row, own in zip(range(ROWS), ROWS * params, strict=False)
    ]


def rules(params: SamplingParams) -> Constraints | None:
    """What the parameters forbid."""
    return Constraints.for_request(
        Request("r", (1,), sampling=params), (1,), vocabulary=VOCABULARY, end_tokens=(0,), matcher=None
    )


def rows(spread: float) -> Tensor:
    """Logits that differ so much; many are equal, and the token of the highest is not the first."""
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(5))
    return (8 * spread * logits).round() / 8


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("params", PARAMS)
def test_it_says_what_the_rule_says(params: SamplingParams, spread: float) -> None:
    """Logits of any spread, with equal ones among them; they stay as they are."""
    logits, drawn = rows(spread), draws(params)
    before = logits.clone()

    assert sample_tokens(logits, drawn) == runner_of(native("llama")).sampler.sample(logits, drawn)
    assert torch.equal(before, logits)


def test_a_row_is_drawn_alike_whatever_is_beside_it() -> None:
    """Rows that the native choice knows beside rows that it does not, in any number."""
    runner, logits, drawn = runner_of(native("llama")), rows(3.0), draws(*PARAMS[2:])
    together = runner.sampler.sample(logits, drawn)

    assert together == [runner.sampler.sample(logits[row : row + 1], [drawn[row]])[0] for row in range(ROWS)]
    assert together == runner.sampler.sample(logits.flip(0), drawn[::-1])[::-1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_breaks_alone(value: float) -> None:
    """It says nothing, wherever the number stands; a forbidden token is no harm."""
    logits = rows(1.0)
    logits[1, 0] = logits[2, 77] = logits[4, VOCABULARY - 1] = value
    logits[3] = -torch.inf
    logits[0, ::2] = -torch.inf
    said = runner_of(native("llama")).sampler.sample(logits, draws(PARAMS[0], PARAMS[2]))

    assert said == sample_tokens(logits, draws(PARAMS[0], PARAMS[2]))
    assert [row for row, token in enumerate(said) if token is None] == [1, 2, 3, 4]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("params", [(GREEDY, WARM), (WARM, PARAMS[-1])])
def test_what_a_step_tells_is_chosen_from_its_logits(family: str, params: tuple[SamplingParams, ...]) -> None:
    """The same tokens, whether the logits are shown or not, where they are capped and where rules of the text hold."""
    runner = runner_of(native(family))
    told, shown = Talk(runner), Talk(runner)
    for rows in (9, 1, 4):
        standing = told.cache.cached_length(0)
        spans = [Span(slot, standing, rows) for slot in range(3)]
        tokens = [token(span.slot, at) for span in spans for at in range(span.start, span.stop)]
        wanted = [rows - 1, 2 * rows - 1, 3 * rows - 1]
        drawn = [draw(params[slot % 2], slot, standing + rows) for slot in range(3)]
        with shown.cache.forward(spans) as forward:
            expected = runner.sampler.sample(runner.run(forward, tokens, wanted), drawn)
        with told.cache.forward(spans) as forward:
            said = runner.run_and_sample(forward, tokens, wanted, [None] * 3, drawn)

        assert expected == said
        assert None not in said
