"""The rules that keep the distribution: exactly, by enumeration; as they draw, by chi-square; wrong ones are caught."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.draft import lossless
from engine.draft.lossless import BlockRule, Drafts, Rule, TokenRule, leftover, propose, verify
from engine.noise import gumbel, uniform

RULES = [TokenRule(), BlockRule()]
by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


@dataclass(frozen=True)
class Streams:
    """Where drafts and verdicts take their numbers from."""

    propose: Callable[[Tensor, Tensor, Tensor, int], Tensor] = propose
    verify: Callable[[Rule, Drafts, Tensor, Tensor], tuple[Tensor, Tensor]] = verify


SOUND = Streams()


@dataclass(frozen=True)
class Pair:
    """Two models of a text of `k` + 1 tokens: probabilities behind each prefix, indexed by the prefix's tokens."""

    target: list[Tensor]
    guess: list[Tensor]

    @property
    def vocabulary(self) -> int:
        """Tokens to choose from."""
        return self.target[0].shape[-1]

    @property
    def k(self) -> int:
        """Tokens of a draft."""
        return len(self.guess)

    def drafts(self, tokens: Tensor) -> Drafts:
        """What both models say along drafts [n, k]."""
        paths = [tokens[:, :length].unbind(-1) for length in range(self.k + 1)]
        target = [_rows(self.target[length], path, len(tokens)) for length, path in enumerate(paths)]
        guess = [_rows(self.guess[length], path, len(tokens)) for length, path in enumerate(paths[:-1])]
        return Drafts(torch.stack(target, 1), torch.stack(guess, 1), tokens)

    def joint(self) -> Tensor:
        """The target's probability of each text of k + 1 tokens."""
        whole = self.target[0]
        for row in self.target[1:]:
            whole = whole[..., None] * row
        return whole


def pair(seed: int, vocabulary: int, k: int, *, drift: float = 1.0) -> Pair:
    """Two random models, the second one a disturbed copy of the first; some tokens are impossible for either."""
    chance = torch.Generator().manual_seed(seed)
    target, guess = [], []
    for length in range(k + 1):
        shape = (1,) * (length == 0) + (vocabulary,) * (length + 1)
        logits = torch.randn(shape, generator=chance, dtype=torch.float64) * 1.5
        other = logits + drift * torch.randn(shape, generator=chance, dtype=torch.float64)
        target.append(_forbid(logits, chance).softmax(-1))
        guess.append(_forbid(other, chance).softmax(-1))
    return Pair([target[0][0], *target[1:]], [guess[0][0], *guess[1:]][:k])


def _forbid(logits: Tensor, chance: torch.Generator) -> Tensor:
    """Filters leave holes: now and then a token goes, never the likeliest."""
    gone = torch.rand(logits.shape, generator=chance) < 0.15
    gone &= logits < logits.amax(-1, keepdim=True)
    return logits.masked_fill(gone, -math.inf)


def lookup(models: Pair, said: tuple[int, ...]) -> Pair:
    """The same target, and a guess that always says the same."""
    guess = [torch.zeros_like(row) for row in models.guess]
    for row, token in zip(guess, said, strict=True):
        row[..., token] = 1.0
    return Pair(models.target, guess)


def enumerated(rule: Rule, models: Pair) -> tuple[Tensor, float]:
    """Exact probabilities of each text of k + 1 tokens, and of drafts kept the expected number.

    Every draft, every combination of passing and failing, every token behind it; what is missing is the target's.
    """
    k, words = models.k, range(models.vocabulary)
    tokens = torch.tensor(list(itertools.product(words, repeat=k)))
    drafts = models.drafts(tokens)
    drawn = drafts.guess.gather(-1, tokens[..., None])[..., 0].prod(-1)
    chances = rule.chances(drafts)
    found, length = torch.zeros_like(models.joint()), 0.0
    for passes in itertools.product((False, True), repeat=k):
        passed = torch.tensor(passes).expand_as(tokens)
        weight = drawn * torch.where(passed, chances, 1 - chances).prod(-1)
        kept = rule.kept(passed)
        following = leftover(rule, drafts, kept)
        length += float((weight * kept).sum())
        for draft, number, share, row in zip(tokens.tolist(), kept.tolist(), weight.tolist(), following, strict=True):
            spread = share * row
            for deeper in range(number + 1, k + 1):
                spread = spread[..., None] * models.target[deeper][tuple(draft[:number])]
            found[tuple(draft[:number])] += spread
    return found, length


def error(rule: Rule, models: Pair) -> float:
    """How far the enumerated distribution is from the target's."""
    return float((enumerated(rule, models)[0] - models.joint()).abs().max())


SIZES = [(2, 1), (2, 3), (3, 2), (3, 3), (4, 2), (4, 3)]


@by_rule
@pytest.mark.parametrize(("vocabulary", "k"), SIZES)
def test_the_text_is_distributed_as_the_targets(rule: Rule, vocabulary: int, k: int) -> None:
    """By enumeration of everything that can happen: the joint probability of k + 1 tokens is the target's."""
    for seed in range(4):
        assert error(rule, pair(seed, vocabulary, k)) < 1e-12
        assert error(rule, pair(seed, vocabulary, k, drift=4.0)) < 1e-12


