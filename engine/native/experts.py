"""Finds out how a layer's router chooses among experts, by asking it, and what experts make of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from engine.native.decoder import Activation, Linear, NoShape, Router, Scoring
from engine.native.mlp import ACTIVATIONS
from engine.native.same import ratio, same
from engine.native.trace import Mixed, Routed

_SCORES: dict[Scoring, Callable[[Tensor], Tensor]] = {
    "softmax": lambda made: made.softmax(-1),
    "sigmoid": torch.sigmoid,
}
# Rows that a router is asked with, enough to choose every expert of a few hundred.
_ASKED = 256


def find_router(seen: Routed) -> Router:
    """How a router chooses. Raises NoShape where it is none that is known."""
    weight, bias = seen.weight.detach().float(), _bias(seen.router, len(seen.weight))
    linear = Linear(weight, bias)
    columns, size = seen.taken.shape[1], float(seen.taken.square().mean().sqrt())
    rows = size * torch.randn(_ASKED, columns, generator=torch.Generator().manual_seed(0))
    weights, chosen = seen.ask(rows)
    made = nn.functional.linear(rows, weight, bias)
    dense = torch.zeros_like(made).scatter(1, chosen, weights)
    for router in _candidates(seen, linear, chosen.shape[1]):
        mine = route(router, made)
        factor = ratio(mine, dense)
        if same(factor * mine, dense):
            return Router(
                linear=linear,
                scoring=router.scoring,
                correction=router.correction,
                chosen=router.chosen,
                renormalised=router.renormalised,
                factor=factor,
            )
    raise NoShape("its experts are chosen in another way")


def route(router: Router, made: Tensor) -> Tensor:
    """The weight of every expert for rows [rows, experts] of what the router's matrix makes, but for its factor."""
    scores = _SCORES[router.scoring](made)
    order = scores if router.correction is None else scores + router.correction
    chosen = order.topk(router.chosen).indices
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    return weights / weights.sum(-1, keepdim=True) if router.renormalised else weights


def find_activation(seen: Mixed) -> Activation:
    """What experts activate by. Raises NoShape where they do anything else."""
    for name, activate in ACTIVATIONS.items():
        if same(_mix(seen, activate), seen.made):
            return name
    raise NoShape("its experts make something else of their rows")


def _mix(seen: Mixed, activate: Callable[[Tensor], Tensor]) -> Tensor:
    made = torch.zeros_like(seen.taken)
    for row, rank in itertools.product(range(seen.chosen.shape[0]), range(seen.chosen.shape[1])):
        expert = seen.chosen[row, rank]
        gate, up = nn.functional.linear(seen.taken[row], seen.inner[expert].float()).chunk(2)
        own = nn.functional.linear(activate(gate) * up, seen.down[expert].float())
        made[row] += seen.weights[row, rank] * own
    return made


def _candidates(seen: Routed, linear: Linear, chosen: int) -> Iterator[Router]:
    corrections = [None, *_rows(seen, len(seen.weight))]
    scorings: tuple[Scoring, ...] = ("softmax", "sigmoid")
    for scoring, correction, renormalised in itertools.product(scorings, corrections, (True, False)):
        yield Router(
            linear=linear,
            scoring=scoring,
            correction=correction,
            chosen=chosen,
            renormalised=renormalised,
            factor=1.0,
        )


def _rows(seen: Routed, experts: int) -> Iterator[Tensor]:
    """What a router has of one number an expert, beside its bias, or is given."""
    own = (*seen.router.parameters(), *seen.router.buffers(), *seen.others)
    for numbers in own:
        if (
            isinstance(numbers, Tensor)
            and numbers.numel() == experts
            and numbers is not getattr(seen.router, "bias", None)
        ):
            yield numbers.detach().float().flatten().contiguous()


def _bias(router: nn.Module, experts: int) -> Tensor | None:
    bias = getattr(router, "bias", None)
    return bias.detach().float().contiguous() if isinstance(bias, Tensor) and bias.shape == (experts,) else None
