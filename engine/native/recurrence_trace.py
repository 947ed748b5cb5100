"""Traced calls of recurrent layers: every row is computed alone, from a random state."""

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
    """A call of a causal convolution.

    before         [rows, channels, kernel - 1] the state
    input, output  [rows, channels]
    """

    name: Hashable
    operation: Convolution
    before: Tensor
    input: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedDeltaRule:
    """A call of the gated delta rule by a module.

    query, key, value  [rows, heads, width]
    decay              [rows, value_heads], logarithms
    beta               [rows, value_heads]
    before, after      [rows, value_heads, key_width, value_width] the state
    output             [rows, value_heads, value_width]
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
    """A call of a selective state space.

    before, after  [rows, heads, value_width, key_width] the state
    output         [rows, heads, value_width]
    """

    name: Hashable
    operation: StateSpace
    before: Tensor
    after: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class TracedGatedNorm:
    """A call of a norm with a gate; all tensors [..., width]."""

    module: nn.Module
    input: Tensor
    gate: Tensor
    output: Tensor


TracedRecurrence: TypeAlias = TracedConvolution | TracedDeltaRule | TracedStateSpace | TracedGatedNorm


def trace_recurrence(
    name: Hashable, operation: hooks.RecurrentOperation, rows: int, module: nn.Module
) -> tuple[TracedRecurrence, list[Tensor]]:
    """Run a recurrent operation for each row alone; the event and the outputs. Raises UnsupportedArchitecture.

    module  calls the operation
    """
    _, state = operation(0, 1, None)
    generator = torch.Generator().manual_seed(0)
    before = [torch.randn(state.shape, generator=generator) for _ in range(rows)]
    outputs, after = zip(*(operation(row, row + 1, before[row].to(state.dtype)) for row in range(rows)), strict=True)
    if isinstance(operation, Convolution):
        output = torch.cat(outputs, -1)[0].T.clone()
        event = TracedConvolution(name, operation, torch.stack(before), operation.rows[0].T.clone(), output)
        return event, list(outputs)
    if isinstance(operation, StateSpace):
        output = torch.cat(outputs, 1)[0].float()
        return TracedStateSpace(name, operation, torch.cat(before), torch.cat(after).float(), output), list(outputs)
    if (
        not isinstance(operation, GatedDelta)
        or {"g", "beta"} != set(operation.gates)
        or operation.gates["g"].dim() != 3
    ):
        raise UnsupportedArchitecture("it has recurrent layers of another kind")
    inputs = (operation.query, operation.key, operation.value, operation.gates["g"], operation.gates["beta"])
    query, key, value, decay, beta = (tensor[0].float().clone() for tensor in inputs)
    delta_rule = TracedDeltaRule(
        name=name,
        module=module,
        query=query,
        key=key,
        value=value,
        decay=decay,
        beta=beta,
        before=torch.cat(before),
        after=torch.cat(after).float(),
        output=torch.cat(outputs, 1)[0].float(),
    )
    return delta_rule, list(outputs)
