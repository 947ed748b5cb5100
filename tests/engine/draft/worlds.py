"""Worlds so small that all their noise can be enumerated: how likely each text is, to the last digit.

Noise matters only by the tokens that it lets win. Here a model has two rows of logits for each position, and the token
before says which of them counts, so noise falls into classes by the winners of both rows. The probability of a class is
known in closed form (`classes`). A rule runs on one noise of each class, for all positions together, and what it says
is weighed with their product.
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
class World:
    """A model of texts, and all noise that there is.

    logits   [positions, 2, vocabulary]: the row that counts is that of the last token's parity
    noise    [noises, positions, vocabulary]: one of each class, for all positions together
    weights  of each noise its probability
    """

    logits: Tensor
    noise: Tensor
    weights: list[float]

    @classmethod
    def random(cls, vocabulary: int, drafts: int) -> World:
        """For texts that are as long as a draft and one token more."""
        logits = 1.5 * torch.randn(drafts + 1, 2, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
        # There is nothing before the first token, so its two rows are one.
        logits = torch.cat((logits[:1, :1].expand(1, 2, -1), logits[1:])).double()
        mixed = list(product(*(classes(first.exp(), second.exp()) for first, second in logits)))
        noise = torch.stack([torch.stack([noise for _, noise in places]) for places in mixed])
        return cls(logits, noise, [prod(chance for chance, _ in places) for places in mixed])

    @property
    def silent(self) -> World:
        """The same for rules that do not listen to noise: there is only one."""
        return World(self.logits, self.noise[:1], [1.0])

    @property
    def length(self) -> int:
        """Tokens of a text."""
        return len(self.logits)

    def row(self, text: Text) -> Tensor:
        """The logits behind a text."""
        return self.logits[len(text), sum(text[-1:]) % 2]

    def other(self, text: Text) -> Tensor:
        """The row that does not count."""
        return self.logits[len(text), 1 - sum(text[-1:]) % 2]

    def draw(self, seed: int, text: Text) -> SamplingContext:
        """How the token behind a text is drawn, with the noise of a number."""
        return SamplingContext(WARM, seed, len(text), PenaltyHistory(WARM, (), self.logits.shape[-1]))

    def probability(self, text: Text) -> float:
        """That of a text, by the model alone."""
        return prod(float(self.row(text[:at]).softmax(-1)[token]) for at, token in enumerate(text))


def classes(first: Tensor, second: Tensor) -> list[tuple[float, Tensor]]:
    """The probability of each pair of winners of two rows with these weights, and a noise for which they win.

    With E = exp(-noise), which is exponential, the winner of a row with weights w has the least E / w. One token wins
    both with the probability 1 / sum of max(first / first[a], second / second[a]). That `a` wins the first and `b` the
    second is an integral over x = E[b] / E[a], in which the other tokens' parts are straight lines.
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


# For each trial what the rule says, and what else it may say, with its probability given the noise.
Said: TypeAlias = list[list[tuple[float, list[int]]]]
Rule: TypeAlias = Callable[[Tensor, Sequence[VerifyTokens]], Said]
# What is drafted behind a text, given the noise's number.
Drafter: TypeAlias = Callable[[int, Text], Text]


def enumerated(world: World, rule: Rule, drafter: Drafter) -> dict[Text, float]:
    """How likely each text is, with drafts in every step."""
    found: dict[Text, float] = {}
    going: list[tuple[float, int, Text]] = [(weight, seed, ()) for seed, weight in enumerate(world.weights)]
    while going:
        trials = [
            VerifyTokens(drafter(seed, text), world.draw(seed, text), lambda token: False) for _, seed, text in going
        ]
        rows = [
            world.row(text + trial.drafts[:count])
            for (_, _, text), trial in zip(going, trials, strict=True)
            for count in range(trial.logit_rows)
        ]
        steps, going = list(zip(going, rule(torch.stack(rows), trials), strict=True)), []
        for (weight, seed, text), said in steps:
            for chance, tokens in said:
                longer = (*text, *tokens)
                if len(longer) < world.length:
                    going.append((weight * chance, seed, longer))
                else:
                    found[longer] = found.get(longer, 0.0) + weight * chance
    return found


def error(world: World, found: dict[Text, float]) -> float:
    """How far the most wrong probability of a text is off."""
    texts = product(range(world.logits.shape[-1]), repeat=world.length)
    return max(abs(found.get(text, 0.0) - world.probability(text)) for text in texts)


def fixed(drafts: Text) -> Drafter:
    """Drafts that stand at their places whatever is said."""
    return lambda seed, text: drafts[len(text) :]


def coupled(world: World) -> Drafter:
    """Drafts of the rows that do not count, with the noise of what is said."""

    def draft(seed: int, text: Text) -> Text:
        drafts: Text = ()
        while len(text) + len(drafts) + 1 < world.length:
            (token,) = sample_tokens(world.other(text + drafts)[None], [world.draw(seed, text + drafts)])
            assert token is not None, "all logits are finite"
            drafts += (token,)
        return drafts

    return draft


def every(world: World) -> list[Drafter]:
    """All drafts."""
    return [fixed(drafts) for drafts in product(range(world.logits.shape[-1]), repeat=world.length - 1)]
