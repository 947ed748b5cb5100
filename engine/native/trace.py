"""Traces a forward of a few tokens, none of which attends to another: inputs and outputs of its modules."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from engine.kernels.latent import project_latents
from engine.kernels.packing import PackedMatrix
from engine.model import hooks
from engine.native.comparison import is_close
from engine.native.decoder import NO_NORM, ExpertMatrices, Linear, Norm, UnsupportedArchitecture
from engine.native.norm import find_norm, normalise
from engine.native.recurrence_trace import (
    TracedDeltaRule,
    TracedGatedNorm,
    TracedRecurrence,
    TracedStateSpace,
    trace_recurrence,
)
from engine.quantize import stacks
from engine.quantize.embedding import QuantizedEmbedding
from engine.quantize.experts import QuantizedExperts
from engine.quantize.layers import QuantizedLinear

# Positions of the first tokens; two more are far away, where some models compute something else.
_POSITIONS = (0, 1, 5, 29)
# Multiplies the output of the head, so that a softcap changes the logits.
_LOGIT_GAIN = 32.0


@dataclass(frozen=True, slots=True)
class TracedLinear:
    """A call of a linear layer: input [rows, columns], output [rows, outputs]."""

    linear: Linear
    input: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class TracedNorm:
    """A call of a norm: input and output [rows, width]."""

    norm: Norm
    input: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class TracedAttention:
    """An attention call; the output of each row is its own value, [rows, heads * value_width]."""

    call: hooks.AttentionCall
    output: Tensor


@dataclass(frozen=True, slots=True)
class TracedEmbedding:
    """A call of a table other than the input embeddings: its weights of the tokens, and the output, [rows, width]."""

    module: nn.Embedding | QuantizedEmbedding
    weights: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class TracedRouter:
    """A call of a router, with weights and numbers of the chosen experts [rows, top_k].

    norm          of its input, before the linear layer; its weight is all that multiplies the normed input
    weight, bias  [experts, columns] and [experts], or None
    extra_inputs  all inputs but the rows
    """

    router: nn.Module
    norm: Norm
    weight: Tensor
    bias: Tensor | None
    input: Tensor
    extra_inputs: tuple[Any, ...]
    weights: Tensor
    experts: Tensor

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts that the router chooses for other rows [rows, columns]."""
        with torch.inference_mode():
            return _chosen_experts(self.router(rows, *self.extra_inputs))


@dataclass(frozen=True, slots=True)
class TracedExperts:
    """A call of experts with rows, and weights and numbers of the chosen experts [rows, top_k].

    inner          see ExpertsSpec
    scales_inputs  whether the module was called with the rows times the weights, for each expert
    """

    experts: stacks.Experts
    inner: tuple[ExpertMatrices, ...]
    down: ExpertMatrices
    input: Tensor
    weights: Tensor
    chosen: Tensor
    output: Tensor
    scales_inputs: bool = False


Event: TypeAlias = (
    TracedEmbedding | TracedLinear | TracedNorm | TracedAttention | TracedRouter | TracedExperts | TracedRecurrence
)


@dataclass(frozen=True, slots=True)
class Trace:
    """One forward.

    embeddings           [rows, width], not scaled
    unsupported_modules  class names of modules with parameters that are neither linear layers nor norms
    logits               from the output of the head times _LOGIT_GAIN
    """

    positions: Tensor
    embeddings: Tensor
    events: tuple[Event, ...]
    unsupported_modules: tuple[str, ...]
    logits: Tensor


class _TraceBackend:
    """Records the calls of attention and recurrent operations; implements hooks.AttentionBackend.

    active  the modules that are being called, the innermost last
    """

    def __init__(self, events: list[Event], rows: int, active: Sequence[nn.Module]) -> None:
        self._events, self._rows, self._active = events, rows, active

    def attend(self, call: hooks.AttentionCall) -> Tensor:
        """The value of each row: it attends to itself alone."""
        if call.is_cross:
            raise UnsupportedArchitecture("its attention is not over queries, keys and values of the tokens")
        value = call.value if call.latent is None else project_latents(call.key, call.latent)
        group = call.query.shape[0] // value.shape[0]
        output = value.repeat_interleave(group, 0).transpose(0, 1).contiguous()
        self._events.append(TracedAttention(call, output.flatten(1)))
        return output

    def recur(self, name: Hashable, operation: hooks.RecurrentOperation) -> list[Tensor]:
        """The outputs of each row alone, from a random state."""
        event, outputs = trace_recurrence(name, operation, self._rows, self._active[-1])
        self._events.append(event)
        return outputs


