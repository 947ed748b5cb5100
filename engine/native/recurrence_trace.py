"""What recurrent layers take and make in a trace: each row by itself, behind states of anything, so that these show."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from engine.model import hooks
from engine.model.recurrence import Convolution, GatedDelta, StateSpace
from engine.native.decoder import UnsupportedArchitecture


@dataclass(frozen=True, slots=True)
class TracedConvolution:
    """A convolution along the sequence was called.

    before       [rows, channels, kernel - 1] the state
    taken, made  [rows, channels]
    """

    name: Hashable
    run: Convolution
    before: Tensor
    input: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedDeltaRule:
    """The gated delta rule was called, inside of a module.

    query, key, value  [rows, heads, width]
    decay, rate        [rows, value_heads], the one as logarithm
    before, after      [rows, value_heads, key_width, value_width] the state
    output               [rows, value_heads, value_width]
    """

    name: Hashable
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    before: Tensor
    after: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class TracedStateSpace:
    """A state space whose numbers are chosen by each token was called.

    before, after  [rows, heads, value_width, key_width] the state
    output           [rows, heads, value_width]
    """

    name: Hashable
    run: StateSpace
    before: Tensor
    after: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class TracedGatedNorm:
    """A norm was called with a gate for each number; all [..., width]."""

    module: nn.Module
    input: Tensor
    gate: Tensor
    output: Tensor


TracedRecurrence: TypeAlias = TracedConvolution | TracedDeltaRule | TracedStateSpace | TracedGatedNorm


def trace_recurrence(
    name: Hashable, run: hooks.RecurrentOperation, rows: int, module: nn.Module
) -> tuple[TracedRecurrence, list[Tensor]]:
    """Run a recurrent operation for each row alone: what happened, and the outputs. Raises UnsupportedArchitecture.

    module  that is being called
    """
    _, state = run(0, 1, None)
    generator = torch.Generator().manual_seed(0)
    before = [torch.randn(state.shape, generator=generator) for _ in range(rows)]
    outputs, after = zip(*(run(row, row + 1, before[row].to(state.dtype)) for row in range(rows)), strict=True)
    if isinstance(run, Convolution):
        made = torch.cat(outputs, -1)[0].T.clone()
        return TracedConvolution(name, run, torch.stack(before), run.rows[0].T.clone(), made), list(outputs)
    if isinstance(run, StateSpace):
        made = torch.cat(outputs, 1)[0].float()
        return TracedStateSpace(name, run, torch.cat(before), torch.cat(after).float(), made), list(outputs)
    if not isinstance(run, GatedDelta) or {"g", "beta"} != set(run.gates) or run.gates["g"].dim() != 3:
        raise UnsupportedArchitecture("it has recurrent layers of another kind")
    own = (run.query, run.key, run.value, run.gates["g"], run.gates["beta"])
    query, key, value, decay, rate = (tensor[0].float().clone() for tensor in own)
    event = TracedDeltaRule(
        name=name,
        module=module,
        query=query,
        key=key,
        value=value,
        decay=decay,
        beta=rate,
        before=torch.cat(before),
        after=torch.cat(after).float(),
        output=torch.cat(outputs, 1)[0].float(),
    )
    return event, list(outputs)
