"""Finds the second half of a layer: the matrices that all rows go through, and the experts that some do."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.native.comparison import is_close, least_squares_ratio, require_close
from engine.native.decoder import ExpertsSpec, GatedMlp, Linear, MlpBlock, Norm, UnsupportedArchitecture
from engine.native.experts import find_expert_activation, find_router
from engine.native.gated_mlp import find_gated
from engine.native.trace import TracedExperts, TracedLinear, TracedRouter
from engine.native.trace_reader import TraceReader


def find_mlp(
    walk: TraceReader, states: Tensor, norm: Norm, normed: Tensor, beside: Tensor | None
) -> tuple[MlpBlock, Tensor]:
    """The second half, and the states behind it. Raises UnsupportedArchitecture.

    states  that enter it
    norm    the first half's, and what it made of states
    beside  what the first half adds, where it reads the same states; None: the states have it
    """
    if beside is None or not is_close(normed, walk.next_input()):
        norm, normed = walk.read_norm(states)
    gated, experts, made = _parts(walk, normed)
    after, made = walk.read_norm(made)
    whole = states if beside is None else states + beside
    share = least_squares_ratio(made, walk.next_hidden_states(whole) - whole)
    states = whole + share * made
    require_close("a layer", states, walk.next_input())
    if beside is not None and share != 1.0:
        raise UnsupportedArchitecture("its layers add parts of two halves at once")
    mlp = MlpBlock(
        norm=norm, gated=gated, experts=experts, post_norm=after, residual_scale=share, parallel=beside is not None
    )
    return mlp, states


def _parts(walk: TraceReader, rows: Tensor) -> tuple[GatedMlp | None, ExpertsSpec | None, Tensor]:
    """What rows go through, in whatever order, and the sum of what that makes."""
    gated: GatedMlp | None = None
    own: Tensor | None = None
    gate: TracedLinear | None = None
    routed: TracedRouter | None = None
    mixed: TracedExperts | None = None
    while (event := walk.next_branch(rows)) is not None:
        if isinstance(event, TracedRouter):
            routed = walk.read_event(TracedRouter)
        elif isinstance(event, TracedExperts):
            mixed = walk.read_event(TracedExperts)
        elif event.output.shape[1] == 1:
            gate = walk.read_event(TracedLinear)
        elif gated is None:
            gated, own = find_gated(walk, rows)
        else:
            raise UnsupportedArchitecture("the second half of its layers has more parts")
    if routed is None or mixed is None:
        if own is None or gate is not None or mixed is not None:
            raise UnsupportedArchitecture("the second half of its layers is not of one matrix or two, and one more")
        return gated, None, own
    experts = _experts(routed, mixed, gate)
    if own is None:
        return None, experts, mixed.output
    if gated is not None and gated.down.bias is not None:
        raise UnsupportedArchitecture("what all rows go through beside experts has a bias")
    return gated, experts, mixed.output + (own if gate is None else torch.sigmoid(gate.output) * own)


def _experts(routed: TracedRouter, mixed: TracedExperts, gate: TracedLinear | None) -> ExpertsSpec:
    require_close("its experts", routed.weights, mixed.weights)
    return ExpertsSpec(
        router=find_router(routed),
        inner=mixed.inner,
        activation=find_expert_activation(mixed),
        down=mixed.down,
        shared_gate=None if gate is None else _plain(gate.linear),
    )


def _plain(linear: Linear) -> Linear:
    """A small matrix, in float32."""
    if not isinstance(linear.weight, Tensor):
        raise UnsupportedArchitecture("the gate beside its experts is quantised")
    return Linear(linear.weight.detach().float(), linear.bias)
