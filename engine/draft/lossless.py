"""Verification that keeps the distribution of a text, though not the text: for drafts that were drawn at random.

`emit` with shared noise (sampling.py) keeps the text itself and is what the engine does by default. These rules keep a
little more of a long draft, and give up that a seed has one text. Target and guess are what both sides drew from: after
temperature, filters and penalties, with the draft before each row in the history. A draft that was not drawn (a lookup)
has a guess that is 1 at its token.

Nothing here has a state: each round draws from three streams that share no number, keyed by seed and by the position at
which the round starts. Starts grow, so no number is used twice; were the streams keyed by the drafts' own positions, a
refused draft's numbers would come again in the next round, and what refused it would say something about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from engine.noise import gumbel, uniform

# Lane 0 is that of `emit`; a draft's tokens have one lane each.
_ACCEPT, _LEFTOVER, _DRAFT = 1, 2, 3


@dataclass(frozen=True)
class Drafts:
    """Drafts of k tokens for n sequences.

    target  [n, k + 1, vocabulary] probabilities, float64: row i behind the first i drafts
    guess   [n, k, vocabulary] probabilities, float64: what draft i was drawn from
    tokens  [n, k]
    """

    target: Tensor
    guess: Tensor
    tokens: Tensor

    @cached_property
    def ratios(self) -> Tensor:
        """How much likelier the target finds each draft [n, k]; 0 where the guess cannot have said it."""
        at = self.tokens[..., None]
        guess = self.guess.gather(-1, at)[..., 0]
        return torch.where(guess > 0, self.target[:, :-1].gather(-1, at)[..., 0] / guess, 0.0)

    @cached_property
    def shares(self) -> Tensor:
        """P_0 to P_k [n, k + 1]: 1, then P_i = min(1, P_(i - 1) x ratio_i). The chance to keep i drafts at least."""
        shares = [torch.ones_like(self.target[:, 0, 0])]
        for ratio in self.ratios.unbind(-1):
            shares.append((shares[-1] * ratio).clamp(max=1.0))
        return torch.stack(shares, -1)


class Rule(Protocol):
    """When drafts are kept: each has a chance, and what passed tells how many stay."""

    def chances(self, drafts: Drafts) -> Tensor:
        """The chance of each draft to pass [n, k], independent of the others' passing."""

    def kept(self, passed: Tensor) -> Tensor:
        """How many drafts stay [n], by which passed [n, k]."""

    def weights(self, drafts: Drafts) -> Tensor:
        """What the target still counts, against the guess, behind each number of kept drafts [n, k + 1]."""


class TokenRule:
    """Each draft alone, the first that fails ends it (Leviathan et al., arXiv 2211.17192)."""

    def chances(self, drafts: Drafts) -> Tensor:
        """min(1, target / guess)."""
        return drafts.ratios.clamp(max=1.0)

    def kept(self, passed: Tensor) -> Tensor:
        """As many as passed before the first that did not."""
        return passed.long().cumprod(-1).sum(-1)

    def weights(self, drafts: Drafts) -> Tensor:
        """The target counts in full."""
        return torch.ones_like(drafts.shares)


class BlockRule:
    """The whole draft at once: keeps more than TokenRule, never less (Sun et al., arXiv 2403.10444)."""

    def chances(self, drafts: Drafts) -> Tensor:
        """Z / (Z + 1 - P_i), with Z what the target at weight P_i has over the next guess; the last draft's is P_k."""
        shares = drafts.shares[:, 1:]
        over = shares[:, :-1, None] * drafts.target[:, 1:-1] - drafts.guess[:, 1:]
        mass = over.clamp(min=0.0).sum(-1)
        whole = mass + 1.0 - shares[:, :-1]
        # 0 / 0: the next draft is certain to be kept, so whether this one ends the text is never asked.
        inner = torch.where(whole > 0, mass / whole, 1.0)
        return torch.cat((inner, shares[:, -1:]), -1)

    def kept(self, passed: Tensor) -> Tensor:
        """Up to the last that passed, whatever failed before it."""
        numbers = torch.arange(1, passed.shape[-1] + 1, device=passed.device)
        return (passed * numbers).amax(-1)

    def weights(self, drafts: Drafts) -> Tensor:
        """The share that was left for what follows."""
        return drafts.shares


def propose(guess: Tensor, seeds: Tensor, starts: Tensor, number: int) -> Tensor:
    """Draw draft `number` [n] of a round that starts at the positions `starts`, from probabilities [n, vocabulary]."""
    return _draw(guess, seeds, starts, _DRAFT + number)


def verify(rule: Rule, drafts: Drafts, seeds: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafts stay [n], and the token that follows them [n]; seeds and starts are int64 [n]."""
    places = torch.arange(drafts.tokens.shape[-1], device=seeds.device).expand(drafts.tokens.shape)
    coins = uniform(seeds[:, None].expand_as(places), starts[:, None].expand_as(places), places, _ACCEPT)
    kept = rule.kept(coins <= rule.chances(drafts))
    return kept, _draw(leftover(rule, drafts, kept), seeds, starts, _LEFTOVER)


def leftover(rule: Rule, drafts: Drafts, kept: Tensor) -> Tensor:
    """Probabilities of the token behind `kept` drafts [n, vocabulary].

    (weight x target - guess)+ made to sum to 1; behind the last draft the target itself.
    """
    rows = torch.arange(len(kept), device=kept.device)
    target = drafts.target[rows, kept]
    guess = torch.cat((drafts.guess, torch.zeros_like(drafts.target[:, :1])), 1)[rows, kept]
    rest = (rule.weights(drafts)[rows, kept][:, None] * target - guess).clamp(min=0.0)
    mass = rest.sum(-1, keepdim=True)
    # Nothing is left where target and guess agree: then nothing is refused either, but for a rounding.
    return torch.where(mass > 0, rest / mass, target)


def _draw(probabilities: Tensor, seeds: Tensor, starts: Tensor, lane: int) -> Tensor:
    """A token a row [n], by the arg max of log-probabilities plus noise."""
    tokens = torch.arange(probabilities.shape[-1], device=seeds.device).expand(probabilities.shape)
    keys = [part[:, None].expand_as(tokens).contiguous() for part in (seeds, starts)]
    return (probabilities.log() + gumbel(keys[0], keys[1], tokens.contiguous(), lane)).argmax(-1)
