"""Speculative decoding by exact enumeration of the noise: every text has the probability that the model gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product, takewhile

import pytest
import torch
from torch import Tensor

from engine.sample.sampler import SamplingContext, sample_tokens
from engine.sample.verify import VerifyTokens, contexts_of, verify
from tests.engine.draft.enumerated_model import (
    EnumeratedModel,
    Outcomes,
    Rule,
    coupled,
    enumerated,
    error,
    every,
    fixed,
)


def engine(logits: Tensor, sequences: Sequence[VerifyTokens]) -> Outcomes:
    """The sampling rule of the engine."""
    return [[(1.0, sure(tokens))] for tokens in verify(sequences, sample_tokens(logits, contexts_of(sequences)))]


def sure(tokens: Sequence[int | None]) -> list[int]:
    """The tokens, none of which is missing."""
    return [token for token in tokens if token is not None]


def rows_by_sequence(logits: Tensor, sequences: Sequence[VerifyTokens]) -> Iterator[tuple[VerifyTokens, Tensor]]:
    """Each sequence with its rows."""
    return zip(sequences, torch.split_with_sizes(logits, [sequence.logit_rows for sequence in sequences]), strict=True)


def renormalised(logits: Tensor, sequences: Sequence[VerifyTokens]) -> Outcomes:
    """Correct, without noise: a draft token is accepted with its probability, or else replaced by another token."""
    return [
        by_coins(rows, sequence, lambda spread, draft: without(spread, draft) / (1 - spread[draft]))
        for sequence, rows in rows_by_sequence(logits, sequences)
    ]


def uncorrected(logits: Tensor, sequences: Sequence[VerifyTokens]) -> Outcomes:
    """A planted error: a rejected draft token may be sampled again in its own place."""
    return [
        by_coins(rows, sequence, lambda spread, draft: spread) for sequence, rows in rows_by_sequence(logits, sequences)
    ]


def not_renormalised(logits: Tensor, sequences: Sequence[VerifyTokens]) -> Outcomes:
    """A planted error: the last token gets the probability of a rejected draft token."""

    def residual(spread: Tensor, draft: int) -> Tensor:
        left = without(spread, draft)
        left[-1] += spread[draft]
        return left

    return [by_coins(rows, sequence, residual) for sequence, rows in rows_by_sequence(logits, sequences)]


def by_coins(
    rows: Tensor, sequence: VerifyTokens, residual: Callable[[Tensor, int], Tensor]
) -> list[tuple[float, list[int]]]:
    """Accepts draft tokens with their probability; the first rejected one is replaced by a token of `residual`."""
    outcomes, reached = [], 1.0
    spreads = rows.softmax(-1)
    for at, draft in enumerate(sequence.drafts):
        refused = reached * (1 - float(spreads[at, draft]))
        kept = list(sequence.drafts[:at])
        replaced = residual(spreads[at], draft).tolist()
        outcomes += [(refused * chance, [*kept, token]) for token, chance in enumerate(replaced)]
        reached -= refused
    return outcomes + [
        (reached * chance, [*sequence.drafts, token]) for token, chance in enumerate(spreads[-1].tolist())
    ]


def without(spread: Tensor, token: int) -> Tensor:
    """Probabilities of the other tokens."""
    return spread.index_fill(0, torch.tensor(token), 0.0)


def trusting(logits: Tensor, sequences: Sequence[VerifyTokens]) -> Outcomes:
    """A planted error: drafts are always accepted."""
    return [
        [(1.0, [*sequence.drafts, tokens[-1]])]
        for sequence, tokens in drawn(logits, sequences, lambda sequence: sequence.context.after_each(sequence.drafts))
    ]


def keeps_rejected(logits: Tensor, sequences: Sequence[VerifyTokens]) -> Outcomes:
    """A planted error: tokens sampled after rejected draft tokens are emitted."""
    return [
        [(1.0, tokens)]
        for _, tokens in drawn(logits, sequences, lambda sequence: sequence.context.after_each(sequence.drafts))
    ]


def repeating(logits: Tensor, sequences: Sequence[VerifyTokens]) -> Outcomes:
    """A planted error: all rows are sampled with the noise of the first."""
    repeated = drawn(logits, sequences, lambda sequence: [sequence.context] * sequence.logit_rows)
    return [[(1.0, agreeing(sequence, tokens))] for sequence, tokens in repeated]


def drawn(
    logits: Tensor, sequences: Sequence[VerifyTokens], draws: Callable[[VerifyTokens], list[SamplingContext]]
) -> Iterator[tuple[VerifyTokens, list[int]]]:
    """Each sequence with a token for each of its rows."""
    tokens = iter(sure(sample_tokens(logits, [draw for sequence in sequences for draw in draws(sequence)])))
    return ((sequence, list(islice(tokens, sequence.logit_rows))) for sequence in sequences)


def agreeing(sequence: VerifyTokens, tokens: list[int]) -> list[int]:
    """The tokens up to the first that differs from its draft token."""
    right = takewhile(lambda at: sequence.drafts[at] == tokens[at], range(len(sequence.drafts)))
    return tokens[: len(list(right)) + 1]


SIZES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)]
SLOW = [pytest.param(size, marks=pytest.mark.slow) for size in [(3, 3), (4, 2)]]


@pytest.fixture
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EnumeratedModel:
    """A model with the given sizes of vocabulary and draft; the engine samples with its noise."""
    model = EnumeratedModel.random(*request.param)
    monkeypatch.setattr(
        "engine.sample.sampler.gumbel", lambda seeds, places, tokens: model.noise[seeds, places, tokens]
    )
    return model


@pytest.mark.parametrize("model", SIZES, indirect=True)
def test_the_enumerated_noise_is_complete(model: EnumeratedModel) -> None:
    """Its probabilities sum to one, and without drafts each text has its probability."""
    assert pytest.approx(1.0, abs=1e-12) == sum(model.weights)
    assert error(model, enumerated(model, engine, fixed(()))) < 1e-12


@pytest.mark.parametrize("model", [*SIZES, *SLOW], indirect=True)
def test_no_draft_changes_the_distribution_of_texts(model: EnumeratedModel) -> None:
    """With any fixed drafts, and with drafts sampled with the same noise."""
    assert worst(model, engine) < 1e-12
    assert error(model, enumerated(model, engine, coupled(model))) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("model", [(4, 3)], indirect=True)
@pytest.mark.parametrize("first", range(4))
def test_no_draft_changes_the_distribution_in_the_largest_model(model: EnumeratedModel, first: int) -> None:
    """The same for a quarter of all drafts."""
    for drafts in product((first,), range(4), range(4)):
        assert error(model, enumerated(model, engine, fixed(drafts))) < 1e-12


@pytest.mark.parametrize("model", [(2, 2), (3, 2)], indirect=True)
def test_a_rule_by_coins_passes_too(model: EnumeratedModel) -> None:
    """The check does not depend on the engine's noise."""
    assert worst(model.without_noise, renormalised) < 1e-12


@pytest.mark.parametrize("model", [(2, 2), (3, 2)], indirect=True)
@pytest.mark.parametrize("rule", [trusting, keeps_rejected, repeating])
def test_wrong_rules_are_found(model: EnumeratedModel, rule: Rule) -> None:
    """Each changes the probability of some text by at least a hundredth."""
    assert max(worst(model, rule), error(model, enumerated(model, rule, coupled(model)))) > 0.01


@pytest.mark.parametrize("model", [(2, 2), (3, 2)], indirect=True)
@pytest.mark.parametrize("rule", [uncorrected, not_renormalised])
def test_wrong_rules_by_coins_are_found(model: EnumeratedModel, rule: Rule) -> None:
    assert worst(model.without_noise, rule) > 0.01


def worst(model: EnumeratedModel, rule: Rule) -> float:
    """The largest error over all drafts."""
    return max(error(model, enumerated(model, rule, drafter)) for drafter in every(model))
