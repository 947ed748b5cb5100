"""Which tokens may be drawn, by how likely they are: the filters of `SamplingParams`, in the order that it names.

Most filters are a floor under the logits. Locally typical sampling and the exclusion of top choices are not: rows that
ask for them are narrowed token by token. Tokens with equal logits stay or go together everywhere, so that the choice
does not hang on the order of a sort.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sample.noise import MAX_NOISE, MIN_NOISE
from engine.types.request import SamplingParams

# Tokens that a nucleus rarely exceeds: only so many are sorted at first.
_NUCLEUS_TOKENS = 256


def filter_mask(scaled: Tensor, params: Sequence[SamplingParams], xtc_draws: Sequence[float]) -> Tensor:
    """Which tokens may be drawn [rows, vocabulary].

    scaled  logits after the temperature, forbidden ones at minus infinity
    coins   of each row, in (0, 1): below its probability top choices are excluded
    """
    best = scaled.amax(-1, keepdim=True)
    # No noise can lift a token over a gap wider than the noise's own range: exact, and it spares most of the work.
    reachable = best - (MAX_NOISE - MIN_NOISE)
    least = torch.maximum(_top_k_floor(scaled, params), _sigma_floor(scaled, params))
    floor = torch.maximum(reachable, least)
    floor = torch.maximum(floor, _top_p_floor(scaled, least, floor, params))
    ratios = column(scaled, [param.min_p for param in params])
    kept = scaled >= torch.maximum(floor, best + ratios.log())
    for row, (param, coin) in enumerate(zip(params, xtc_draws, strict=True)):
        excludes = param.xtc is not None and coin < param.xtc.probability
        if param.typical_p < 1.0 or excludes:
            threshold = param.xtc.threshold if param.xtc is not None and excludes else 1.0
            kept[row] = _row_mask(scaled[row], float(least[row]), param, threshold)
    return kept


def column(like: Tensor, values: Sequence[float]) -> Tensor:
    """One value a row, to be spread over the columns."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


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


def _sigma_floor(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit that top-n-sigma keeps [rows, 1] (Tang et al., arXiv 2411.07641): best - n deviations.

    The deviation is that of all logits that are not forbidden, as a population's.
    """
    floor = torch.full_like(scaled[:, :1], -torch.inf)
    for row, param in enumerate(params):
        if param.top_n_sigma > 0.0:
            values = scaled[row][scaled[row] > -torch.inf].double()
            floor[row] = values.amax() - param.top_n_sigma * values.std(correction=0)
    return floor


def _top_p_floor(scaled: Tensor, least: Tensor, floor: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit in the nucleus [rows, 1]: the fewest tokens that have the share top_p of those above `least`.

    Only logits above `floor` are sorted; those below it count in the whole, but could not be drawn anyway.
    """
    result = torch.full_like(floor, -torch.inf)
    limited = [row for row, param in enumerate(params) if param.top_p < 1.0]
    if not limited:
        return result
    rows = scaled[limited]
    total = rows.masked_fill(rows < least[limited], -torch.inf).logsumexp(-1, keepdim=True)
    widest = int((rows >= floor[limited]).sum(-1).max())
    width = min(_NUCLEUS_TOKENS, widest)
    while True:
        values = rows.topk(width, dim=-1).values
        mass = (values - total).exp().double()
        before = mass.cumsum(-1) - mass
        inside = before < column(before, [params[row].top_p for row in limited])
        if width == widest or not inside[:, -1].any():
            break
        width = min(8 * width, widest)
    inside[:, 0] = True
    result[limited] = values.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    return result


def _row_mask(row: Tensor, least: float, param: SamplingParams, threshold: float) -> Tensor:
    """What all filters keep of one row [vocabulary]; 1 as the threshold excludes no top choice."""
    tokens = ((row >= least) & (row > -torch.inf)).nonzero()[:, 0]
    values = row[tokens].double()
    if param.typical_p < 1.0:
        surprise = -values.log_softmax(-1)
        # How far a token's information is from what is expected (Meister et al., arXiv 2202.00666).
        oddity = (surprise - (surprise.neg().exp() * surprise).sum()).abs()
        typical = _top_mass(-oddity, values, param.typical_p)
        tokens, values = tokens[typical], values[typical]
    if param.top_p < 1.0:
        likely = _top_mass(values, values, param.top_p)
        tokens, values = tokens[likely], values[likely]
    if param.min_p > 0.0:
        near = values >= values.amax() + torch.tensor(param.min_p).log()
        tokens, values = tokens[near], values[near]
    top = values.softmax(-1) >= threshold
    if int(top.sum()) > 1:
        tokens = tokens[~top | (values == values[top].amin())]
    kept = torch.zeros_like(row, dtype=torch.bool)
    kept[tokens] = True
    return kept


def _top_mass(rank: Tensor, logits: Tensor, share: float) -> Tensor:
    """Which tokens it takes to have a share of the whole, the highest rank first; all that rank with the last."""
    order = rank.argsort(descending=True, stable=True)
    mass = logits.softmax(-1)[order]
    inside = mass.cumsum(-1) - mass < share
    inside[0] = True
    return rank >= rank[order][inside].amin()
