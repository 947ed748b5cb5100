"""Watches a model run a few tokens, none of which sees another: what its linear layers and norms take and make."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from engine import hooks
from engine.native.decoder import Linear, NoShape
from engine.quantize.layers import QuantizedLinear

# The first positions of the tokens; two more are far away, for some models change what they compute there.
_POSITIONS = (0, 1, 5, 29)


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A linear layer was called: rows [rows, columns] and what it made of them [rows, outputs]."""

    linear: Linear
    taken: Tensor
    made: Tensor


@dataclass(frozen=True, slots=True)
class Normed:
    """Some other layer with weights was called, a norm if it is known at all: rows [rows, width] both."""

    norm: nn.Module
    taken: Tensor
    made: Tensor


@dataclass(frozen=True, slots=True)
class Attended:
    """A layer attended; every row got its own value, [rows, heads * value_width]."""

    call: hooks.Call
    made: Tensor


Event: TypeAlias = Multiplied | Normed | Attended


@dataclass(frozen=True, slots=True)
class Trace:
    """All that happened in one forward: the tokens' embeddings [rows, width] as they come, the logits at the end."""

    positions: Tensor
    embeddings: Tensor
    events: tuple[Event, ...]
    logits: Tensor


class _Listener:
    """Hears the calls of attention (hooks.Listener)."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def attend(self, call: hooks.Call) -> Tensor:
        """A row that attends to itself alone gets its own value."""
        if call.crosses or call.latent is not None:
            raise NoShape("its attention is not that of queries, keys and values")
        heads = call.query.shape[0] // call.value.shape[0]
        output = call.value.repeat_interleave(heads, 0).transpose(0, 1).contiguous()
        self._events.append(Attended(call, output.flatten(1)))
        return output

    def recur(self, name: Hashable, run: hooks.Run) -> list[Tensor]:
        """Not of the common shape."""
        raise NoShape("it has recurrent layers")


def trace(model: Any, *, vocabulary: int, context: int) -> Trace:
    """Run a model whose hooks are in place. Raises NoShape where it does what no decoder of the common shape does.

    context  positions that the model knows
    """
    events: list[Event] = []
    positions = torch.tensor([at for at in (*_POSITIONS, context // 2, context - 1) if at < context])
    rows = torch.arange(len(positions))
    tokens = rows * (vocabulary // len(rows))
    with ExitStack() as stack, torch.inference_mode(), hooks.listening(_Listener(events)):
        embedding = model.get_input_embeddings()
        for module in model.modules():
            if module is not embedding and _has_weights(module):
                stack.enter_context(_Hooked(module, events))
        logits = hooks.forward(model, tokens, positions, rows)
        return Trace(positions, embedding(tokens), tuple(events), logits)


def _has_weights(module: nn.Module) -> bool:
    return isinstance(module, QuantizedLinear) or any(True for _ in module.parameters(recurse=False))


class _Hooked:
    """Notes the calls of one module, as long as the block lasts."""

    def __init__(self, module: nn.Module, events: list[Event]) -> None:
        self._module, self._events = module, events

    def __enter__(self) -> None:
        self._handle = self._module.register_forward_hook(self._note)

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _note(self, module: nn.Module, inputs: tuple[Any, ...], made: Any) -> None:
        if not (len(inputs) == 1 and isinstance(inputs[0], Tensor) and isinstance(made, Tensor)):
            raise NoShape(f"it has layers of the kind {type(module).__name__}")
        kind: Callable[..., Event] = Multiplied if isinstance(module, nn.Linear | QuantizedLinear) else Normed
        self._events.append(kind(module, inputs[0].flatten(0, -2), made.flatten(0, -2)))
