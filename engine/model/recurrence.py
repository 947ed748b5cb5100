"""Recurrent layers in packed batches: operations that mix tokens of a sequence, split by sequence.

transformers' mixers run unmodified: projections, norms and gates compute the whole packed row at once. Only the
operations that mix tokens, which every family calls by the same few names in its module, are replaced by versions that
split the row by sequence, start from each sequence's state and return the next state. Without an AttentionBackend
(hooks.py) the originals run. This also adds a scan from an initial state to Mamba-1, which transformers lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from engine.model import hooks

Operation: TypeAlias = Callable[..., Any]


def install(model: Any) -> bool:
    """Replace the operations in the modules of a model's code, once a process; whether the model has any."""
    has_operations = False
    for name in {type(module).__module__ for module in model.modules()}:
        namespace = sys.modules[name]
        for operation, packed in _PACKED_OPERATIONS.items():
            original = getattr(namespace, operation, None)
            if original is None:
                continue
            has_operations = True
            if not hasattr(original, "unpacked"):
                setattr(namespace, operation, _replace(original, packed, namespace))
    return has_operations


def _replace(original: Operation, packed: Operation, namespace: ModuleType) -> Operation:
    @wraps(original)
    def operation(*args: Any, **settings: Any) -> Any:
        if not hooks.has_backend():
            return original(*args, **settings)
        return packed(original, namespace, *args, **settings)

    operation.unpacked = original  # type: ignore[attr-defined]
    return operation


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal depthwise convolution (RecurrentOperation) of rows [1, channels, length]; its state is the last inputs.

    weight  [channels, kernel]
    bias    [channels], or None
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None

    def __call__(self, start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output of tokens [start, stop) from a state [channels, kernel - 1], and the next state."""
        channels, kernel = self.weight.shape
        before = self.rows.new_zeros(channels, kernel - 1) if state is None else state
        inputs = torch.cat((before, _slice(self.rows[0], 1, start, stop)), -1)
        # A copy: a view would keep the whole chunk in memory.
        return self._convolve(inputs[None]), inputs[:, inputs.shape[-1] - kernel + 1 :].clone()

    def run_rows(self, rows: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See RecurrentOperation."""
        inputs = torch.cat((states, _as_batch(self.rows, 2, rows)), -1)
        return self._convolve(inputs), inputs[..., 1:]

    def _convolve(self, inputs: Tensor) -> Tensor:
        """The output [batch, channels, length] of inputs [batch, channels, kernel - 1 + length]."""
        weight, groups = self.weight[:, None], len(self.weight)
        result = functional.conv1d(inputs.to(self.weight.dtype), weight, self.bias, groups=groups)
        if self.activation is not None:
            result = ACT2FN[self.activation](result)
        return result.to(self.rows.dtype)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The gated delta rule, or KDA (RecurrentOperation): query, key and value [1, length, heads, width].

    gates    by name, [1, length, heads, ...]
    chunked  the form for several tokens, which pads them to chunks of 64
    single   the form for one token
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gates: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    chunked: Operation
    single: Operation

    def __call__(self, start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output of tokens [start, stop) from a state [1, heads, key_width, value_width], and the next state."""
        cut = {name: _slice(gate, 1, start, stop) for name, gate in self.gates.items()}
        form = self.single if stop - start == 1 else self.chunked
        parts = (_slice(tensor, 1, start, stop) for tensor in (self.query, self.key, self.value))
        result, final = form(*parts, **cut, **self.settings, initial_state=state)
        return result, final

    def run_rows(self, rows: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See RecurrentOperation."""
        parts: dict[str, Any] = {name: _as_batch(getattr(self, name), 1, rows) for name in ("query", "key", "value")}
        gates = {name: _as_batch(gate, 1, rows) for name, gate in self.gates.items()}
        result, final = replace(self, **parts, gates=gates)(0, 1, states.flatten(0, 1))
        return result, final[:, None]


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba-2 (RecurrentOperation): rows [1, length, heads, width], dt [1, length, heads], a [heads], b and c [1,
    length, groups, state].
    """

    rows: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    chunk_size: int
    settings: Mapping[str, Any]
    scan: Operation

    def __call__(self, start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output of tokens [start, stop) from a state [1, heads, width, state], and the next state."""
        rows, dt, b, c = (_slice(tensor, 1, start, stop) for tensor in (self.rows, self.dt, self.b, self.c))
        # Tokens are padded to whole chunks: a chunk is at most as long as the input.
        size = min(self.chunk_size, stop - start)
        result, final = self.scan(rows, dt, self.a, b, c, size, **self.settings, initial_states=state)
        return result, final

    def run_rows(self, rows: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See RecurrentOperation."""
        parts: dict[str, Any] = {name: _as_batch(getattr(self, name), 1, rows) for name in ("rows", "dt", "b", "c")}
        result, final = replace(self, **parts)(0, 1, states.flatten(0, 1))
        return result, final[:, None]


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """Mamba-1 (RecurrentOperation): rows, dt and gate [1, channels, length], a [channels, state], b and c [1, state,
    length].

    The original starts from zeros. The scan is linear in its state, so an initial state adds exp(a * sum of dt so far)
    * state, multiplied by c and the gate.
    """

    rows: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    gate: Tensor | None
    settings: Mapping[str, Any]
    scan: Operation

    def __call__(self, start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output of tokens [start, stop) from a state [1, channels, state], and the next state."""
        rows, dt, b, c = (_slice(tensor, -1, start, stop) for tensor in (self.rows, self.dt, self.b, self.c))
        gate = None if self.gate is None else _slice(self.gate, -1, start, stop)
        result, final = self.scan(rows, dt, self.a, b, c, z=gate, **self.settings)
        if state is None:
            return result, final
        bias = self.settings.get("delta_bias")
        step = dt if bias is None else dt + bias.to(dt.dtype)[..., None]
        elapsed = (functional.softplus(step) if self.settings.get("delta_softplus") else step).cumsum(-1)
        carried = torch.exp(self.a[None, :, :, None] * elapsed[:, :, None]) * state[..., None]
        carried_output = torch.einsum("bdst,bst->bdt", carried, c.to(carried.dtype))
        carried_output = carried_output if gate is None else carried_output * functional.silu(gate)
        return result + carried_output.to(result.dtype), final + carried[..., -1].to(final.dtype)

    def run_rows(self, rows: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See RecurrentOperation."""
        parts: dict[str, Any] = {name: _as_batch(getattr(self, name), 2, rows) for name in ("rows", "dt", "b", "c")}
        gate = None if self.gate is None else _as_batch(self.gate, 2, rows)
        result, final = replace(self, **parts, gate=gate)(0, 1, states.flatten(0, 1))
        return result, final[:, None]


def _convolve(
    original: Operation,
    namespace: ModuleType,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    return torch.cat(hooks.recur("convolution", Convolution(rows, weight, bias, activation)), -1)


def _gated_delta(
    original: Operation, namespace: ModuleType, query: Tensor, key: Tensor, value: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    gates: dict[str, Tensor] = {name: settings.pop(name) for name in ("g", "beta") if name in settings}
    settings |= {"output_final_state": True, "cu_seqlens": None}
    settings.pop("initial_state", None)
    single = getattr(namespace, _SINGLE_TOKEN_OPERATIONS[original.__name__], original)
    run = GatedDelta(query, key, value, gates, settings, original, single)
    return torch.cat(hooks.recur("scan", run), 1), _no_state(query)


def _mamba2(
    original: Operation,
    namespace: ModuleType,
    rows: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    settings |= {"return_final_states": True}
    settings.pop("initial_states", None)
    run = StateSpace(rows, dt, a, b, c, chunk_size, settings, original)
    return torch.cat(hooks.recur("scan", run), 1), _no_state(rows)


def _mamba1(
    original: Operation,
    namespace: ModuleType,
    rows: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    gate = settings.pop("z", None)
    settings |= {"return_last_state": True}
    run = SelectiveScan(rows, dt, a, b, c, gate, settings, original)
    return torch.cat(hooks.recur("scan", run), -1), _no_state(rows)


def _slice(tensor: Tensor, dimension: int, start: int, stop: int) -> Tensor:
    """Tokens [start, stop). A single token gets the strides of a batch of one: matrix products depend on them."""
    tokens = tensor.narrow(dimension, start, stop - start)
    return tokens.clone(memory_format=torch.contiguous_format) if stop - start == 1 else tokens


def _as_batch(tensor: Tensor, dimension: int, rows: Tensor) -> Tensor:
    """Some tokens of a tensor [1, ...], with tokens along `dimension`, as a batch of sequences of one token."""
    return tensor.index_select(dimension, rows).transpose(0, dimension)


def _no_state(like: Tensor) -> Tensor:
    """A placeholder for the last state, which mixers pass to the cache facade; the backend has the state."""
    return like.new_empty(0)


_PACKED_OPERATIONS: dict[str, Operation] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _gated_delta,
    "chunk_kimi_delta_attention": _gated_delta,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}

_SINGLE_TOKEN_OPERATIONS = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
