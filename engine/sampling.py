"""The one rule that turns logits into a token: a function of (logits, history, parameters, seed, position).

    emit = argmax over the kept tokens of  z' / temperature + noise(seed, position, token)

with z' = logits + bias - penalties. At temperature 0 the noise is zero; ties go to the lowest id. Nothing here knows
of batches or steps, so a draft that is verified with this rule can never change the text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.noise import HIGHEST, LOWEST, gumbel
from engine.types import SamplingParams

# Below this, dividing by the temperature leaves nothing but the arg max, and overflows.
_COLDEST = 1e-5


class History:
    """What the penalties of one sequence look at. Costs nothing while no penalty is set."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocabulary: int) -> None:
        self._prompt: Tensor | None = None
        self._counts: Tensor | None = None
        if params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0:
            self._counts = torch.zeros(vocabulary, dtype=torch.int32)
            self._prompt = torch.zeros(vocabulary, dtype=torch.bool)
            self._prompt[torch.tensor(prompt, dtype=torch.long)] = True

    def append(self, token: int) -> None:
        """Count a token of the output."""
        if self._counts is not None:
            self._counts[token] += 1

    def after(self, tokens: Sequence[int]) -> History:
        """What the penalties would look at if the output went on with `tokens`; this history stays as it is."""
        if self._counts is None or not tokens:
            return self
        longer = copy.copy(self)
        more = torch.tensor(tokens, dtype=torch.long)
        longer._counts = self._counts.index_add(0, more, torch.ones_like(more, dtype=torch.int32))
        return longer

    def penalise(self, logits: Tensor, params: SamplingParams) -> None:
        """Change one row of logits [vocabulary] in place.

        Repetition as in transformers (prompt and output), frequency and presence as in OpenAI's API (output only).
        """
        if self._counts is None or self._prompt is None:
            return
        counts = self._counts.to(logits.device)
        if params.repetition_penalty != 1.0:
            seen = (counts > 0) | self._prompt.to(logits.device)
            factor = params.repetition_penalty
            logits.copy_(torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits))
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to draw from: for the token at `position` of the text, counted from the start of the prompt."""

    params: SamplingParams
    seed: int
    position: int
    history: History

    def after(self, tokens: Sequence[int]) -> Draw:
        """How the token behind `tokens` would be drawn if the text went on with these."""
        return replace(self, position=self.position + len(tokens), history=self.history.after(tokens))


def emit(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The next token of each row of logits [rows, vocabulary]; None where the row has no finite maximum.

    A broken row (NaN, infinity) breaks only itself.
    """
    shaped = _shape(logits, draws)
    sound = torch.isfinite(shaped.amax(-1))
    tokens = shaped.argmax(-1)
    warm = [row for row, draw in enumerate(draws) if draw.params.temperature >= _COLDEST]
    warm = [row for row, fine in zip(warm, sound[warm].tolist(), strict=True) if fine]
    if warm:
        tokens[warm] = _sample(shaped[warm], [draws[row] for row in warm])
    return [token if fine else None for token, fine in zip(tokens.tolist(), sound.tolist(), strict=True)]


def logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Log-probabilities of the raw logits [rows, vocabulary]: of each row's token, and its `count` likeliest tokens."""
    spread = _exact(logits).log_softmax(-1)
    chosen = spread.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return chosen.tolist(), [_top(row, min(count, len(row))) for row in spread]


def _top(values: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` largest of one row, equal ones by id: topk alone gives those in no order."""
    if count == 0:
        return []
    tokens = (values >= values.topk(count).values[-1]).nonzero()[:, 0]
    order = values[tokens].argsort(descending=True, stable=True)[:count]
    return list(zip(tokens[order].tolist(), values[tokens[order]].tolist(), strict=True))


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _shape(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits after bias and penalties, in float32 or better; the input stays as it is."""
    shaped = _exact(logits).clone()
    for row, draw in enumerate(draws):
        if draw.params.logit_bias:
            ids, values = zip(*draw.params.logit_bias, strict=True)
            index = torch.tensor(ids, device=logits.device)
            shaped[row].index_add_(0, index, torch.tensor(values, dtype=shaped.dtype, device=logits.device))
        draw.history.penalise(shaped[row], draw.params)
    return shaped


def _sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token a row [rows], by the arg max of scaled logits plus noise over the tokens that the filters keep."""
    scaled = logits / _column(logits, [draw.params.temperature for draw in draws])
    kept = _keep(scaled, [draw.params for draw in draws])
    rows, tokens = kept.nonzero(as_tuple=True)
    seeds = torch.tensor([_signed(draw.seed) for draw in draws], device=logits.device)
    positions = torch.tensor([draw.position for draw in draws], device=logits.device)
    scores = torch.full(scaled.shape, -torch.inf, dtype=torch.float64, device=logits.device)
    scores[rows, tokens] = scaled[rows, tokens].double() + gumbel(seeds[rows], positions[rows], tokens)
    return scores.argmax(-1)


def _keep(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Which tokens may be drawn [rows, vocabulary]: top-k, then top-p, then min-p, as transformers orders them.

    Tokens with equal logits stay or go together, so that the choice does not hang on the order of a sort.
    """
    best = scaled.amax(-1, keepdim=True)
    # No noise can lift a token over a gap wider than the noise's own range: exact, and it spares most of the work.
    reachable = best - (HIGHEST - LOWEST)
    top_k = _top_k_floor(scaled, params)
    floor = torch.maximum(reachable, top_k)
    floor = torch.maximum(floor, _top_p_floor(scaled, top_k, floor, params))
    ratios = _column(scaled, [param.min_p for param in params])
    return scaled >= torch.maximum(floor, best + ratios.log())


def _top_k_floor(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit that top-k keeps [rows, 1]."""
    vocabulary = scaled.shape[-1]
    counts = [min(param.top_k, vocabulary) if param.top_k > 0 else vocabulary for param in params]
    floor = torch.full_like(scaled[:, :1], -torch.inf)
    limited = [row for row, count in enumerate(counts) if count < vocabulary]
    if limited:
        most = max(counts[row] for row in limited)
        index = torch.tensor([[counts[row] - 1] for row in limited], device=scaled.device)
        floor[limited] = scaled[limited].topk(most, dim=-1).values.gather(-1, index)
    return floor


def _top_p_floor(scaled: Tensor, top_k: Tensor, floor: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit in the nucleus [rows, 1]: the fewest tokens that have the share top_p of what top-k keeps.

    Only logits above `floor` are sorted; those below it count in the whole, but could not be drawn anyway.
    """
    result = torch.full_like(floor, -torch.inf)
    limited = [row for row, param in enumerate(params) if param.top_p < 1.0]
    if not limited:
        return result
    rows = scaled[limited]
    total = rows.masked_fill(rows < top_k[limited], -torch.inf).logsumexp(-1, keepdim=True)
    width = int((rows >= floor[limited]).sum(-1).max())
    values = rows.topk(width, dim=-1).values
    mass = (values - total).exp()
    before = mass.double().cumsum(-1) - mass.double()
    inside = before < _column(before, [params[row].top_p for row in limited])
    inside[:, 0] = True
    result[limited] = values.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    return result


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _signed(seed: int) -> int:
    """A 64-bit seed as int64 holds it."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
