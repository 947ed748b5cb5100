"""A model with noise that can be enumerated: the exact probability of each text under a sampling rule.

Noise matters only by the tokens that win. The model has two rows of logits for each position, selected by the previous
token, so noise falls into classes by the winners of both rows, with probabilities in closed form (`classes`). A rule
runs on one noise of each class, for all positions together; its outcomes are weighted by the product of the
probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod, sqrt
from typing import TypeAlias

import torch
from torch import Tensor

from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext, sample_tokens
from engine.sample.verify import VerifyTokens
from engine.types.request import SamplingParams

WARM = SamplingParams()
Text: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class EnumeratedModel:
    """A model of short texts, and all classes of noise.

    logits   [positions, 2, vocabulary]: the parity of the previous token selects the row
    noise    [noises, positions, vocabulary]: one of each class, for all positions together
    weights  probability of each noise
    """

    logits: Tensor
    noise: Tensor
    weights: list[float]

    @classmethod
    def random(cls, vocabulary: int, drafts: int) -> EnumeratedModel:
        """A random model of texts with one token more than `drafts`."""
        logits = 1.5 * torch.randn(drafts + 1, 2, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
        # No token precedes the first one, so its two rows are equal.
        logits = torch.cat((logits[:1, :1].expand(1, 2, -1), logits[1:])).double()
        mixed = list(product(*(classes(first.exp(), second.exp()) for first, second in logits)))
        noise = torch.stack([torch.stack([noise for _, noise in places]) for places in mixed])
        return cls(logits, noise, [prod(chance for chance, _ in places) for places in mixed])

    @property
    def without_noise(self) -> EnumeratedModel:
        """The same with a single noise, for rules that use none."""
        return EnumeratedModel(self.logits, self.noise[:1], [1.0])

    @property
    def length(self) -> int:
        """Tokens of a text."""
        return len(self.logits)

    def row(self, text: Text) -> Tensor:
        """The logits after a text."""
        return self.logits[len(text), sum(text[-1:]) % 2]

    def other(self, text: Text) -> Tensor:
        """The row that the text does not select."""
        return self.logits[len(text), 1 - sum(text[-1:]) % 2]

    def draw(self, seed: int, text: Text) -> SamplingContext:
        """How the token after a text is sampled, with noise number `seed`."""
        return SamplingContext(WARM, seed, len(text), PenaltyHistory(WARM, (), self.logits.shape[-1]))

    def probability(self, text: Text) -> float:
        """The probability of a text by the model alone."""
        return prod(float(self.row(text[:at]).softmax(-1)[token]) for at, token in enumerate(text))


def classes(first: Tensor, second: Tensor) -> list[tuple[float, Tensor]]:
    """The probability of each pair of winners of two rows with the weights `first` and `second`, and a noise for it.

    With E = exp(-noise), which is exponential, the winner of a row with weights w has the least E / w. One token wins
    both with the probability 1 / sum of max(first / first[a], second / second[a]). For
    two tokens, `a` in the first row and `b` in the second, it is an integral over x = E[b] / E[a] with piecewise linear
    terms of the other tokens.
    """
    found = []
    tokens = range(len(first))
    for a, b in product(tokens, tokens):
        ratios, others = first / first[a], second / second[b]
        least, most = (float(ratios[b]), float(1 / others[a])) if a != b else (1.0, 1.0)
        if a != b and least >= most:
            continue
        middle = sqrt(least * most)
        losing = torch.maximum(ratios, middle * others)
        losing[[a, b]] = 0.0
        waits = 2 * losing
        waits[a], waits[b] = 1.0, middle
        chance = float(1 / torch.maximum(ratios, others).sum()) if a == b else _integral(ratios, others, a, b)
        found.append((chance, -waits.log()))
    return found


def _integral(ratios: Tensor, others: Tensor, a: int, b: int) -> float:
    """Of dx / (1 + x + sum over the losing tokens of max(ratios, others x))^2, where `a` and `b` win."""
    least, most = float(ratios[b]), float(1 / others[a])
    losing = [(float(ratios[t]), float(others[t])) for t in range(len(ratios)) if t not in (a, b)]
    bends = sorted(flat / steep for flat, steep in losing if least < flat / steep < most)
    whole = 0.0
    for low, high in pairwise([least, *bends, most]):
        rising = [flat < steep * (low + high) / 2 for flat, steep in losing]
        start = 1 + sum(flat for (flat, _), rises in zip(losing, rising, strict=True) if not rises)
        slope = 1 + sum(steep for (_, steep), rises in zip(losing, rising, strict=True) if rises)
        whole += (1 / (start + slope * low) - 1 / (start + slope * high)) / slope
    return whole


# For each sequence the possible outputs of the rule, with their probabilities given the noise.
Outcomes: TypeAlias = list[list[tuple[float, list[int]]]]
Rule: TypeAlias = Callable[[Tensor, Sequence[VerifyTokens]], Outcomes]
# The draft after a text, by the number of the noise.
Drafter: TypeAlias = Callable[[int, Text], Text]


def enumerated(model: EnumeratedModel, rule: Rule, drafter: Drafter) -> dict[Text, float]:
    """The probability of each text, with drafts in every step."""
    found: dict[Text, float] = {}
    going: list[tuple[float, int, Text]] = [(weight, seed, ()) for seed, weight in enumerate(model.weights)]
    while going:
        sequences = [
            VerifyTokens(drafter(seed, text), model.draw(seed, text), lambda token: False) for _, seed, text in going
        ]
        rows = [
            model.row(text + sequence.drafts[:count])
            for (_, _, text), sequence in zip(going, sequences, strict=True)
            for count in range(sequence.logit_rows)
        ]
        steps, going = list(zip(going, rule(torch.stack(rows), sequences), strict=True)), []
        for (weight, seed, text), outcomes in steps:
            for chance, tokens in outcomes:
                longer = (*text, *tokens)
                if len(longer) < model.length:
                    going.append((weight * chance, seed, longer))
                else:
                    found[longer] = found.get(longer, 0.0) + weight * chance
    return found


def error(model: EnumeratedModel, found: dict[Text, float]) -> float:
    """The largest error of a text's probability."""
    texts = product(range(model.logits.shape[-1]), repeat=model.length)
    return max(abs(found.get(text, 0.0) - model.probability(text)) for text in texts)


def fixed(drafts: Text) -> Drafter:
    """Drafts by position, for any text before."""
    return lambda seed, text: drafts[len(text) :]


def coupled(model: EnumeratedModel) -> Drafter:
    """Drafts from the rows that the text does not select, with the noise of the emitted tokens."""

    def draft(seed: int, text: Text) -> Text:
        drafts: Text = ()
        while len(text) + len(drafts) + 1 < model.length:
            (token,) = sample_tokens(model.other(text + drafts)[None], [model.draw(seed, text + drafts)])
            assert token is not None, "all logits are finite"
            drafts += (token,)
        return drafts

    return draft


def every(model: EnumeratedModel) -> list[Drafter]:
    """All drafts."""
    return [fixed(drafts) for drafts in product(range(model.logits.shape[-1]), repeat=model.length - 1)]
