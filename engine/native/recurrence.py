"""Finds the recurrence of a layer (linear attention, state space, convolution) in a trace by recomputing it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.native.comparison import is_close, require_close
from engine.native.decoder import (
    ColumnRange,
    ConvolutionSpec,
    DeltaRuleSpec,
    GatedConvolutionSpec,
    Linear,
    Norm,
    RecurrenceSpec,
    StateSpaceSpec,
    UnsupportedArchitecture,
)
from engine.native.norm import find_gated_norm, find_group_norm
from engine.native.recurrence_trace import TracedConvolution, TracedDeltaRule, TracedGatedNorm, TracedStateSpace
from engine.native.trace import Event, TracedLinear

EventT = TypeVar("EventT", TracedConvolution, TracedDeltaRule, TracedStateSpace, TracedGatedNorm)

_UNSUPPORTED = "its recurrences are computed by other operations"
# Added to the squared L2 norm of a query or key, as in transformers.
_L2_EPSILON = 1e-6
# Beta is a sigmoid, or twice that in models with negative eigenvalues.
_MAX_BETAS = (1.0, 2.0)


def find_recurrence(norm: Norm, inputs: Tensor, events: Sequence[Event]) -> tuple[RecurrenceSpec, Tensor]:
    """The recurrence of a layer, and its output rows. Raises UnsupportedArchitecture.

    norm    before the projections
    inputs  its output [rows, width]
    events  between the norm and the output projection
    """
    linears = [event for event in events if isinstance(event, TracedLinear)]
    for linear in linears:
        require_close("a projection", inputs, linear.input)
    if any(isinstance(event, TracedDeltaRule) for event in events):
        return _find_delta_rule(norm, linears, events)
    if any(isinstance(event, TracedStateSpace) for event in events):
        return _find_state_space(norm, linears, events)
    return _find_gated_convolution(norm, linears, events)


def _find_gated_convolution(
    norm: Norm, linears: Sequence[TracedLinear], events: Sequence[Event]
) -> tuple[GatedConvolutionSpec, Tensor]:
    """A gated short convolution: its three factors are thirds of the projected columns, in any order."""
    traced = _single(events, TracedConvolution)
    columns, channels = torch.cat([linear.output for linear in linears], 1), traced.input.shape[1]
    if (
        columns.shape[1] != 3 * channels
        or len(events) != len(linears) + 1
        or not is_close(_convolve(traced), traced.output)
    ):
        raise UnsupportedArchitecture(_UNSUPPORTED)
    factors = torch.split(columns, channels, 1)
    for first, second, third in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        if is_close(factors[first] * factors[second], traced.input):
            chosen = [
                range(third_index * channels, (third_index + 1) * channels) for third_index in (first, second, third)
            ]
            ranges = _column_ranges([*itertools.chain(*chosen)], _widths(linears))
            spec = GatedConvolutionSpec(
                norm=norm,
                projections=_projections(linears),
                column_ranges=tuple(ranges),
                convolution=_convolution(traced),
            )
            return spec, factors[third] * traced.output
    raise UnsupportedArchitecture(_UNSUPPORTED)


def _find_delta_rule(
    norm: Norm, linears: Sequence[TracedLinear], events: Sequence[Event]
) -> tuple[DeltaRuleSpec, Tensor]:
    """The gated delta rule; its output is [rows, value_heads * value_width]."""
    convolution, delta_rule = _single(events, TracedConvolution), _single(events, TracedDeltaRule)
    gated_norm = _single(events, TracedGatedNorm)
    if not is_close(functional.silu(_convolve(convolution)), convolution.output):
        raise UnsupportedArchitecture(_UNSUPPORTED)
    _check_delta_rule(convolution, delta_rule)
    require_close("the norm after its linear attention", delta_rule.output.flatten(0, 1), gated_norm.input)
    rows, value_heads, value_width = delta_rule.output.shape
    columns = torch.cat([linear.output for linear in linears], 1)
    decay_scale, dt_bias, decays = _find_decays(delta_rule, columns)
    max_beta, betas = _find_betas(delta_rule, columns)
    channels = _equal_columns(columns, convolution.input)
    gates = _equal_columns(columns, gated_norm.gate.reshape(rows, -1))
    chosen = [column for options in (channels, decays, betas, gates) for column in _choose_columns(options)]
    spec = DeltaRuleSpec(
        norm=norm,
        projections=_projections(linears),
        column_ranges=tuple(_column_ranges(chosen, _widths(linears))),
        convolution=_convolution(convolution),
        key_heads=delta_rule.key.shape[1],
        value_heads=value_heads,
        key_width=delta_rule.key.shape[2],
        value_width=value_width,
        decay_scale=decay_scale,
        dt_bias=dt_bias,
        max_beta=max_beta,
        head_norm=find_gated_norm(gated_norm.module, gated_norm.input, gated_norm.gate, gated_norm.output),
        state_name=delta_rule.name,
    )
    return spec, gated_norm.output.reshape(rows, -1)


def _find_state_space(
    norm: Norm, linears: Sequence[TracedLinear], events: Sequence[Event]
) -> tuple[StateSpaceSpec, Tensor]:
    """A selective state space; its output is [rows, heads * value_width]."""
    convolution, traced = _single(events, TracedConvolution), _single(events, TracedStateSpace)
    gated_norm = _single(events, TracedGatedNorm)
    operation, output = traced.operation, traced.output.flatten(1)
    dt_bias, skip = (operation.settings.get(name) for name in ("dt_bias", "D"))
    if not is_close(functional.silu(_convolve(convolution)), convolution.output) or dt_bias is None or skip is None:
        raise UnsupportedArchitecture(_UNSUPPORTED)
    _, _, heads, value_width = operation.rows.shape
    groups, key_width = operation.b.shape[2:]
    columns = torch.cat([linear.output for linear in linears], 1)
    channels, dts, gates = (
        _equal_columns(columns, targets) for targets in (convolution.input, operation.dt[0], gated_norm.gate)
    )
    chosen = _choose_columns([*channels, *dts])
    widths = _widths(linears)
    # Space for the decays of the heads is left before the gates.
    gate_ranges = (
        replace(gate_range, target=gate_range.target + len(chosen) + heads)
        for gate_range in _column_ranges(_choose_columns(gates), widths)
    )
    inputs = (gated_norm.input, gated_norm.gate, gated_norm.output)
    spec = StateSpaceSpec(
        norm=norm,
        projections=_projections(linears),
        column_ranges=(*_column_ranges(chosen, widths), *gate_ranges),
        convolution=_convolution(convolution),
        heads=heads,
        groups=groups,
        value_width=value_width,
        key_width=key_width,
        decay_scale=_float32_copy(-operation.a),
        dt_bias=_float32_copy(dt_bias),
        skip=_float32_copy(skip),
        dt_limits=operation.settings.get("dt_limit", (0.0, float("inf"))),
        group_norm=find_group_norm(gated_norm.module, *inputs, (1, groups)),
        state_name=traced.name,
    )
    _check_state_space(spec, convolution, traced)
    require_close("the norm after its state space", output, gated_norm.input)
    return spec, gated_norm.output


def _check_state_space(spec: StateSpaceSpec, convolution: TracedConvolution, traced: TracedStateSpace) -> None:
    """Raise UnsupportedArchitecture unless one step after the convolution gives the traced state and output."""
    operation = traced.operation
    parts = torch.cat([part[0].flatten(1) for part in (operation.rows, operation.b, operation.c)], 1)
    if not torch.equal(parts, convolution.output):
        raise UnsupportedArchitecture(_UNSUPPORTED)
    dt = functional.softplus(operation.dt[0] + spec.dt_bias).clamp(*spec.dt_limits)
    value, group = operation.rows[0].float(), spec.heads // spec.groups
    key, query = (part[0].float().repeat_interleave(group, 1) for part in (operation.b, operation.c))
    state = traced.before * (-spec.decay_scale * dt).exp()[..., None, None]
    state = state + (value * dt[..., None])[..., None] * key[:, :, None]
    output = (state * query[:, :, None]).sum(-1) + spec.skip[:, None] * value
    if not (is_close(state, traced.after) and is_close(output, traced.output)):
        raise UnsupportedArchitecture(_UNSUPPORTED)


def _single(events: Sequence[Event], kind: type[EventT]) -> EventT:
    """The only event of a kind."""
    matches = [event for event in events if isinstance(event, kind)]
    if len(matches) != 1:
        raise UnsupportedArchitecture(_UNSUPPORTED)
    return matches[0]


def _projections(linears: Sequence[TracedLinear]) -> tuple[Linear, ...]:
    return tuple(linear.linear for linear in linears)


def _widths(linears: Sequence[TracedLinear]) -> list[int]:
    return [linear.output.shape[1] for linear in linears]


def _convolve(traced: TracedConvolution) -> Tensor:
    """The convolution of the state and the input of each row."""
    inputs, operation = torch.cat((traced.before, traced.input[..., None]), -1), traced.operation
    return (inputs * operation.weight.float()).sum(-1) + (0.0 if operation.bias is None else operation.bias.float())


def _convolution(traced: TracedConvolution) -> ConvolutionSpec:
    operation = traced.operation
    bias = None if operation.bias is None else _float32_copy(operation.bias)
    return ConvolutionSpec(_float32_copy(operation.weight.T), bias, traced.name)


def _check_delta_rule(convolution: TracedConvolution, traced: TracedDeltaRule) -> None:
    """Raise UnsupportedArchitecture unless one step after the convolution gives the traced state and output."""
    widths = [part.shape[1] * part.shape[2] for part in (traced.query, traced.key, traced.value)]
    if sum(widths) != convolution.output.shape[1]:
        raise UnsupportedArchitecture(_UNSUPPORTED)
    parts = zip(torch.split(convolution.output, widths, 1), (traced.query, traced.key, traced.value), strict=True)
    if not all(torch.equal(columns, part.flatten(1)) for columns, part in parts):
        raise UnsupportedArchitecture(_UNSUPPORTED)
    group = traced.value.shape[1] // traced.key.shape[1]
    query, key = (_l2_normalise(part).repeat_interleave(group, 1) for part in (traced.query, traced.key))
    state = traced.before * traced.decay.exp()[..., None, None]
    change = (traced.value - torch.einsum("rhkv,rhk->rhv", state, key)) * traced.beta[..., None]
    state = state + key[..., None] * change[:, :, None]
    output = torch.einsum("rhkv,rhk->rhv", state, query) * query.shape[-1] ** -0.5
    if not (is_close(state, traced.after) and is_close(output, traced.output)):
        raise UnsupportedArchitecture(_UNSUPPORTED)


def _l2_normalise(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _L2_EPSILON)


def _find_decays(traced: TracedDeltaRule, columns: Tensor) -> tuple[Tensor, Tensor, list[Collection[int]]]:
    """decay_scale, dt_bias, and for each head the columns that may be its decay input."""
    heads = traced.decay.shape[1]
    parameters = [
        _float32_copy(parameter) for parameter in traced.module.parameters(recurse=False) if parameter.shape == (heads,)
    ]
    for logarithm, dt_bias in itertools.permutations(parameters, 2):
        decay_scale = logarithm.exp()
        # The inverse of softplus.
        dt = (-traced.decay / decay_scale).double()
        inputs = dt + torch.log(-torch.expm1(-dt)) - dt_bias
        options = _close_columns(columns.double(), inputs, 1e-4)
        if all(options):
            decay_inputs = columns[:, [next(iter(option)) for option in options]]
            if is_close(-decay_scale * functional.softplus(decay_inputs + dt_bias), traced.decay):
                return decay_scale, dt_bias, options
    raise UnsupportedArchitecture(_UNSUPPORTED)


def _find_betas(traced: TracedDeltaRule, columns: Tensor) -> tuple[float, list[Collection[int]]]:
    """max_beta, and for each head the columns that may be its beta input."""
    for max_beta in _MAX_BETAS:
        options = _close_columns(max_beta * torch.sigmoid(columns).double(), traced.beta.double(), 1e-6)
        if all(options):
            return max_beta, options
    raise UnsupportedArchitecture(_UNSUPPORTED)


def _close_columns(columns: Tensor, targets: Tensor, tolerance: float) -> list[Collection[int]]:
    """For each column of `targets` the columns that are equal but for rounding."""
    distances = torch.cdist(targets.T.contiguous(), columns.T.contiguous(), p=float("inf"))
    limits = tolerance * (1.0 + targets.abs().amax(0))
    return [torch.nonzero(row <= limit).flatten().tolist() for row, limit in zip(distances, limits, strict=True)]


def _equal_columns(columns: Tensor, targets: Tensor) -> list[Collection[int]]:
    """For each column of `targets` the columns with the same bits."""
    numbers: dict[bytes, list[int]] = {}
    for index, column in enumerate(columns.T.contiguous().numpy()):
        numbers.setdefault(column.tobytes(), []).append(index)
    return [numbers.get(column.tobytes(), ()) for column in targets.T.contiguous().numpy()]


def _choose_columns(options: Sequence[Collection[int]]) -> list[int]:
    """One option for each place; of several, the one next to the choice of a neighbour."""
    if not all(options):
        raise UnsupportedArchitecture(_UNSUPPORTED)
    chosen = [next(iter(option)) if len(option) == 1 else None for option in options]
    for step, places in ((1, range(1, len(options))), (-1, range(len(options) - 2, -1, -1))):
        for place in places:
            neighbour = chosen[place - step]
            if chosen[place] is None and neighbour is not None and neighbour + step in options[place]:
                chosen[place] = neighbour + step
    return [next(iter(option)) if column is None else column for column, option in zip(chosen, options, strict=True)]


def _column_ranges(columns: Sequence[int], widths: Sequence[int]) -> Iterator[ColumnRange]:
    """Columns of concatenated matrices of some widths as ranges, each within one matrix."""
    starts = [0, *itertools.accumulate(widths)]
    first = 0
    for end in range(1, len(columns) + 1):
        if end < len(columns) and columns[end] == columns[end - 1] + 1 and columns[end] not in starts:
            continue
        matrix = sum(start <= columns[first] for start in starts) - 1
        yield ColumnRange(matrix, columns[first] - starts[matrix], first, end - first)
        first = end


def _float32_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous().clone()
