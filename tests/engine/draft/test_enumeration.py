"""What is said where drafts stand, by exact enumeration: every text is as likely as the model alone makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product, takewhile

import pytest
import torch
from torch import Tensor

from engine.sample.sampler import SamplingContext, sample_tokens
from engine.sample.verify import VerifyTokens, verify
from tests.engine.draft.worlds import Rule, Said, World, coupled, enumerated, error, every, fixed


def engine(logits: Tensor, trials: Sequence[VerifyTokens]) -> Said:
    """The rule of the engine."""
    return [[(1.0, sure(tokens))] for tokens in verify(trials, partial(sample_tokens, logits))]


def sure(tokens: Sequence[int | None]) -> list[int]:
    """The tokens, none of which is missing."""
    return [token for token in tokens if token is not None]


def by_trial(logits: Tensor, trials: Sequence[VerifyTokens]) -> Iterator[tuple[VerifyTokens, Tensor]]:
    """Each trial with its rows."""
    return zip(trials, torch.split_with_sizes(logits, [trial.logit_rows for trial in trials]), strict=True)


def renormalised(logits: Tensor, trials: Sequence[VerifyTokens]) -> Said:
    """Right, by coins instead of noise: a draft is kept as often as it is said, else anything but it is said."""
    return [
        by_coins(rows, trial, lambda spread, draft: without(spread, draft) / (1 - spread[draft]))
        for trial, rows in by_trial(logits, trials)
    ]


def uncorrected(logits: Tensor, trials: Sequence[VerifyTokens]) -> Said:
    """Planted: what is said in place of a refused draft may be the draft."""
    return [by_coins(rows, trial, lambda spread, draft: spread) for trial, rows in by_trial(logits, trials)]


def not_renormalised(logits: Tensor, trials: Sequence[VerifyTokens]) -> Said:
    """Planted: what a refused draft leaves does not sum to one, and the last token gets the rest."""

    def rest(spread: Tensor, draft: int) -> Tensor:
        left = without(spread, draft)
        left[-1] += spread[draft]
        return left

    return [by_coins(rows, trial, rest) for trial, rows in by_trial(logits, trials)]


def by_coins(rows: Tensor, trial: VerifyTokens, rest: Callable[[Tensor, int], Tensor]) -> list[tuple[float, list[int]]]:
    """Drafts are kept with their probability; the rest says what is said in place of the first that is not."""
    said, reached = [], 1.0
    spreads = rows.softmax(-1)
    for at, draft in enumerate(trial.drafts):
        refused = reached * (1 - float(spreads[at, draft]))
        kept = list(trial.drafts[:at])
        said += [(refused * chance, [*kept, token]) for token, chance in enumerate(rest(spreads[at], draft).tolist())]
        reached -= refused
    return said + [(reached * chance, [*trial.drafts, token]) for token, chance in enumerate(spreads[-1].tolist())]


def without(spread: Tensor, token: int) -> Tensor:
    """Probabilities of the other tokens."""
    return spread.index_fill(0, torch.tensor(token), 0.0)


def trusting(logits: Tensor, trials: Sequence[VerifyTokens]) -> Said:
    """Planted: drafts are always kept."""
    return [
        [(1.0, [*trial.drafts, tokens[-1]])]
        for trial, tokens in drawn(logits, trials, lambda trial: trial.context.after_each(trial.drafts))
    ]


def deaf(logits: Tensor, trials: Sequence[VerifyTokens]) -> Said:
    """Planted: what was drawn behind wrong drafts is said too."""
    return [
        [(1.0, tokens)] for _, tokens in drawn(logits, trials, lambda trial: trial.context.after_each(trial.drafts))
    ]


def repeating(logits: Tensor, trials: Sequence[VerifyTokens]) -> Said:
    """Planted: the rows behind drafts are drawn with the noise of the first."""
    repeated = drawn(logits, trials, lambda trial: [trial.context] * trial.logit_rows)
    return [[(1.0, agreeing(trial, tokens))] for trial, tokens in repeated]


def drawn(
    logits: Tensor, trials: Sequence[VerifyTokens], draws: Callable[[VerifyTokens], list[SamplingContext]]
) -> Iterator[tuple[VerifyTokens, list[int]]]:
    """Each trial with a token for each of its rows."""
    tokens = iter(sure(sample_tokens(logits, [draw for trial in trials for draw in draws(trial)])))
    return ((trial, list(islice(tokens, trial.logit_rows))) for trial in trials)


def agreeing(trial: VerifyTokens, tokens: list[int]) -> list[int]:
    """The tokens up to the first that is not the draft at its place."""
    right = takewhile(lambda at: trial.drafts[at] == tokens[at], range(len(trial.drafts)))
    return tokens[: len(list(right)) + 1]


SIZES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)]
SLOW = [pytest.param(size, marks=pytest.mark.slow) for size in [(3, 3), (4, 2)]]


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world of so many tokens and drafts, whose noise is all that there is."""
    world = World.random(*request.param)
    monkeypatch.setattr(
        "engine.sample.sampler.gumbel", lambda seeds, places, tokens: world.noise[seeds, places, tokens]
    )
    return world


@pytest.mark.parametrize("world", SIZES, indirect=True)
def test_the_noise_is_all_there_is(world: World) -> None:
    """Its probabilities sum to one, and without drafts each text is as likely as the model makes it."""
    assert pytest.approx(1.0, abs=1e-12) == sum(world.weights)
    assert error(world, enumerated(world, engine, fixed(()))) < 1e-12


@pytest.mark.parametrize("world", [*SIZES, *SLOW], indirect=True)
def test_no_draft_changes_what_texts_are_likely(world: World) -> None:
    """Whatever the drafts are, fixed or drawn with the same noise."""
    assert worst(world, engine) < 1e-12
    assert error(world, enumerated(world, engine, coupled(world))) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("world", [(4, 3)], indirect=True)
@pytest.mark.parametrize("first", range(4))
def test_no_draft_changes_what_texts_are_likely_in_the_largest_world(world: World, first: int) -> None:
    """The same for a quarter of all drafts."""
    for drafts in product((first,), range(4), range(4)):
        assert error(world, enumerated(world, engine, fixed(drafts))) < 1e-12


@pytest.mark.parametrize("world", [(2, 2), (3, 2)], indirect=True)
def test_a_rule_by_coins_passes_too(world: World) -> None:
    """The judge knows nothing of the engine's noise: what is right by other means is found right."""
    assert worst(world.silent, renormalised) < 1e-12


@pytest.mark.parametrize("world", [(2, 2), (3, 2)], indirect=True)
@pytest.mark.parametrize("rule", [trusting, deaf, repeating])
def test_wrong_rules_are_caught(world: World, rule: Rule) -> None:
    """Each makes the probability of some text wrong by a hundredth at least."""
    assert max(worst(world, rule), error(world, enumerated(world, rule, coupled(world)))) > 0.01


@pytest.mark.parametrize("world", [(2, 2), (3, 2)], indirect=True)
@pytest.mark.parametrize("rule", [uncorrected, not_renormalised])
def test_wrong_rules_by_coins_are_caught(world: World, rule: Rule) -> None:
    """So do these."""
    assert worst(world.silent, rule) > 0.01


def worst(world: World, rule: Rule) -> float:
    """The error with the drafts for which it is largest."""
    return max(error(world, enumerated(world, rule, drafter)) for drafter in every(world))
