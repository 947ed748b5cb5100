"""Watches a model run a few tokens, none of which sees another: what its linear layers and norms take and make."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from engine.kernels.packing import PackedMatrix
from engine.model import hooks
from engine.native.comparison import is_close
from engine.native.decoder import ExpertMatrices, Linear, Norm, UnsupportedArchitecture
from engine.native.norm import find_norm
from engine.native.recurrence_trace import (
    TracedDeltaRule,
    TracedGatedNorm,
    TracedRecurrence,
    TracedStateSpace,
    trace_recurrence,
)
from engine.quantize import stacks
from engine.quantize.experts import QuantizedExperts
from engine.quantize.layers import QuantizedLinear

# The first positions of the tokens; two more are far away, for some models change what they compute there.
_POSITIONS = (0, 1, 5, 29)
# How many times as large logits are made: so what bounds them shows.
_LOGIT_GAIN = 32.0


@dataclass(frozen=True, slots=True)
class TracedLinear:
    """A linear layer was called: rows [rows, columns] and what it made of them [rows, outputs]."""

    linear: Linear
    input: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class TracedNorm:
    """A norm was called: rows [rows, width] both."""

    norm: Norm
    input: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class TracedAttention:
    """A layer attended; every row got its own value, [rows, heads * value_width]."""

    call: hooks.AttentionCall
    output: Tensor


@dataclass(frozen=True, slots=True)
class TracedRouter:
    """A router was called, which tells weights and numbers of chosen experts [rows, chosen]; see `route`.

    weight  [experts, columns]
    extra_inputs  what it was given beside rows
    """

    router: nn.Module
    weight: Tensor
    input: Tensor
    extra_inputs: tuple[Any, ...]
    weights: Tensor
    experts: Tensor

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What it tells of other rows [rows, columns]."""
        with torch.inference_mode():
            _, weights, chosen = self.router(rows, *self.extra_inputs)
        return weights, chosen


@dataclass(frozen=True, slots=True)
class TracedExperts:
    """Experts were called with rows, and the weights of the chosen ones; `experts` tells what they do in between."""

    experts: stacks.Experts
    inner: ExpertMatrices
    down: ExpertMatrices
    input: Tensor
    weights: Tensor
    chosen: Tensor
    output: Tensor


