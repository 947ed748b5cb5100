"""Finds the recurrence of a layer, linear attention or a convolution, by computing its parts anew."""

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
    Norm,
    RecurrenceSpec,
    StateSpaceSpec,
    UnsupportedArchitecture,
)
from engine.native.norm import find_gated_norm, find_group_norm
from engine.native.recurrence_trace import TracedConvolution, TracedDeltaRule, TracedGatedNorm, TracedStateSpace
from engine.native.trace import Event, TracedLinear

One = TypeVar("One", TracedConvolution, TracedDeltaRule, TracedStateSpace, TracedGatedNorm)

_OTHER = "its recurrences are made in another way"
# What is added to the square of a query's or key's length, as in transformers.
_L2_EPSILON = 1e-6
# A rate is a sigmoid, or twice that, where states may change their sign.
_MAX_BETAS = (1.0, 2.0)


def find_recurrence(norm: Norm, entering: Tensor, events: Sequence[Event]) -> tuple[RecurrenceSpec, Tensor]:
    """The recurrence of a layer, and the rows that it makes. Raises UnsupportedArchitecture.

    norm      the layer's first
    entering  what it makes, [rows, width]
    events    from there to the matrix that takes what the recurrence makes
    """
    matrices = [event for event in events if isinstance(event, TracedLinear)]
    for matrix in matrices:
        require_close("a projection", entering, matrix.input)
    if any(isinstance(event, TracedDeltaRule) for event in events):
        return _find_delta_rule(norm, matrices, events)
    if any(isinstance(event, TracedStateSpace) for event in events):
        return _find_state_space(norm, matrices, events)
    return _find_gated_convolution(norm, matrices, events)


def _find_gated_convolution(
    norm: Norm, matrices: Sequence[TracedLinear], events: Sequence[Event]
) -> tuple[GatedConvolutionSpec, Tensor]:
    """A convolution between two products, of thirds of what one matrix makes."""
    convolved = _single(events, TracedConvolution)
    columns, channels = torch.cat([matrix.output for matrix in matrices], 1), convolved.input.shape[1]
    if (
        columns.shape[1] != 3 * channels
        or len(events) != len(matrices) + 1
        or not is_close(_convolve(convolved), convolved.output)
    ):
        raise UnsupportedArchitecture(_OTHER)
    parts = torch.split(columns, channels, 1)
    for first, second, last in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        if is_close(parts[first] * parts[second], convolved.input):
            chosen = [range(at * channels, (at + 1) * channels) for at in (first, second, last)]
            runs = _column_ranges([*itertools.chain(*chosen)], [matrix.output.shape[1] for matrix in matrices])
            linears = tuple(matrix.linear for matrix in matrices)
            way = GatedConvolutionSpec(
                norm=norm, projections=linears, column_ranges=tuple(runs), convolution=_convolution(convolved)
            )
            return way, parts[last] * convolved.output
    raise UnsupportedArchitecture(_OTHER)


def _find_delta_rule(
    norm: Norm, matrices: Sequence[TracedLinear], events: Sequence[Event]
) -> tuple[DeltaRuleSpec, Tensor]:
    """Linear attention by the gated delta rule, and what it makes [rows, value_heads * value_width]."""
    convolved, scanned, last = (
        _single(events, TracedConvolution),
        _single(events, TracedDeltaRule),
        _single(events, TracedGatedNorm),
    )
    if not is_close(functional.silu(_convolve(convolved)), convolved.output):
        raise UnsupportedArchitecture(_OTHER)
    _check_delta_rule(convolved, scanned)
    require_close("the norm behind its linear attention", scanned.output.flatten(0, 1), last.input)
    rows, value_heads, value_width = scanned.output.shape
    columns = torch.cat([matrix.output for matrix in matrices], 1)
    speed, shift, decays = _find_decays(scanned, columns)
    most, rates = _find_betas(scanned, columns)
    channels, gates = _equal_columns(columns, convolved.input), _equal_columns(columns, last.gate.reshape(rows, -1))
    chosen = [place for options in (channels, decays, rates, gates) for place in _choose_columns(options)]
    way = DeltaRuleSpec(
        norm=norm,
        projections=tuple(matrix.linear for matrix in matrices),
        column_ranges=tuple(_column_ranges(chosen, [matrix.output.shape[1] for matrix in matrices])),
        convolution=_convolution(convolved),
        key_heads=scanned.key.shape[1],
        value_heads=value_heads,
        key_width=scanned.key.shape[2],
        value_width=value_width,
        decay_scale=speed,
        dt_bias=shift,
        max_beta=most,
        head_norm=find_gated_norm(last.module, last.input, last.gate, last.output),
        state_name=scanned.name,
    )
    return way, last.output.reshape(rows, -1)


