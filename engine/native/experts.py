"""Finds out how a layer's router chooses among experts, by asking it, and what experts make of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from engine.native.comparison import is_close, least_squares_ratio, relative_difference
from engine.native.decoder import ExpertActivation, Linear, Router, Scoring, UnsupportedArchitecture
from engine.native.gated_mlp import ACTIVATIONS
from engine.native.trace import TracedExperts, TracedRouter

_SCORES: dict[Scoring, Callable[[Tensor], Tensor]] = {
    "softmax": lambda made: made.softmax(-1),
    "sigmoid": torch.sigmoid,
}
# Rows that a router is asked with, enough to choose every expert of a few hundred.
_PROBE_ROWS = 256
# Numbers that a gate is asked with, and how far they reach beyond what may bound them.
_PROBE_VALUES, _PROBE_RANGE = 1024, 3.0


def find_router(seen: TracedRouter) -> Router:
    """How a router chooses. Raises UnsupportedArchitecture where it is none that is known."""
    weight, bias = seen.weight.detach().float(), _bias(seen.router, len(seen.weight))
    linear = Linear(weight, bias)
    rows = torch.randn(_PROBE_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    # Such that scores differ: next to outliers, rows as large as those seen may make all of them 1.
    rows /= float(nn.functional.linear(rows, weight).std().clamp_min(1e-6))
    weights, chosen = seen.route(rows)
    made = nn.functional.linear(rows, weight, bias)
    dense = torch.zeros_like(made).scatter(1, chosen, weights)
    for router in _candidate_routers(seen, linear, chosen.shape[1]):
        mine = router_weights(router, made)
        factor = least_squares_ratio(mine, dense)
        if is_close(factor * mine, dense):
            return Router(
                linear=linear,
                scoring=router.scoring,
                correction=router.correction,
                top_k=router.top_k,
                renormalised=router.renormalised,
                scaling_factor=factor,
            )
    raise UnsupportedArchitecture("its experts are chosen in another way")


def router_weights(router: Router, made: Tensor) -> Tensor:
    """The weight of every expert for rows [rows, experts] of what the router's matrix makes, but for its factor."""
    scores = _SCORES[router.scoring](made)
    order = scores if router.correction is None else scores + router.correction
    chosen = order.topk(router.top_k).indices
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    return weights / weights.sum(-1, keepdim=True) if router.renormalised else weights


def find_expert_activation(seen: TracedExperts) -> ExpertActivation:
    """What experts do between their matrices. Raises UnsupportedArchitecture where it is unknown, or they do anything else."""
    own = _float_attributes(seen.experts.module)
    made = _PROBE_RANGE * max((1.0, *own)) * torch.randn(4, _PROBE_VALUES, generator=torch.Generator().manual_seed(0))
    try:
        told = seen.experts.activate(made)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedArchitecture("its experts activate in another way") from error
    gate = min(
        _candidate_activations(own), key=lambda gate: relative_difference(apply_expert_activation(gate, made), told)
    )
    whole = isinstance(seen.inner.weight, Tensor)
    if is_close(apply_expert_activation(gate, made), told) and (
        not whole or is_close(_expected_output(seen), seen.output)
    ):
        return gate
    raise UnsupportedArchitecture("its experts make something else of their rows")


def apply_expert_activation(gate: ExpertActivation, made: Tensor) -> Tensor:
    """What enters the last matrices, of what the inner ones make of rows [rows, 2 * width]."""
    gates, ups = (made[:, 0::2], made[:, 1::2]) if gate.alternating else made.chunk(2, dim=1)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    return ACTIVATIONS[gate.activation](gate.slope * gates) / gate.slope * (ups + gate.shift)


def _candidate_activations(numbers: Sequence[float]) -> Iterator[ExpertActivation]:
    """What a gate may be whose module holds some numbers, the plainest first."""
    for limit, slope, shift, alternating in itertools.product(
        (math.inf, *numbers), (1.0, *numbers), (0.0, 1.0), (False, True)
    ):
        for activation in ACTIVATIONS:
            yield ExpertActivation(
                activation=activation, alternating=alternating, limit=limit, slope=slope, shift=shift
            )


def _float_attributes(module: nn.Module) -> list[float]:
    """The numbers above zero that a module holds as settings."""
    return sorted({own for own in vars(module).values() if isinstance(own, float) and own > 0})


def _expected_output(seen: TracedExperts) -> Tensor:
    """What the plain matrices of experts make of the rows."""
    made = torch.zeros_like(seen.input)
    for row, rank in itertools.product(range(seen.chosen.shape[0]), range(seen.chosen.shape[1])):
        expert = int(seen.chosen[row, rank])
        entering = seen.experts.activate(_product(seen.input[row][None], seen.inner.matrix(expert)))
        made[row] += seen.weights[row, rank] * _product(entering, seen.down.matrix(expert))[0]
    return made


def _product(rows: Tensor, linear: Linear) -> Tensor:
    assert isinstance(linear.weight, Tensor)
    return nn.functional.linear(rows, linear.weight.float(), linear.bias)


def _candidate_routers(seen: TracedRouter, linear: Linear, chosen: int) -> Iterator[Router]:
    corrections = [None, *_corrections(seen, len(seen.weight))]
    scorings: tuple[Scoring, ...] = ("softmax", "sigmoid")
    for scoring, correction, renormalised in itertools.product(scorings, corrections, (True, False)):
        yield Router(
            linear=linear,
            scoring=scoring,
            correction=correction,
            top_k=chosen,
            renormalised=renormalised,
            scaling_factor=1.0,
        )


def _corrections(seen: TracedRouter, experts: int) -> Iterator[Tensor]:
    """What a router has of one number an expert, beside its bias, or is given."""
    own = (*seen.router.parameters(), *seen.router.buffers(), *seen.extra_inputs)
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
