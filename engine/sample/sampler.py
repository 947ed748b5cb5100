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

from engine.sample.constraints import Constraints
from engine.sample.filters import column, filter_mask
from engine.sample.logprobs import at_least_float32
from engine.sample.noise import gumbel, uniform
from engine.sample.penalties import PenaltyHistory
from engine.types.request import SamplingParams

# Below this, dividing by the temperature leaves nothing but the arg max, and overflows.
_MIN_TEMPERATURE = 1e-5
# Of the noise: lane 0 is that of tokens.
_XTC_LANE = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """One row to draw from: for the token at `position` of the text, counted from the start of the prompt."""

    params: SamplingParams
    seed: int
    position: int
    history: PenaltyHistory
    constraints: Constraints | None = None

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken, whatever the noise."""
        return self.params.temperature < _MIN_TEMPERATURE

    @property
    def modifies_logits(self) -> bool:
        """Whether logits are changed before a token is drawn from them."""
        return bool(self.params.logit_bias) or self.constraints is not None or not self.history.inactive

    @property
    def argmax_only(self) -> bool:
        """Whether it is the highest of the bare logits, wherever it stands and whatever was said."""
        return self.greedy and not self.modifies_logits

    def after_each(self, tokens: Sequence[int]) -> list[SamplingContext]:
        """How the next token is drawn, the one behind the first of `tokens`, behind the first two, ... behind all."""
        if not tokens or self.argmax_only:
            return [self] * (len(tokens) + 1)
        return [self.after(tokens[:count]) for count in range(len(tokens) + 1)]

    def after(self, tokens: Sequence[int]) -> SamplingContext:
        """How the token behind `tokens` would be drawn if the text went on with these."""
        if not tokens:
            return self
        rules = None if self.constraints is None else self.constraints.after(tokens)
        return replace(
            self, position=self.position + len(tokens), history=self.history.after(tokens), constraints=rules
        )


def sample_tokens(logits: Tensor, contexts: Sequence[SamplingContext]) -> list[int | None]:
    """The next token of each row of logits [rows, vocabulary]; None where the row has no finite maximum.

    A broken row (NaN, infinity) breaks only itself. So does one where rules leave no token.
    """
    shaped, tokens = list[Tensor](), list[int | None]()
    # A row at a time stays in the processor's cache between the passes.
    for row, draw in zip(at_least_float32(logits), contexts, strict=True):
        shaped.append(modified_logits(row, draw))
        tokens.append(_argmax(shaped[-1]))
    warm = [row for row, draw in enumerate(contexts) if tokens[row] is not None and not draw.greedy]
    if warm:
        rows = torch.stack([shaped[row] for row in warm])
        for row, token in zip(warm, _sample_rows(rows, [contexts[row] for row in warm]).tolist(), strict=True):
            tokens[row] = token
    return tokens


def modified_logits(row: Tensor, context: SamplingContext) -> Tensor:
    """A row of logits [vocabulary] after bias, penalties and rules; the input stays as it is."""
    shaped = row
    if context.params.logit_bias or not context.history.inactive:
        shaped = row.clone()
        if context.params.logit_bias:
            ids, values = zip(*context.params.logit_bias, strict=True)
            index = torch.tensor(ids, device=row.device)
            shaped.index_add_(0, index, torch.tensor(values, dtype=shaped.dtype, device=row.device))
        context.history.penalise(shaped, context.params)
    return shaped if context.constraints is None else context.constraints.masked(shaped)


def _argmax(row: Tensor) -> int | None:
    """The arg max of a row, the first of several; None where its maximum is not finite."""
    # numpy takes a sixth of torch's time; to both, what is no number is higher than all others.
    token = int(row.numpy().argmax() if row.device.type == "cpu" else row.argmax())
    return token if isfinite(row[token].item()) else None


def _sample_rows(logits: Tensor, contexts: Sequence[SamplingContext]) -> Tensor:
    """One token a row [rows], by the arg max of scaled logits plus noise over the tokens that the filters keep."""
    scaled = logits / column(logits, [draw.params.temperature for draw in contexts])
    kept = filter_mask(scaled, [draw.params for draw in contexts], [_xtc_draw(draw) for draw in contexts])
    rows, tokens = kept.nonzero(as_tuple=True)
    seeds = torch.tensor([_as_int64(draw.seed) for draw in contexts], device=logits.device)
    positions = torch.tensor([draw.position for draw in contexts], device=logits.device)
    scores = torch.full(scaled.shape, -torch.inf, dtype=torch.float64, device=logits.device)
    scores[rows, tokens] = scaled[rows, tokens].double() + gumbel(seeds[rows], positions[rows], tokens)
    return scores.argmax(-1)


def _xtc_draw(draw: SamplingContext) -> float:
    """What decides whether top choices are excluded, in (0, 1)."""
    if draw.params.xtc is None:
        return 1.0
    seed, position, token = (torch.tensor([value]) for value in (_as_int64(draw.seed), draw.position, 0))
    return float(uniform(seed, position, token, _XTC_LANE))


def _as_int64(seed: int) -> int:
    """A 64-bit seed as int64 holds it."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