def _find_state_space(
    norm: Norm, matrices: Sequence[TracedLinear], events: Sequence[Event]
) -> tuple[StateSpaceSpec, Tensor]:
    """A state space whose numbers are chosen by each token, and what it makes [rows, heads * value_width]."""
    convolved, seen, last = (
        _single(events, TracedConvolution),
        _single(events, TracedStateSpace),
        _single(events, TracedGatedNorm),
    )
    run, made = seen.run, seen.output.flatten(1)
    shift, direct = (run.settings.get(name) for name in ("dt_bias", "D"))
    if not is_close(functional.silu(_convolve(convolved)), convolved.output) or shift is None or direct is None:
        raise UnsupportedArchitecture(_OTHER)
    _, _, heads, value_width = run.rows.shape
    groups, key_width = run.b.shape[2:]
    columns = torch.cat([matrix.output for matrix in matrices], 1)
    places = [_equal_columns(columns, part) for part in (convolved.input, run.dt[0], last.gate)]
    chosen = [_choose_columns([*places[0], *places[1]]), _choose_columns(places[2])]
    widths = [matrix.output.shape[1] for matrix in matrices]
    gates = (replace(own, first=own.first + len(chosen[0]) + heads) for own in _column_ranges(chosen[1], widths))
    way = StateSpaceSpec(
        norm=norm,
        projections=tuple(matrix.linear for matrix in matrices),
        column_ranges=(*_column_ranges(chosen[0], widths), *gates),
        convolution=_convolution(convolved),
        heads=heads,
        groups=groups,
        value_width=value_width,
        key_width=key_width,
        decay_scale=_float32_copy(-run.a),
        dt_bias=_float32_copy(shift),
        direct=_float32_copy(direct),
        dt_limits=run.settings.get("dt_limit", (0.0, float("inf"))),
        group_norm=find_group_norm(last.module, last.input, last.gate, last.output, (1, groups)),
        state_name=seen.name,
    )
    _check_state_space(way, convolved, seen)
    require_close("the norm behind its state space", made, last.input)
    return way, last.output


def _check_state_space(way: StateSpaceSpec, convolved: TracedConvolution, seen: TracedStateSpace) -> None:
    """Raise UnsupportedArchitecture where one step, from what the convolution makes, comes to something else."""
    run = seen.run
    parts = torch.cat([part[0].flatten(1) for part in (run.rows, run.b, run.c)], 1)
    if not torch.equal(parts, convolved.output):
        raise UnsupportedArchitecture(_OTHER)
    pace = functional.softplus(run.dt[0] + way.dt_bias).clamp(*way.dt_limits)
    value, shares = run.rows[0].float(), way.heads // way.groups
    key, query = (part[0].float().repeat_interleave(shares, 1) for part in (run.b, run.c))
    state = seen.before * (-way.decay_scale * pace).exp()[..., None, None]
    state = state + (value * pace[..., None])[..., None] * key[:, :, None]
    made = (state * query[:, :, None]).sum(-1) + way.direct[:, None] * value
    if not (is_close(state, seen.after) and is_close(made, seen.output)):
        raise UnsupportedArchitecture(_OTHER)


def _single(events: Sequence[Event], kind: type[One]) -> One:
    found = [event for event in events if isinstance(event, kind)]
    if len(found) != 1:
        raise UnsupportedArchitecture(_OTHER)
    return found[0]


def _convolve(seen: TracedConvolution) -> Tensor:
    """What a convolution makes of its state and the row's own inputs."""
    inputs = torch.cat((seen.before, seen.input[..., None]), -1)
    return (inputs * seen.run.weight.float()).sum(-1) + (0.0 if seen.run.bias is None else seen.run.bias.float())


def _convolution(seen: TracedConvolution) -> ConvolutionSpec:
    bias = None if seen.run.bias is None else _float32_copy(seen.run.bias)
    return ConvolutionSpec(_float32_copy(seen.run.weight.T), bias, seen.name)