Event: TypeAlias = TracedLinear | TracedNorm | TracedAttention | TracedRouter | TracedExperts | TracedRecurrence


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened in one forward.

    embeddings  [rows, width] of the tokens, as they lie in the table
    unsupported_modules     kinds of layers with weights that are no linear ones and no norms
    logits      after the last linear layer, whose output was made louder
    """

    positions: Tensor
    embeddings: Tensor
    events: tuple[Event, ...]
    unsupported_modules: tuple[str, ...]
    logits: Tensor


class _TraceListener:
    """Hears the calls of attention and of recurrences (hooks.Listener).

    running  the modules that are being called, the innermost last
    """

    def __init__(self, events: list[Event], rows: int, running: Sequence[nn.Module]) -> None:
        self._events, self._rows, self._running = events, rows, running

    def attend(self, call: hooks.AttentionCall) -> Tensor:
        """A row that attends to itself alone gets its own value."""
        if call.is_cross or call.latent is not None:
            raise UnsupportedArchitecture("its attention is not that of queries, keys and values")
        heads = call.query.shape[0] // call.value.shape[0]
        output = call.value.repeat_interleave(heads, 0).transpose(0, 1).contiguous()
        self._events.append(TracedAttention(call, output.flatten(1)))
        return output

    def recur(self, name: Hashable, operation: hooks.RecurrentOperation) -> list[Tensor]:
        """Every row goes on behind a state of its own."""
        event, outputs = trace_recurrence(name, operation, self._rows, self._running[-1])
        self._events.append(event)
        return outputs


def trace(model: Any, *, vocabulary: int, context: int) -> Trace:
    """Run a model whose hooks are in place. Raises UnsupportedArchitecture where it does what no decoder of the common shape does.

    context  positions that the model knows
    """
    events: list[Event] = []
    watcher = _ModuleRecorder(events)
    positions = torch.tensor([at for at in (*_POSITIONS, context // 2, context - 1) if at < context])
    rows = torch.arange(len(positions))
    tokens = rows * (vocabulary // len(rows))
    with ExitStack() as stack, torch.inference_mode():
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is None or not isinstance(embedding, nn.Embedding):
            raise UnsupportedArchitecture("its embeddings or its output layer are no tables")
        stack.callback(head.register_forward_hook(lambda module, taken, made: _LOGIT_GAIN * made).remove)
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(watcher.enter).remove)
            stack.callback(module.register_forward_hook(watcher.leave).remove)
            if module is not embedding:
                stack.callback(module.register_forward_hook(watcher.record).remove)
        with hooks.use_backend(_TraceListener(events, len(rows), watcher.running)):
            logits = hooks.forward(model, tokens, positions, rows)
        return Trace(positions, embedding.weight[tokens].float(), tuple(events), tuple(watcher.unknown), logits)


class _ModuleRecorder:
    """Notes the calls of a model's innermost modules.

    running  those that are being called, the innermost last
    """

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._asking = False
        self.unknown: list[str] = []
        self.running: list[nn.Module] = []

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A forward pre-hook."""
        self.running.append(module)

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], made: Any) -> None:
        """A forward hook."""
        self.running.pop()

    def record(self, module: nn.Module, inputs: tuple[Any, ...], made: Any) -> None:
        """A forward hook. Whatever else a model does shows in what follows."""
        if self._asking or not inputs or not isinstance(inputs[0], Tensor) or inputs[0].dim() < 2:
            return
        # Copies, for some models go on in the same memory.
        taken = inputs[0].flatten(0, -2).clone()
        if isinstance(made, tuple):
            self._note_router(module, inputs, taken, made)
        elif isinstance(made, Tensor) and len(inputs) == 3:
            self._note_experts(module, inputs, taken, made)
        elif isinstance(made, Tensor) and len(inputs) == 2:
            self._note_gated_norm(module, inputs, taken, made)
        elif isinstance(made, Tensor) and len(inputs) == 1:
            self._note_plain(module, taken, made.flatten(0, -2).clone())

    def _note_router(self, module: nn.Module, inputs: tuple[Any, ...], taken: Tensor, made: tuple[Any, ...]) -> None:
        weight = getattr(module, "weight", None)
        told = len(made) == 3 and all(isinstance(one, Tensor) and len(one) == len(taken) for one in made)
        if told and isinstance(weight, Tensor) and weight.dim() == 2:
            self._events.append(TracedRouter(module, weight, taken, inputs[1:], made[1].float(), made[2]))

    def _note_experts(self, module: nn.Module, inputs: tuple[Any, ...], taken: Tensor, made: Tensor) -> None:
        experts = module.experts if isinstance(module, QuantizedExperts) else stacks.experts_of(module)
        if experts is None or experts.has_norm or not isinstance(inputs[2], Tensor):
            return
        own = module if isinstance(module, QuantizedExperts) else None
        inner = _stack(experts.up, None if own is None else own.up)
        down = _stack(experts.down, None if own is None else own.down)
        seen = (taken, inputs[2].float(), inputs[1], made.flatten(0, -2).clone())
        self._events.append(TracedExperts(experts, inner, down, *seen))

    def _note_gated_norm(self, module: nn.Module, inputs: tuple[Any, ...], taken: Tensor, made: Tensor) -> None:
        gate, recurs = inputs[1], any(isinstance(event, TracedDeltaRule | TracedStateSpace) for event in self._events)
        if recurs and isinstance(gate, Tensor) and gate.shape == inputs[0].shape == made.shape:
            self._events.append(
                TracedGatedNorm(module, taken, gate.flatten(0, -2).clone(), made.flatten(0, -2).clone())
            )

    def _note_plain(self, module: nn.Module, taken: Tensor, made: Tensor) -> None:
        if isinstance(module, nn.Linear | QuantizedLinear):
            self._events.append(TracedLinear(linear_of(module), taken, made))
        elif next(module.children(), None) is None and taken.shape == made.shape and not is_close(taken, made):
            self._note_norm(module, taken, made)

    def _note_norm(self, module: nn.Module, taken: Tensor, made: Tensor) -> None:
        self._asking = True
        try:
            self._events.append(TracedNorm(find_norm(module, taken, made), taken, made))
        except UnsupportedArchitecture:
            if any(True for _ in module.parameters()):
                self.unknown.append(type(module).__name__)
        finally:
            self._asking = False


def _stack(own: stacks.ExpertStack, quantised: tuple[PackedMatrix, ...] | None) -> ExpertMatrices:
    bias = None if own.bias is None else own.bias.detach().float().contiguous()
    return ExpertMatrices(own.stored if quantised is None else quantised, own.transposed, bias)


def linear_of(module: nn.Linear | QuantizedLinear) -> Linear:
    """A linear layer's numbers."""
    bias = None if module.bias is None else module.bias.detach().float().contiguous()
    if isinstance(module, nn.Linear):
        return Linear(module.weight, bias)
    assert isinstance(module.codes, Tensor)
    assert isinstance(module.scales, Tensor)
    return Linear(PackedMatrix(module.codes, module.scales, module.out_features, module.in_features), bias)
