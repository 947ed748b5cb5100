"""The one rule that turns logits into a token: a function of (logits, text so far, parameters, seed, position).

    emit = argmax over the kept tokens of  z' / temperature + noise(seed, position, token)

with z' = logits + bias - penalties, minus infinity where rules forbid a token. At temperature 0 the noise is zero and
all that is not forbidden is kept; ties go to the lowest id. Nothing here knows of batches or steps, so a draft that is
verified with this rule can never change the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from engine.sample.constraints import Rules
from engine.sample.filters import column, keep
from engine.sample.logprobs import exact
from engine.sample.noise import gumbel, uniform
from engine.sample.penalties import History
from engine.types.request import SamplingParams

# Below this, dividing by the temperature leaves nothing but the arg max, and overflows.
_COLDEST = 1e-5
# Of the noise: lane 0 is that of tokens.
_COINS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to draw from: for the token at `position` of the text, counted from the start of the prompt."""

    params: SamplingParams
    seed: int
    position: int
    history: History
    rules: Rules | None = None

    @property
    def cold(self) -> bool:
        """Whether the highest logit is taken, whatever the noise."""
        return self.params.temperature < _COLDEST

    @property
    def shaped(self) -> bool:
        """Whether logits are changed before a token is drawn from them."""
        return bool(self.params.logit_bias) or self.rules is not None or not self.history.idle

    @property
    def plain(self) -> bool:
        """Whether it is the highest of the bare logits, wherever it stands and whatever was said."""
        return self.cold and not self.shaped

    def along(self, tokens: Sequence[int]) -> list[Draw]:
        """How the next token is drawn, the one behind the first of `tokens`, behind the first two, ... behind all."""
        if not tokens or self.plain:
            return [self] * (len(tokens) + 1)
        return [self.after(tokens[:count]) for count in range(len(tokens) + 1)]

    def after(self, tokens: Sequence[int]) -> Draw:
        """How the token behind `tokens` would be drawn if the text went on with these."""
        if not tokens:
            return self
        rules = None if self.rules is None else self.rules.after(tokens)
        return replace(self, position=self.position + len(tokens), history=self.history.after(tokens), rules=rules)


def emit(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The next token of each row of logits [rows, vocabulary]; None where the row has no finite maximum.

    A broken row (NaN, infinity) breaks only itself. So does one where rules leave no token.
    """
    shaped, tokens = list[Tensor](), list[int | None]()
    # A row at a time stays in the processor's cache between the passes.
    for row, draw in zip(exact(logits), draws, strict=True):
        shaped.append(shape(row, draw))
        tokens.append(_highest(shaped[-1]))
    warm = [row for row, draw in enumerate(draws) if tokens[row] is not None and not draw.cold]
    if warm:
        rows = torch.stack([shaped[row] for row in warm])
        for row, token in zip(warm, _sample(rows, [draws[row] for row in warm]).tolist(), strict=True):
            tokens[row] = token
    return tokens


def shape(row: Tensor, draw: Draw) -> Tensor:
    """A row of logits [vocabulary] after bias, penalties and rules; the input stays as it is."""
    shaped = row
    if draw.params.logit_bias or not draw.history.idle:
        shaped = row.clone()
        if draw.params.logit_bias:
            ids, values = zip(*draw.params.logit_bias, strict=True)
            index = torch.tensor(ids, device=row.device)
            shaped.index_add_(0, index, torch.tensor(values, dtype=shaped.dtype, device=row.device))
        draw.history.penalise(shaped, draw.params)
    return shaped if draw.rules is None else draw.rules.limited(shaped)


def _highest(row: Tensor) -> int | None:
    """The arg max of a row, the first of several; None where its maximum is not finite."""
    # numpy takes a sixth of torch's time; to both, what is no number is higher than all others.
    token = int(row.numpy().argmax() if row.device.type == "cpu" else row.argmax())
    return token if isfinite(row[token].item()) else None


def _sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token a row [rows], by the arg max of scaled logits plus noise over the tokens that the filters keep."""
    scaled = logits / column(logits, [draw.params.temperature for draw in draws])
    kept = keep(scaled, [draw.params for draw in draws], [_coin(draw) for draw in draws])
    rows, tokens = kept.nonzero(as_tuple=True)
    seeds = torch.tensor([_signed(draw.seed) for draw in draws], device=logits.device)
    positions = torch.tensor([draw.position for draw in draws], device=logits.device)
    scores = torch.full(scaled.shape, -torch.inf, dtype=torch.float64, device=logits.device)
    scores[rows, tokens] = scaled[rows, tokens].double() + gumbel(seeds[rows], positions[rows], tokens)
    return scores.argmax(-1)


def _coin(draw: Draw) -> float:
    """What decides whether top choices are excluded, in (0, 1)."""
    if draw.params.xtc is None:
        return 1.0
    seed, position, token = (torch.tensor([value]) for value in (_signed(draw.seed), draw.position, 0))
    return float(uniform(seed, position, token, _COINS))


def _signed(seed: int) -> int:
    """A 64-bit seed as int64 holds it."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