@by_rule
def test_a_looked_up_draft_keeps_the_distribution(rule: Rule) -> None:
    """A guess that is certain of its token, right or wrong, leaves the target's distribution too."""
    for said in itertools.product(range(3), repeat=3):
        assert error(rule, lookup(pair(5, 3, 3), said)) < 1e-12


@by_rule
def test_equal_models_keep_everything(rule: Rule) -> None:
    """A guess that is the target is always right, though there is nothing left to draw from where it is refused."""
    models = pair(1, 3, 3)
    same = Pair(models.target, models.target[:3])
    found, length = enumerated(rule, same)

    assert float((found - same.joint()).abs().max()) < 1e-12
    assert pytest.approx(3.0) == length


@by_rule
def test_models_that_share_nothing_keep_nothing(rule: Rule) -> None:
    """Where the target finds every draft impossible, none stays, and the text is the target's."""
    target = [torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([[0.5, 0.5]] * 2, dtype=torch.float64)]
    models = Pair(target, [torch.tensor([0.0, 1.0], dtype=torch.float64)])

    assert error(rule, models) < 1e-12
    assert 0.0 == enumerated(rule, models)[1]


def test_the_expected_lengths_are_those_of_theory() -> None:
    """By token: sums of products of min(target, guess). By block: of guess x P_i, more; for lookups as much."""
    gains = []
    for seed in range(6):
        models = pair(seed, 3, 3, drift=1.5)
        lengths = [enumerated(rule, models)[1] for rule in RULES]
        gains.append(lengths[1] - lengths[0])

        assert pytest.approx(_expected(models, lambda share, ratio: share * min(1.0, ratio))) == lengths[0]
        assert pytest.approx(_expected(models, lambda share, ratio: min(1.0, share * ratio))) == lengths[1]
        looked_up = lookup(models, (0, 1, 2))
        assert pytest.approx(enumerated(RULES[0], looked_up)[1]) == enumerated(RULES[1], looked_up)[1]

    assert min(gains) >= 0
    assert max(gains) > 0.05


def _expected(models: Pair, grow: Callable[[float, float], float]) -> float:
    """Sum over all drafts of any length of the chance that they are drawn and kept, token by token."""

    def walk(prefix: tuple[int, ...], drawn: float, share: float) -> float:
        if len(prefix) == models.k:
            return 0.0
        total = 0.0
        for token in range(models.vocabulary):
            guess = float(models.guess[len(prefix)][prefix][token])
            if guess > 0:
                ratio = float(models.target[len(prefix)][prefix][token]) / guess
                kept = grow(share, ratio)
                total += drawn * guess * kept + walk((*prefix, token), drawn * guess, kept)
        return total

    return walk((), 1.0, 1.0)


def test_the_streams_share_no_number() -> None:
    """What decides, what follows and each token of a draft have numbers of their own, and `emit` has others."""
    seeds, starts, tokens = torch.full((50,), 3), torch.full((50,), 9), torch.arange(50)
    lanes = [uniform(seeds, starts, tokens, lane).tolist() for lane in range(lossless._DRAFT + 4)]

    assert 50 * len(lanes) == len({number for lane in lanes for number in lane})
    assert (-torch.log(-torch.log(torch.tensor(lanes[0], dtype=torch.float64)))).equal(gumbel(seeds, starts, tokens))


class EarlyBreak(BlockRule):
    """Planted: stops at the first draft that fails, as a token rule may."""

    def kept(self, passed: Tensor) -> Tensor:
        """Wrong for a block."""
        return TokenRule().kept(passed)


class FullWeight(BlockRule):
    """Planted: draws what follows as the token rule does."""

    def weights(self, drafts: Drafts) -> Tensor:
        """Wrong for a block."""
        return TokenRule().weights(drafts)


class NoLeftover(TokenRule):
    """Planted: draws from the target where a draft was refused."""

    def weights(self, drafts: Drafts) -> Tensor:
        """So heavy that the guess vanishes."""
        return torch.full_like(drafts.shares, 1e9)


@pytest.mark.parametrize("mutant", [EarlyBreak(), FullWeight(), NoLeftover()], ids=lambda rule: type(rule).__name__)
def test_wrong_rules_are_caught_by_enumeration(mutant: Rule) -> None:
    """Each mistake that peers made moves a probability by far more than a rounding."""
    assert max(error(mutant, pair(seed, 3, 3)) for seed in range(4)) > 1e-3


def _rows(table: Tensor, path: tuple[Tensor, ...], count: int) -> Tensor:
    """What a model says behind `count` texts [count, vocabulary]."""
    return table[path] if path else table.expand(count, -1)


