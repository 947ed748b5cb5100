"""Sampling filters of `SamplingParams`, in its order: a mask of the tokens that may be sampled.

Most filters are a minimum logit. Locally typical sampling and XTC are not: their rows are filtered token by token.
Tokens with equal logits are kept or removed together, so that the result does not depend on the order of a sort.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sample.noise import MAX_NOISE, MIN_NOISE
from engine.types.request import SamplingParams

# Width of the first top-p sort; it grows for a nucleus of more tokens.
_NUCLEUS_TOKENS = 256


def filter_mask(scaled: Tensor, params: Sequence[SamplingParams], xtc_draws: Sequence[float]) -> Tensor:
    """Mask of the tokens that may be sampled [rows, vocabulary].

    scaled     logits divided by the temperature, masked tokens at minus infinity
    xtc_draws  a uniform number in (0, 1) for each row: XTC applies if it is below `Xtc.probability`
    """
    best = scaled.amax(-1, keepdim=True)
    # Exact, and skips most of the vocabulary: no noise closes a gap wider than its own range.
    reachable = best - (MAX_NOISE - MIN_NOISE)
    least = torch.maximum(_top_k_floor(scaled, params), _sigma_floor(scaled, params))
    floor = torch.maximum(reachable, least)
    floor = torch.maximum(floor, _top_p_floor(scaled, least, floor, params))
    ratios = column(scaled, [param.min_p for param in params])
    mask = scaled >= torch.maximum(floor, best + ratios.log())
    for row, (param, xtc_draw) in enumerate(zip(params, xtc_draws, strict=True)):
        excludes = param.xtc is not None and xtc_draw < param.xtc.probability
        if param.typical_p < 1.0 or excludes:
            threshold = param.xtc.threshold if param.xtc is not None and excludes else 1.0
            mask[row] = _row_mask(scaled[row], float(least[row]), param, threshold)
    return mask


def column(like: Tensor, values: Sequence[float]) -> Tensor:
    """One value for each row [rows, 1], in the type and on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _top_k_floor(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The minimum logit of top-k [rows, 1]."""
    vocabulary = scaled.shape[-1]
    counts = [min(param.top_k, vocabulary) if param.top_k > 0 else vocabulary for param in params]
    floor = torch.full_like(scaled[:, :1], -torch.inf)
    limited = [row for row, count in enumerate(counts) if count < vocabulary]
    if limited:
        max_count = max(counts[row] for row in limited)
        index = torch.tensor([[counts[row] - 1] for row in limited], device=scaled.device)
        floor[limited] = scaled[limited].topk(max_count, dim=-1).values.gather(-1, index)
    return floor


def _sigma_floor(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The minimum logit of top-n-sigma [rows, 1] (Tang et al., arXiv 2411.07641): maximum - n standard deviations.

    The population standard deviation of all tokens that are not masked.
    """
    floor = torch.full_like(scaled[:, :1], -torch.inf)
    for row, param in enumerate(params):
        if param.top_n_sigma > 0.0:
            values = scaled[row][scaled[row] > -torch.inf].double()
            floor[row] = values.amax() - param.top_n_sigma * values.std(correction=0)
    return floor


def _top_p_floor(scaled: Tensor, least: Tensor, floor: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The minimum logit of top-p [rows, 1]: the fewest tokens with the share top_p of the mass above `least`.

    Only logits above `floor` are sorted; lower ones count in the total mass but cannot be sampled.
    """
    result = torch.full_like(floor, -torch.inf)
    limited = [row for row, param in enumerate(params) if param.top_p < 1.0]
    if not limited:
        return result
    rows = scaled[limited]
    total = rows.masked_fill(rows < least[limited], -torch.inf).logsumexp(-1, keepdim=True)
    max_width = int((rows >= floor[limited]).sum(-1).max())
    width = min(_NUCLEUS_TOKENS, max_width)
    while True:
        values = rows.topk(width, dim=-1).values
        mass = (values - total).exp().double()
        before = mass.cumsum(-1) - mass
        inside = before < column(before, [params[row].top_p for row in limited])
        if width == max_width or not inside[:, -1].any():
            break
        width = min(8 * width, max_width)
    inside[:, 0] = True
    result[limited] = values.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    return result


def _row_mask(row: Tensor, least: float, param: SamplingParams, threshold: float) -> Tensor:
    """Mask of all filters for one row [vocabulary]; with an XTC threshold of 1, XTC is off."""
    tokens = ((row >= least) & (row > -torch.inf)).nonzero()[:, 0]
    values = row[tokens].double()
    if param.typical_p < 1.0:
        surprise = -values.log_softmax(-1)
        # Distance of a token's information from the entropy (Meister et al., arXiv 2202.00666).
        deviation = (surprise - (surprise.neg().exp() * surprise).sum()).abs()
        typical = _top_mass(-deviation, values, param.typical_p)
        tokens, values = tokens[typical], values[typical]
    if param.top_p < 1.0:
        nucleus = _top_mass(values, values, param.top_p)
        tokens, values = tokens[nucleus], values[nucleus]
    if param.min_p > 0.0:
        near = values >= values.amax() + torch.tensor(param.min_p).log()
        tokens, values = tokens[near], values[near]
    top = values.softmax(-1) >= threshold
    if int(top.sum()) > 1:
        tokens = tokens[~top | (values == values[top].amin())]
    mask = torch.zeros_like(row, dtype=torch.bool)
    mask[tokens] = True
    return mask


def _top_mass(rank: Tensor, logits: Tensor, share: float) -> Tensor:
    """Mask of the fewest tokens with a share of the mass, highest rank first, and of all ties with the last one."""
    order = rank.argsort(descending=True, stable=True)
    mass = logits.softmax(-1)[order]
    inside = mass.cumsum(-1) - mass < share
    inside[0] = True
    return rank >= rank[order][inside].amin()
