"""Finds the second half of a layer in a trace: a dense MLP, experts, or both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.native.comparison import is_close, least_squares_ratio, require_close, residual_ratio
from engine.native.decoder import (
    NO_NORM,
    ExpertNorms,
    ExpertsSpec,
    GatedMlp,
    Linear,
    MlpBlock,
    Norm,
    UnsupportedArchitecture,
)
from engine.native.experts import find_expert_activation, find_router
from engine.native.gated_mlp import find_gated_mlp
from engine.native.trace import TracedExperts, TracedLinear, TracedNorm, TracedRouter
from engine.native.trace_reader import TraceReader


@dataclass(frozen=True, slots=True)
class Residual:
    """A residual connection: states = output_scale * (states before + scale * output)."""

    scale: float
    output_scale: float
    states: Tensor


def find_mlp_block(reader: TraceReader, states: Tensor) -> tuple[MlpBlock, Residual]:
    """The second half of a layer with the input `states`, and its residual connection.

    Raises UnsupportedArchitecture.
    """
    norm, normed = reader.read_norm(states)
    return _find_block(reader, norm, normed, states, is_parallel=False)


def find_parallel_mlp_block(
    reader: TraceReader, states: Tensor, norm: Norm, normed: Tensor, output: Tensor
) -> tuple[MlpBlock, Residual]:
    """The second half of a layer whose halves have the same input `states`. Raises UnsupportedArchitecture.

    norm, normed  the norm of the first half, and its output
    output        of the first half
    """
    if not is_close(normed, reader.next_input()):
        norm, normed = reader.read_norm(states)
    block, residual = _find_block(reader, norm, normed, states + output, is_parallel=True)
    if residual.scale != 1.0:
        raise UnsupportedArchitecture("its layers scale the sum of both halves")
    return block, residual


def _find_block(
    reader: TraceReader, norm: Norm, normed: Tensor, attended: Tensor, *, is_parallel: bool
) -> tuple[MlpBlock, Residual]:
    """A second half; its output is added to `attended`."""
    gated, experts, output = _find_parts(reader, normed)
    # A norm of other rows belongs to the next layer, of experts alone (Nemotron-H).
    is_normed = reader.next_are(TracedNorm, TracedRouter) and is_close(output, reader.next_input())
    if experts is None and is_normed:
        experts, output = _find_normed_experts(reader, attended, output)
    if experts is not None and gated is not None and gated.down.bias is not None:
        raise UnsupportedArchitecture("the dense MLP beside its experts has a bias")
    post_norm, output = reader.read_norm(output)
    residual = find_residual(attended, output, reader.next_hidden_states(attended))
    block = MlpBlock(
        norm=norm,
        gated=gated,
        experts=experts,
        post_norm=post_norm,
        residual_scale=residual.scale,
        parallel=is_parallel,
    )
    return block, residual


def find_residual(states: Tensor, output: Tensor, next_input: Tensor) -> Residual:
    """The residual connection of hidden states and an output. Raises UnsupportedArchitecture.

    next_input  of the operation after it
    """
    scale = residual_ratio(states, output, next_input)
    if is_close(states + scale * output, next_input):
        return Residual(scale, 1.0, states + scale * output)
    output_scale = least_squares_ratio(states + output, next_input)
    require_close("a layer", (states + output) * output_scale, next_input)
    return Residual(1.0, output_scale, (states + output) * output_scale)


def _find_parts(reader: TraceReader, rows: Tensor) -> tuple[GatedMlp | None, ExpertsSpec | None, Tensor]:
    """The dense MLP and the experts with the input `rows`, in any order, and the sum of their outputs."""
    gated: GatedMlp | None = None
    dense: Tensor | None = None
    gate: TracedLinear | None = None
    router: TracedRouter | None = None
    experts: TracedExperts | None = None
    while (event := reader.next_branch(rows)) is not None:
        if isinstance(event, TracedRouter):
            router = reader.read_event(TracedRouter)
        elif isinstance(event, TracedExperts):
            experts = reader.read_event(TracedExperts)
        elif event.output.shape[1] == 1:
            gate = reader.read_event(TracedLinear)
        elif gated is None:
            gated, dense = find_gated_mlp(reader, rows)
        else:
            raise UnsupportedArchitecture("the second half of its layers has more than one dense MLP")
    if router is None or experts is None:
        if dense is None or gate is not None or experts is not None:
            raise UnsupportedArchitecture("its MLP does not have one or two inner matrices and a down matrix")
        return gated, None, dense
    if router.norm != NO_NORM:
        raise UnsupportedArchitecture("its router has a norm, but not its experts")
    spec = _experts(router, experts, gate)
    if dense is None:
        return None, spec, experts.output
    return gated, spec, experts.output + (dense if gate is None else torch.sigmoid(gate.output) * dense)


def _find_normed_experts(reader: TraceReader, states: Tensor, dense: Tensor) -> tuple[ExpertsSpec, Tensor]:
    """The experts with the input `states` after a dense MLP, and the sum of the normed outputs of both."""
    dense_norm, dense = reader.read_norm(dense)
    router = reader.read_event(TracedRouter)
    require_close("a router", states, router.input)
    input_norm, inputs = reader.read_norm(states)
    experts = reader.read_event(TracedExperts)
    require_close("the experts", inputs, experts.input)
    output_norm, output = reader.read_norm(experts.output)
    norms = ExpertNorms(router=router.norm, input=input_norm, output=output_norm, dense=dense_norm)
    return replace(_experts(router, experts, None), norms=norms), dense + output


def _experts(router: TracedRouter, experts: TracedExperts, gate: TracedLinear | None) -> ExpertsSpec:
    require_close("its experts", router.weights, experts.weights)
    return ExpertsSpec(
        router=find_router(router),
        inner=experts.inner,
        activation=find_expert_activation(experts),
        down=experts.down,
        shared_gate=None if gate is None else _float32_linear(gate.linear),
        scales_inputs=experts.scales_inputs,
    )


def _float32_linear(linear: Linear) -> Linear:
    if not isinstance(linear.weight, Tensor):
        raise UnsupportedArchitecture("the gate beside its experts is quantised")
    return Linear(linear.weight.detach().float(), linear.bias)
