"""Finds the parameters of a router and the activation of experts by calling their modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.native.comparison import is_close, least_squares_ratio, relative_difference
from engine.native.decoder import ExpertActivation, Linear, Router, Scoring, UnsupportedArchitecture
from engine.native.gated_mlp import ACTIVATIONS
from engine.native.norm import normalise
from engine.native.trace import TracedExperts, TracedRouter

_SCORES: dict[Scoring, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}
# Random rows for a router: enough that each of a few hundred experts is chosen.
_PROBE_ROWS = 256
# Random numbers for an activation, and their range in multiples of its largest float attribute.
_PROBE_VALUES, _PROBE_RANGE = 1024, 3.0


def find_router(traced: TracedRouter) -> Router:
    """The parameters of a router. Raises UnsupportedArchitecture."""
    weight = traced.weight.detach().float()
    bias = None if traced.bias is None else traced.bias.detach().float().contiguous()
    linear = Linear(weight, bias)
    rows = torch.randn(_PROBE_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    # Scaled so that scores differ: large logits could make all of them 1.
    rows /= float(nn.functional.linear(rows, weight).std().clamp_min(1e-6))
    weights, experts = traced.route(rows)
    logits = nn.functional.linear(normalise(traced.norm, rows), weight, bias)
    dense = torch.zeros_like(logits).scatter(1, experts, weights)
    for router in _candidate_routers(traced, linear, experts.shape[1]):
        expert_weights = router_weights(router, logits)
        factor = least_squares_ratio(expert_weights, dense)
        if is_close(factor * expert_weights, dense):
            return replace(router, scaling_factor=factor)
    raise UnsupportedArchitecture("its experts are chosen in another way")


def router_weights(router: Router, logits: Tensor) -> Tensor:
    """The weights of all experts, without scaling_factor, from router logits [rows, experts]."""
    scores = _SCORES[router.scoring](logits)
    corrected = scores if router.score_correction is None else scores + router.score_correction
    experts = corrected.topk(router.top_k).indices
    weights = torch.zeros_like(scores).scatter(1, experts, scores.gather(1, experts))
    if router.normalised:
        weights /= weights.sum(-1, keepdim=True)
    return weights if router.expert_scales is None else weights * router.expert_scales


def find_expert_activation(traced: TracedExperts) -> ExpertActivation:
    """The activation between the matrices of experts. Raises UnsupportedArchitecture."""
    numbers = _float_attributes(traced.experts.module)
    inner = (
        _PROBE_RANGE * max((1.0, *numbers)) * torch.randn(4, _PROBE_VALUES, generator=torch.Generator().manual_seed(0))
    )
    try:
        activated = traced.experts.activate(inner)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedArchitecture("its experts have another activation") from error
    has_ups = activated.shape != inner.shape
    best = min(
        _candidate_activations(numbers) if has_ups else _activations_without_ups(),
        key=lambda activation: relative_difference(apply_expert_activation(activation, inner), activated),
    )
    is_quantised = not isinstance(traced.inner[0].weight, Tensor)
    if best.interleaved and len(traced.inner) > 1:
        raise UnsupportedArchitecture("the gates and ups of its experts alternate in two matrices")
    if is_close(apply_expert_activation(best, inner), activated) and (
        is_quantised or is_close(_expected_output(traced), traced.output)
    ):
        return best
    raise UnsupportedArchitecture("its experts compute other operations")


def apply_expert_activation(activation: ExpertActivation, inner: Tensor) -> Tensor:
    """The input of the down matrices, from outputs of the inner ones [rows, 2 * width], without ups [rows, width]."""
    if not activation.has_ups:
        return ACTIVATIONS[activation.activation](inner)
    gates, ups = (inner[:, 0::2], inner[:, 1::2]) if activation.interleaved else inner.chunk(2, dim=1)
    gates, ups = gates.clamp(max=activation.limit), ups.clamp(-activation.limit, activation.limit)
    activated = ACTIVATIONS[activation.activation](activation.slope * gates)
    return activated / activation.slope * (ups + activation.shift)


def _candidate_activations(numbers: Sequence[float]) -> Iterator[ExpertActivation]:
    """Activations with some numbers as parameters, the simplest first."""
    for limit, slope, shift, interleaved in itertools.product(
        (math.inf, *numbers), (1.0, *numbers), (0.0, 1.0), (False, True)
    ):
        for activation in ACTIVATIONS:
            yield ExpertActivation(
                activation=activation, has_ups=True, interleaved=interleaved, limit=limit, slope=slope, shift=shift
            )


def _activations_without_ups() -> Iterator[ExpertActivation]:
    for activation in ACTIVATIONS:
        yield ExpertActivation(
            activation=activation, has_ups=False, interleaved=False, limit=math.inf, slope=1.0, shift=0.0
        )


def _float_attributes(module: nn.Module) -> list[float]:
    """The positive float attributes of a module."""
    return sorted({value for value in vars(module).values() if isinstance(value, float) and value > 0})


def _expected_output(traced: TracedExperts) -> Tensor:
    """The output of experts that are not quantised, for the traced input."""
    output = torch.zeros_like(traced.input)
    for row, rank in itertools.product(range(traced.chosen.shape[0]), range(traced.chosen.shape[1])):
        expert = int(traced.chosen[row, rank])
        before, after = (traced.weights[row, rank], 1.0) if traced.scales_inputs else (1.0, traced.weights[row, rank])
        inner = _product(before * traced.input[row][None], traced.inner[0].matrix(expert))
        output[row] += after * _product(traced.experts.activate(inner), traced.down.matrix(expert))[0]
    return output


def _product(rows: Tensor, linear: Linear) -> Tensor:
    assert isinstance(linear.weight, Tensor)
    return nn.functional.linear(rows, linear.weight.float(), linear.bias)


def _candidate_routers(traced: TracedRouter, linear: Linear, top_k: int) -> Iterator[Router]:
    numbers = [None, *_expert_numbers(traced, len(traced.weight))]
    scorings: tuple[Scoring, ...] = ("softmax", "sigmoid")
    for scales, scoring, correction, normalised in itertools.product(numbers, scorings, numbers, (True, False)):
        yield Router(
            linear=linear,
            scoring=scoring,
            score_correction=correction,
            top_k=top_k,
            normalised=normalised,
            scaling_factor=1.0,
            expert_scales=scales,
        )


def _expert_numbers(traced: TracedRouter, experts: int) -> Iterator[Tensor]:
    """The parameters, buffers and inputs of a router with one number for each expert, but its bias."""
    for numbers in (*traced.router.parameters(), *traced.router.buffers(), *traced.extra_inputs):
        if isinstance(numbers, Tensor) and numbers.numel() == experts and numbers is not traced.bias:
            yield numbers.detach().float().flatten().contiguous()
