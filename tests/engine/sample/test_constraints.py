"""Constraints, and their independence of drafts and batch neighbours."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.sample.constraints import Constraints
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext, sample_tokens
from engine.sample.verify import VerifyTokens, contexts_of, verify
from engine.types.request import Dry, ReasoningLimit, Request, SamplingParams, Xtc

SIZE = 12
ENDS = frozenset({10, 11})
PROMPT = (1, 2, 3)
REASONING = ReasoningLimit(start_token=4, end_tokens=(5, 6, 5, 7), budget=6)
REQUESTS = [
    Request("", PROMPT, SamplingParams(seed=1, allowed_tokens=(0, 2, 5, 7))),
    Request("", PROMPT, SamplingParams(seed=2, bad_words=((3,), (1, 2), (3, 8), (2, 2, 2))), min_tokens=9),
    Request("", PROMPT, SamplingParams(seed=3), reasoning_limit=REASONING, stop_token_ids=(9,)),
    Request("", PROMPT, SamplingParams(seed=4, temperature=1.5, xtc=Xtc(0.5, 0.05), typical_p=0.9, top_n_sigma=2.0)),
    Request("", PROMPT, SamplingParams(seed=5, dry=Dry(2.0, allowed_length=1), presence_penalty=0.3)),
    Request("", PROMPT, SamplingParams(temperature=0.0, dry=Dry(2.0), bad_words=((5, 6),)), reasoning_limit=REASONING),
    Request("", PROMPT, SamplingParams(seed=6)),
]


def constraints(request: Request) -> Constraints | None:
    """The constraints of a request before its first token."""
    return Constraints.for_request(request, request.prompt, vocabulary=SIZE, end_tokens=ENDS, matcher=None)


def context(request: Request, emitted: Sequence[int] = ()) -> SamplingContext:
    """The sampling context behind `said`, with every token appended."""
    history, own = PenaltyHistory(request.sampling, request.prompt, SIZE), constraints(request)
    for token in emitted:
        history.append(token)
        if own is not None:
            own.append(token)
    return SamplingContext(
        request.sampling, request.sampling.seed or 0, len(request.prompt) + len(emitted), history, own
    )


def row(emitted: Sequence[int]) -> Tensor:
    """Logits as a function of the text."""
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(hash(tuple(emitted)) % 2**31)) * 2


def generated(request: Request, count: int) -> list[int]:
    """The tokens of a request without drafts."""
    emitted: list[int] = []
    for _ in range(count):
        (token,) = sample_tokens(row(emitted)[None], [context(request, emitted)])
        assert token is not None
        emitted.append(token)
    return emitted


def allowed_next(request: Request, emitted: Sequence[int]) -> set[int]:
    """The allowed tokens."""
    own = context(request, emitted).constraints
    assert own is not None
    logits = own.masked(torch.zeros(SIZE))
    return set((logits == 0).nonzero()[:, 0].tolist())


ALL = set(range(SIZE))


def test_only_allowed_tokens_are_sampled() -> None:
    assert {0, 2, 5, 7} == allowed_next(REQUESTS[0], ()) == allowed_next(REQUESTS[0], (5, 5))


def test_bad_words_are_never_completed() -> None:
    request = Request("", (9, 1), SamplingParams(bad_words=((3,), (1, 2), (2, 2, 2))))

    assert ALL - {3, 2} == allowed_next(request, ())
    assert ALL - {3} == allowed_next(request, (2,)) == allowed_next(request, (0,))
    assert ALL - {3, 2} == allowed_next(request, (2, 2)) == allowed_next(request, (0, 2, 2))


def test_no_end_token_before_min_tokens() -> None:
    request = Request("", PROMPT, stop_token_ids=(9,), min_tokens=2)

    assert ALL - {9, 10, 11} == allowed_next(request, ()) == allowed_next(request, (0,))
    assert ALL == allowed_next(request, (0, 0))


def test_reasoning_ends_when_its_budget_is_spent() -> None:
    request = Request("", PROMPT, reasoning_limit=ReasoningLimit(start_token=4, end_tokens=(5, 6, 5, 7), budget=2))

    assert ALL == allowed_next(request, (0, 1, 2, 3)) == allowed_next(request, (0, 4, 0))
    assert {5} == allowed_next(request, (0, 4, 0, 1))
    assert {6} == allowed_next(request, (0, 4, 0, 1, 5)) == allowed_next(request, (4, 1, 5))
    assert {7} == allowed_next(request, (4, 0, 1, 5, 6, 5))
    assert ALL == allowed_next(request, (4, 0, 1, 5, 6, 5, 7)) == allowed_next(request, (4, 5, 6, 5, 7, 3))
    assert {5} == allowed_next(request, (4, 5, 6, 5, 7, 3, 4))


def test_reasoning_begun_by_the_prompt_is_limited() -> None:
    request = Request("", PROMPT, reasoning_limit=ReasoningLimit(start_token=None, end_tokens=(5,), budget=1))
    at_once = Request("", PROMPT, reasoning_limit=ReasoningLimit(start_token=None, end_tokens=(5,), budget=0))

    assert ALL == allowed_next(request, ()) == allowed_next(request, (5,)) == allowed_next(request, (1, 5, 4, 4, 4))
    assert {5} == allowed_next(request, (1,)) == allowed_next(at_once, ())


def test_constraints_without_an_allowed_token_report_why() -> None:
    own = constraints(Request("", PROMPT, SamplingParams(allowed_tokens=(3,), bad_words=((3, 3),))))
    assert own is not None

    assert [None] == sample_tokens(
        torch.zeros(1, SIZE), [SamplingContext(SamplingParams(), 0, 3, context(REQUESTS[6]).history, own)]
    )
    assert "leave no token" in (own.deadlock_reason(SIZE) or "")
    own.append(3)
    assert own.deadlock_reason(SIZE) is not None
    assert constraints(REQUESTS[6]) is None


@pytest.mark.parametrize("seed", range(4))
def test_drafts_never_change_constrained_text(seed: int) -> None:
    chance = random.Random(seed)
    whole = [generated(request, 30) for request in REQUESTS]
    texts: list[list[int]] = [[] for _ in REQUESTS]
    while min(map(len, texts)) < 24:
        trials, rows = [], []
        for request, text, right in zip(REQUESTS, texts, whole, strict=True):
            draft = right[len(text) : len(text) + chance.randint(0, 5)]
            if draft and chance.random() < 0.5:
                draft[chance.randrange(len(draft))] = chance.randrange(SIZE)
            trials.append(VerifyTokens(tuple(draft), context(request, text), lambda token: False))
            rows += [row([*text, *draft[:count]]) for count in range(len(draft) + 1)]
        sampled = sample_tokens(torch.stack(rows), contexts_of(trials))
        for text, emitted in zip(texts, verify(trials, sampled), strict=True):
            text += [token for token in emitted if token is not None]

    assert [right[:24] for right in whole] == [text[:24] for text in texts]


def test_a_batch_equals_its_rows_one_by_one() -> None:
    contexts = [context(request, generated(request, count)) for request in REQUESTS for count in (0, 5, 11)]
    logits = torch.randn(len(contexts), SIZE, generator=torch.Generator().manual_seed(0))
    alone = [sample_tokens(logits[at : at + 1], [one])[0] for at, one in enumerate(contexts)]

    assert alone == sample_tokens(logits, contexts)
    assert alone == sample_tokens(logits.flip(0), contexts[::-1])[::-1]