def trace(model: Any, *, vocabulary: int, context: int) -> Trace:
    """Run a model with its hooks installed. Raises UnsupportedArchitecture for operations that no decoder has.

    context  the model's maximum context length
    """
    events: list[Event] = []
    recorder = _ModuleRecorder(events)
    positions = torch.tensor([position for position in (*_POSITIONS, context // 2, context - 1) if position < context])
    rows = torch.arange(len(positions))
    tokens = rows * (vocabulary // len(rows))
    with ExitStack() as stack, torch.inference_mode():
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is None or not isinstance(embedding, nn.Embedding | QuantizedEmbedding):
            raise UnsupportedArchitecture("its embeddings or its output layer are no tables")
        stack.callback(head.register_forward_hook(lambda module, inputs, output: _LOGIT_GAIN * output).remove)
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(recorder.enter).remove)
            stack.callback(module.register_forward_hook(recorder.leave).remove)
            if module is not embedding:
                stack.callback(module.register_forward_hook(recorder.record).remove)
        with hooks.use_backend(_TraceBackend(events, len(rows), recorder.active)):
            logits = hooks.forward(model, tokens, positions, rows)
        unsupported = tuple(recorder.unsupported_modules)
        return Trace(positions, embedding_rows(embedding, tokens), tuple(events), unsupported, logits)


class _ModuleRecorder:
    """Records the calls of a model's innermost modules, by forward hooks.

    active  the modules that are being called, the innermost last
    """

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._is_probing = False
        # The number of events before each active module, and before the last one that ended.
        self._starts: list[int] = []
        self._start = 0
        self.unsupported_modules: list[str] = []
        self.active: list[nn.Module] = []

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A forward pre-hook."""
        self.active.append(module)
        self._starts.append(len(self._events))

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """A forward hook."""
        self.active.pop()
        self._start = self._starts.pop()

    def record(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """A forward hook. Operations between the recorded modules show in the inputs of the next ones."""
        if any(isinstance(outer, QuantizedEmbedding) for outer in self.active):
            # The module that computes from the rows of a quantised table.
            return
        if isinstance(module, nn.Embedding | QuantizedEmbedding):
            self._record_embedding(module, inputs[0].flatten(), output.flatten(0, -2))
            return
        if self._is_probing or not inputs or not isinstance(inputs[0], Tensor) or inputs[0].dim() < 2:
            return
        # Copies, because some models overwrite the memory.
        rows = inputs[0].flatten(0, -2).clone()
        if isinstance(output, tuple):
            self._record_router(module, inputs, rows, output)
        elif isinstance(output, Tensor) and len(inputs) == 3:
            self._record_experts(module, inputs, rows, output)
        elif isinstance(output, Tensor) and len(inputs) == 2:
            self._record_gated_norm(module, inputs, rows, output)
        elif isinstance(output, Tensor) and len(inputs) == 1:
            self._record_linear_or_norm(module, rows, output.flatten(0, -2).clone())

    def _record_embedding(self, module: nn.Embedding | QuantizedEmbedding, tokens: Tensor, output: Tensor) -> None:
        self._events.append(TracedEmbedding(module, embedding_rows(module, tokens), output.clone()))

    def _record_router(self, module: nn.Module, inputs: tuple[Any, ...], rows: Tensor, output: tuple[Any, ...]) -> None:
        if not all(isinstance(tensor, Tensor) and len(tensor) == len(rows) for tensor in output):
            return
        # Another module may return as many tensors: only a router that is a linear layer returns two.
        if len(output) != 3 and not (len(output) == 2 and isinstance(module, nn.Linear)):
            return
        linears = [child for child in module.children() if isinstance(child, nn.Linear)]
        # Some routers have their matrix in a linear layer, whose call is a part of the router's.
        linear = linears[0] if len(linears) == 1 else module
        weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or (len(output) == 3 and output[2].is_floating_point()):
            return
        norm = _router_norm(self._events[self._start :])
        del self._events[self._start :]
        bias = bias if isinstance(bias, Tensor) and bias.shape == weight.shape[:1] else None
        weights, chosen = _chosen_experts(output)
        self._events.append(TracedRouter(module, norm, weight, bias, rows, inputs[1:], weights.float(), chosen))

    def _record_experts(self, module: nn.Module, inputs: tuple[Any, ...], rows: Tensor, output: Tensor) -> None:
        experts = module.experts if isinstance(module, QuantizedExperts) else stacks.experts_of(module)
        if experts is None or experts.has_norm or not isinstance(inputs[2], Tensor):
            return
        quantised = module if isinstance(module, QuantizedExperts) else None
        inner = _expert_matrices(experts.up, None if quantised is None else quantised.up)
        [down] = _expert_matrices(experts.down, None if quantised is None else quantised.down)
        weights, chosen = inputs[2].float(), inputs[1]
        self._events.append(TracedExperts(experts, inner, down, rows, weights, chosen, output.flatten(0, -2).clone()))

    def _record_scaled_experts(self, experts: stacks.Experts, rows: Tensor, output: Tensor) -> None:
        """Record experts that get the rows of the router once for each expert, times the weights of that expert."""
        router = self._events[-1] if self._events else None
        count = experts.up.stored.shape[0]
        if not isinstance(router, TracedRouter) or len(rows) != count * len(router.input):
            return
        weights = torch.zeros(len(router.input), count).scatter(1, router.experts, router.weights)
        if is_close(weights.T[:, :, None] * router.input, rows.view(count, -1, rows.shape[1])):
            inner, [down] = _expert_matrices(experts.up, None), _expert_matrices(experts.down, None)
            total = output.view(count, -1, output.shape[1]).sum(0)
            call = (router.input, router.weights, router.experts, total)
            self._events.append(TracedExperts(experts, inner, down, *call, scales_inputs=True))

    def _record_gated_norm(self, module: nn.Module, inputs: tuple[Any, ...], rows: Tensor, output: Tensor) -> None:
        gate = inputs[1]
        after_recurrence = any(isinstance(event, TracedDeltaRule | TracedStateSpace) for event in self._events)
        if after_recurrence and isinstance(gate, Tensor) and gate.shape == inputs[0].shape == output.shape:
            gate_rows, output_rows = gate.flatten(0, -2).clone(), output.flatten(0, -2).clone()
            self._events.append(TracedGatedNorm(module, rows, gate_rows, output_rows))

    def _record_linear_or_norm(self, module: nn.Module, rows: Tensor, output: Tensor) -> None:
        if isinstance(module, nn.Linear | QuantizedLinear):
            self._events.append(TracedLinear(linear_of(module), rows, output))
        elif (experts := stacks.scaled_experts_of(module)) is not None:
            self._record_scaled_experts(experts, rows, output)
        elif next(module.children(), None) is None and rows.shape == output.shape and not is_close(rows, output):
            self._record_norm(module, rows, output)

    def _record_norm(self, module: nn.Module, rows: Tensor, output: Tensor) -> None:
        self._is_probing = True
        try:
            self._events.append(TracedNorm(find_norm(module, rows, output), rows, output))
        except UnsupportedArchitecture:
            if any(True for _ in module.parameters()):
                self.unsupported_modules.append(type(module).__name__)
        finally:
            self._is_probing = False


def _chosen_experts(output: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Weights and numbers of the chosen experts, from the output of a router: (scores, weights, numbers), or (weights
    of all experts, logits).
    """
    if len(output) == 3:
        return output[1], output[2]
    weights = output[0].float()
    weights, chosen = weights.topk(int((weights != 0).sum(1).max()))
    return weights, chosen


def _router_norm(calls: Sequence[Event]) -> Norm:
    """The norm between the input of a router and its linear layer, from their calls; NO_NORM if it has none."""
    norms = [call for call in calls if isinstance(call, TracedNorm)]
    if len(calls) != 2 or not norms or not isinstance(calls[1], TracedLinear):
        return NO_NORM
    norm = replace(norms[0].norm, weight=None, bias=None)
    normed = normalise(norm, norms[0].input.float())
    # Between the norm and the linear layer each column is multiplied by a number.
    return replace(norm, weight=(normed * calls[1].input).sum(0) / normed.square().sum(0))


def _expert_matrices(
    stack: stacks.ExpertStack, quantised: tuple[PackedMatrix, ...] | None
) -> tuple[ExpertMatrices, ...]:
    """The matrices of all experts, by parts."""
    biases = (None,) * stack.parts if stack.bias is None else stack.bias.detach().float().chunk(stack.parts, 1)
    return tuple(
        ExpertMatrices(
            stack.stored if quantised is None else quantised[part :: stack.parts],
            stack.transposed,
            None if bias is None else bias.contiguous(),
        )
        for part, bias in enumerate(biases)
    )


def embedding_rows(module: nn.Embedding | QuantizedEmbedding, tokens: Tensor) -> Tensor:
    """The weights [tokens, width] of tokens in float32."""
    rows = module.rows(tokens) if isinstance(module, QuantizedEmbedding) else module.weight[tokens]
    return rows.float()


def embedding_table(module: nn.Embedding | QuantizedEmbedding) -> tuple[Tensor | PackedMatrix, bool]:
    """The weights of an embedding, and whether those of a quantised one are rounded to bfloat16."""
    if isinstance(module, nn.Embedding):
        return module.weight, False
    return module.packed, module.dtype == torch.bfloat16


LinearModule: TypeAlias = nn.Linear | QuantizedLinear


def linear_of(module: LinearModule) -> Linear:
    """The weights of a linear layer."""
    bias = None if module.bias is None else module.bias.detach().float().contiguous()
    if isinstance(module, nn.Linear):
        return Linear(module.weight, bias)
    return Linear(module.packed, bias)