def drawn(rule: Rule, models: Pair, seeds: Tensor, streams: Streams = SOUND) -> Tensor:
    """How often each text of k + 1 tokens is said, a text a seed: in rounds, each going on where the last one ended."""
    texts = torch.zeros(len(seeds), models.k + 1, dtype=torch.long)
    filled = torch.zeros_like(seeds)
    for start in range(models.k):
        rows = (filled == start).nonzero()[:, 0]
        texts[rows], kept = _round(rule, models, texts[rows], start, seeds[rows], streams)
        filled[rows] += kept + 1
    rows = (filled == models.k).nonzero()[:, 0]
    last = _rows(models.target[-1], texts[rows, : models.k].unbind(-1), len(rows))
    texts[rows, models.k] = propose(last, seeds[rows], torch.full_like(rows, models.k), 0)
    index = sum(texts[:, at] * models.vocabulary ** (models.k - at) for at in range(models.k + 1))
    return torch.bincount(index, minlength=models.vocabulary ** (models.k + 1))


def _round(
    rule: Rule, models: Pair, texts: Tensor, start: int, seeds: Tensor, streams: Streams
) -> tuple[Tensor, Tensor]:
    """Texts of `start` tokens with one round more written into them, and how many drafts were kept."""
    starts, texts = torch.full_like(seeds, start), texts.clone()
    target, guess = [], []
    for at in range(start, models.k):
        path = texts[:, :at].unbind(-1)
        target.append(_rows(models.target[at], path, len(seeds)))
        guess.append(_rows(models.guess[at], path, len(seeds)))
        texts[:, at] = streams.propose(guess[-1], seeds, starts, at - start)
    target.append(_rows(models.target[-1], texts[:, : models.k].unbind(-1), len(seeds)))
    drafts = Drafts(torch.stack(target, 1), torch.stack(guess, 1), texts[:, start : models.k].clone())
    kept, token = streams.verify(rule, drafts, seeds, starts)
    texts[torch.arange(len(seeds)), start + kept] = token
    return texts, kept


def z_score(found: Tensor, probabilities: Tensor) -> float:
    """A chi-square statistic in standard deviations from its mean (Wilson and Hilferty)."""
    count, used = int(found.sum()), probabilities > 0
    expected = probabilities[used] * count
    freedom = int(used.sum()) - 1
    statistic = float(((found[used] - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


SEEDS = torch.arange(50_000)


@by_rule
def test_what_is_drawn_is_distributed_as_the_targets(rule: Rule) -> None:
    """Over many seeds and several rounds: a chi-square that chance explains, and nothing impossible."""
    for seed in (0, 1, 2):
        models = pair(seed, 3, 3)
        found = drawn(rule, models, SEEDS)

        assert not found[models.joint().flatten() == 0].any()
        assert z_score(found, models.joint().flatten()) < 5


@pytest.mark.slow
@by_rule
def test_a_million_texts_are_distributed_as_the_targets(rule: Rule) -> None:
    """What twenty times as many seeds would show."""
    models = pair(0, 3, 3)
    found = sum(drawn(rule, models, SEEDS + start) for start in range(0, 1_000_000, len(SEEDS)))

    assert isinstance(found, Tensor)
    assert z_score(found, models.joint().flatten()) < 5


def _shared_verify(rule: Rule, drafts: Drafts, seeds: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Planted (vLLM 54282): what follows a refused draft is drawn with the noise that drew the draft."""
    kept, _ = verify(rule, drafts, seeds, starts)
    tokens = torch.zeros_like(kept)
    for number in range(drafts.target.shape[1]):
        at = kept == number
        tokens[at] = propose(leftover(rule, drafts, kept)[at], seeds[at], starts[at], number)
    return kept, tokens


def _coins_of_drafts(rule: Rule, drafts: Drafts, seeds: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Planted: what decides over a draft is the uniform behind the noise of its own token."""
    numbers = torch.arange(drafts.tokens.shape[-1]).expand(drafts.tokens.shape)
    coins = torch.stack(
        [
            uniform(seeds, starts, drafts.tokens[:, number].contiguous(), lossless._DRAFT + number)
            for number in range(numbers.shape[-1])
        ],
        -1,
    )
    kept = rule.kept(coins <= rule.chances(drafts))
    return kept, lossless._draw(leftover(rule, drafts, kept), seeds, starts, lossless._LEFTOVER)


def _by_position(guess: Tensor, seeds: Tensor, starts: Tensor, number: int) -> Tensor:
    """Planted: a draft's noise hangs on its position alone, so a refused draft's noise comes again."""
    return propose(guess, seeds, starts + number, 0)


PLANTED = [
    (TokenRule(), Streams(verify=_shared_verify)),
    (BlockRule(), Streams(verify=_shared_verify)),
    (TokenRule(), Streams(verify=_coins_of_drafts)),
    (BlockRule(), Streams(propose=_by_position)),
    (EarlyBreak(), SOUND),
    (FullWeight(), SOUND),
    (NoLeftover(), SOUND),
]


@pytest.mark.parametrize(("rule", "streams"), PLANTED)
def test_wrong_samplers_are_caught_by_chi_square(rule: Rule, streams: Streams) -> None:
    """At 50,000 seeds each mistake is far outside of chance, noise that is used twice among them."""
    worst = 0.0
    for seed in (0, 1, 2):
        models = pair(seed, 3, 3)
        worst = max(worst, z_score(drawn(rule, models, SEEDS, streams), models.joint().flatten()))

    assert worst > 8