def _check_delta_rule(convolved: TracedConvolution, seen: TracedDeltaRule) -> None:
    """Raise UnsupportedArchitecture where one step of the rule, from what the convolution makes, comes to something else."""
    widths = [part.shape[1] * part.shape[2] for part in (seen.query, seen.key, seen.value)]
    if sum(widths) != convolved.output.shape[1]:
        raise UnsupportedArchitecture(_OTHER)
    parts = zip(torch.split(convolved.output, widths, 1), (seen.query, seen.key, seen.value), strict=True)
    if not all(torch.equal(made, part.flatten(1)) for made, part in parts):
        raise UnsupportedArchitecture(_OTHER)
    shares = seen.value.shape[1] // seen.key.shape[1]
    query, key = (_l2_normalise(part).repeat_interleave(shares, 1) for part in (seen.query, seen.key))
    state = seen.before * seen.decay.exp()[..., None, None]
    change = (seen.value - torch.einsum("rhkv,rhk->rhv", state, key)) * seen.beta[..., None]
    state = state + key[..., None] * change[:, :, None]
    made = torch.einsum("rhkv,rhk->rhv", state, query) * query.shape[-1] ** -0.5
    if not (is_close(state, seen.after) and is_close(made, seen.output)):
        raise UnsupportedArchitecture(_OTHER)


def _l2_normalise(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _L2_EPSILON)


def _find_decays(seen: TracedDeltaRule, columns: Tensor) -> tuple[Tensor, Tensor, list[Collection[int]]]:
    """Speed and shift, and for each head the columns that its decay may be made of."""
    heads = seen.decay.shape[1]
    own = [_float32_copy(one) for one in seen.module.parameters(recurse=False) if one.shape == (heads,)]
    for logarithm, shift in itertools.permutations(own, 2):
        speed = logarithm.exp()
        # The inverse of softplus.
        made = (-seen.decay / speed).double()
        wanted = made + torch.log(-torch.expm1(-made)) - shift
        options = _nearest(columns.double(), wanted, 1e-4)
        if all(options):
            found = columns[:, [next(iter(option)) for option in options]]
            if is_close(-speed * functional.softplus(found + shift), seen.decay):
                return speed, shift, options
    raise UnsupportedArchitecture(_OTHER)


def _find_betas(seen: TracedDeltaRule, columns: Tensor) -> tuple[float, list[Collection[int]]]:
    """By how much a sigmoid is multiplied, and for each head the columns that its rate may be made of."""
    for most in _MAX_BETAS:
        options = _nearest(most * torch.sigmoid(columns).double(), seen.beta.double(), 1e-6)
        if all(options):
            return most, options
    raise UnsupportedArchitecture(_OTHER)


def _nearest(columns: Tensor, wanted: Tensor, tolerance: float) -> list[Collection[int]]:
    """For each column of `wanted` those of `columns` that are the same but for rounding."""
    apart = torch.cdist(wanted.T.contiguous(), columns.T.contiguous(), p=float("inf"))
    allowed = tolerance * (1.0 + wanted.abs().amax(0))
    return [torch.nonzero(row <= limit).flatten().tolist() for row, limit in zip(apart, allowed, strict=True)]


def _equal_columns(columns: Tensor, wanted: Tensor) -> list[Collection[int]]:
    """For each column of `wanted` those of `columns` that are the very same."""
    places: dict[bytes, list[int]] = {}
    for at, column in enumerate(columns.T.contiguous().numpy()):
        places.setdefault(column.tobytes(), []).append(at)
    return [places.get(column.tobytes(), ()) for column in wanted.T.contiguous().numpy()]


def _choose_columns(options: Sequence[Collection[int]]) -> list[int]:
    """One of the options for each place: where there are several, what stands beside those of its neighbours."""
    if not all(options):
        raise UnsupportedArchitecture(_OTHER)
    chosen = [next(iter(option)) if len(option) == 1 else None for option in options]
    for step, places in ((1, range(1, len(options))), (-1, range(len(options) - 2, -1, -1))):
        for at in places:
            neighbour = chosen[at - step]
            if chosen[at] is None and neighbour is not None and neighbour + step in options[at]:
                chosen[at] = neighbour + step
    return [next(iter(option)) if own is None else own for own, option in zip(chosen, options, strict=True)]


def _column_ranges(columns: Sequence[int], widths: Sequence[int]) -> Iterator[ColumnRange]:
    """Columns of all matrices side by side, as runs of them within one matrix."""
    starts = [0, *itertools.accumulate(widths)]
    first = 0
    for at in range(1, len(columns) + 1):
        if at < len(columns) and columns[at] == columns[at - 1] + 1 and columns[at] not in starts:
            continue
        matrix = sum(start <= columns[first] for start in starts) - 1
        yield ColumnRange(matrix, columns[first] - starts[matrix], first, at - first)
        first = at


def _float32_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous().clone()
