"""The one place that reaches into transformers: how its unmodified models attend through our cells.

A batch is one packed row [1, rows] with explicit positions. Three hooks carry it:
* an attention function in transformers' AttentionInterface, which hands (query, key, value) of each layer to whoever
  is listening;
* a facade in place of the model's cache, which stores nothing and reports what makes the models' own position
  arithmetic come out right;
* for recurrent layers, operations that cut the row by sequence (engine/recurrence.py).
The listener travels in a context variable, for some models (StableLM, Nemotron) drop keyword arguments on the way.
Pinned to transformers 5.23: its cache and attention interfaces change with every minor version.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache as HFCache

from engine.kernels.latent import Projection

NAME = "cells"


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's call of attention: query [heads, rows, width], key and value [key_heads, rows, width].

    With latent attention the key is [latent, rotated part] of one head, and the value has no columns.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    latent: Projection | None = None


# Computes rows [start, stop) of an operation from the state before them (None: zeros): the output and the state after.
Run: TypeAlias = Callable[[int, int, Tensor | None], tuple[Tensor, Tensor]]


class Listener(Protocol):
    """Takes every call of a forward that looks along sequences: the runner while serving, the calibration at load."""

    def attend(self, call: Call) -> Tensor:
        """The output [rows, heads, value_width]."""
        ...

    def recur(self, name: Hashable, run: Run) -> list[Tensor]:
        """Run a recurrent operation, of which `name` says which one it is, for each sequence: the outputs in order."""
        ...


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside the block, models with the attention implementation NAME call `listener`."""
    token = _current.set(_Reception(listener))
    try:
        yield
    finally:
        _current.reset(token)


def forward(model: Any, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
    """Logits [wanted, vocabulary] of a packed batch: tokens and positions [rows], `wanted` the rows to know them of."""
    facade = PackedFacade(positions)
    inputs = {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "past_key_values": facade,
        "cache_params": facade,
        "use_cache": True,
        "logits_to_keep": wanted,
    }
    known = _parameters(model.__class__.forward)
    logits: Tensor = model(**{name: value for name, value in inputs.items() if name in known}).logits[0]
    # A model that ignores logits_to_keep returns every row.
    return logits if logits.shape[0] == wanted.shape[0] else logits[wanted]


def install_latent(model: Any) -> None:
    """Let layers with latent attention hand over their latents instead of the keys and values made from them.

    All such layers of transformers expand by one method of one form, so that its weights can be used directly.
    """
    for module in model.modules():
        expand = getattr(module, "expand_kv", None)
        if expand is None or hasattr(module, "latent_projection"):
            continue
        widths = (module.qk_nope_head_dim, module.v_head_dim)
        weight = module.kv_b_proj.weight.detach().view(-1, sum(widths), module.kv_lora_rank)
        module.latent_projection = Projection(*weight.split(widths, 1))
        module.expand_kv = _passing(expand)


def _passing(expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def expand_kv(latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        return (latent, turned) if is_listening() else expand(latent, turned)

    return expand_kv


def is_listening() -> bool:
    """Whether somebody takes the calls of models now."""
    return _current.get(None) is not None


def recur(kind: str, run: Run) -> list[Tensor]:
    """Hand a recurrent operation to the listener, named by its layer and by how often that layer called it before."""
    reception = _current.get()
    place = (kind, *reception.recurrent)
    reception.calls[place] += 1
    return reception.listener.recur((*place, reception.calls[place]), run)


@dataclass(slots=True)
class _Reception:
    """A listener, and what the facade heard last: the attention layer, and the recurrent layer and state number."""

    listener: Listener
    layer: int | None = None
    recurrent: tuple[int, int] = (-1, 0)
    calls: Counter[Hashable] = field(default_factory=Counter)


_current: ContextVar[_Reception] = ContextVar("engine.hooks.current")


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    """The arguments that a model takes: recurrent ones call their cache by another name."""
    return frozenset(inspect.signature(forward).parameters)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: query [1, heads, rows, width], output [1, rows, heads, value_width]."""
    reception = _current.get()
    # Layers that share weights (Zamba) have no index of their own; the cache call before tells which layer this is.
    layer = reception.layer if reception.layer is not None else int(module.layer_idx)  # type: ignore[arg-type]
    reception.layer = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    latent = getattr(module, "latent_projection", None)
    if latent is not None:
        # What comes as key and value are the latent and its rotated part: install_latent saw to that.
        key, value = torch.cat((key, value), -1), value[..., :0]
    call = Call(layer, query[0], key[0], value[0], scale, sliding_window or None, softcap, s_aux, latent)
    return reception.listener.attend(call)[None], None


class PackedFacade(HFCache):  # type: ignore[misc]
    """A cache that keeps nothing: the listener does. Lives for one forward."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__(layers=[])
        self._positions = positions

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Remember which layer is at work; the new keys and values go on as they came."""
        _current.get().layer = layer_idx
        return key, value

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """None, so that mixers take the form that computes whole sequences: the operations know the states."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is recorded here."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """See has_previous_state."""
        _current.get().recurrent = (layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """See has_previous_state."""
        _current.get().recurrent = (layer_idx, state_idx)

    def update_conv_state(self, rows: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Remember which layer is at work; the rows go on as they came."""
        _current.get().recurrent = (layer_idx, state_idx)
        return rows

    def update_recurrent_state(self, state: Any, layer_idx: int, state_idx: int = 0, **_: Any) -> Any:
        """The operation has handed its state to the listener already."""
        return state

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """A tensor, such that `arange(rows) + length` gives the true position of each row (Llama 4 counts that way)."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Only masks ask, and masks are ours."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Only masks ask, and masks are ours."""
        return query_length, 0


AttentionInterface.register(NAME, _attention)
