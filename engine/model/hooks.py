"""The one place that reaches into transformers: how its unmodified models attend through our cells.

A batch is one packed row [1, rows] with explicit positions. Three hooks carry it:
* an attention function in transformers' AttentionInterface, which hands (query, key, value) of each layer to whoever
  is listening;
* a facade in place of the model's cache, which stores nothing and reports what makes the models' own position
  arithmetic come out right;
* for recurrent layers, operations that cut the row by sequence (engine/model/recurrence.py).
A layer that looks at what an encoder made takes its keys from the facade, which notes that and has none to give: the
listener knows what each sequence looks at. When nobody listens, the attention is transformers' own (encoders run so).
The listener travels in a context variable, for some models (StableLM, Nemotron) drop keyword arguments on the way.
Pinned to transformers 5.23: its cache and attention interfaces change with every minor version.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutput

from engine.kernels.latent import LatentProjection
from engine.kernels.reference import ScoreBias

ATTENTION_NAME = "cells"

# Arguments by which layers with sparse attention say what their queries see (DeepSeek-V3.2, MiniMax-M3).
_SPARSE_ARGUMENTS = ("indices", "block_indices")


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of attention: query [heads, rows, width], key and value [key_heads, rows, width].

    With latent attention the key is [latent, rotated part] of one head, and the value has no columns.
    Where a call `is_cross`, to what an encoder made, key and value mean nothing.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    latent: LatentProjection | None = None
    bias: ScoreBias | None = None
    is_cross: bool = False


# Computes rows [start, stop) of an operation from the state before them (None: zeros): the output and the state after.
RecurrentOperation: TypeAlias = Callable[[int, int, Tensor | None], tuple[Tensor, Tensor]]


class AttentionBackend(Protocol):
    """Takes every call of a forward that looks along sequences: the runner while serving, the calibration at load."""

    def attend(self, call: AttentionCall) -> Tensor:
        """The output [rows, heads, value_width]."""
        ...

    def recur(self, name: Hashable, operation: RecurrentOperation) -> list[Tensor]:
        """Run a recurrent operation, of which `name` says which one it is, for each sequence: the outputs in order."""
        ...


@contextmanager
def use_backend(backend: AttentionBackend) -> Iterator[None]:
    """Inside the block, models with the attention implementation NAME call `backend`."""
    token = _state.set(_HookState(backend))
    try:
        yield
    finally:
        _state.reset(token)


def forward(
    model: Any, tokens: Tensor, positions: Tensor, logit_rows: Tensor, *, cross_mask: Tensor | None = None
) -> Tensor:
    """Logits [wanted, vocabulary] of a packed batch: tokens and positions [rows], `logit_rows` the rows to know them of.

    looking  [rows], true where a row looks at what an encoder made for its sequence; None: no row does
    """
    known = _parameters(model.__class__.forward)
    inputs = {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "use_cache": True,
        "logits_to_keep": logit_rows,
    }
    if "decoder_input_ids" in known:
        inputs |= _decoder_inputs(tokens, positions)
    else:
        inputs["past_key_values"] = inputs["cache_params"] = facade = CacheFacade(positions)
        if cross_mask is not None:
            facade.layers = _EncoderLayers(positions.device)
            inputs["cross_attention_mask"] = cross_mask.long()[None, :, None, None]
    logits: Tensor = model(**{name: value for name, value in inputs.items() if name in known}).logits[0]
    # A model that ignores logits_to_keep returns every row; where states are tapped, fewer come than were wanted.
    return logits if logits.shape[0] <= logit_rows.shape[0] else logits[logit_rows]


@contextmanager
def watch_output_layer(model: Any) -> Iterator[Callable[[], bool]]:
    """What this gives tells whether the model has called its output layer inside the block: else it has no tap."""
    calls: list[bool] = []
    layer = model.get_output_embeddings()
    handle = None if layer is None else layer.register_forward_pre_hook(lambda *_: calls.append(True))
    try:
        yield lambda: bool(calls)
    finally:
        if handle is not None:
            handle.remove()


@dataclass(slots=True)
class HiddenStateCapture:
    """States on their way into a model's output layer.

    kept    the rows to be asked for in a forward
    hidden_states  those that were wanted [pooled, width], after it
    """

    kept: Tensor
    hidden_states: Tensor


@contextmanager
def capture_hidden_states(model: Any, logit_rows: Tensor, hidden_rows: Tensor) -> Iterator[HiddenStateCapture]:
    """Inside the block, a forward asked for the rows `kept` leaves the states of `hidden_rows` and gives logits of `logit_rows`.

    Both are ascending. The states are those behind the last norm; their rows get no logits, which take most memory.
    """
    tap = HiddenStateCapture(torch.unique(torch.cat((logit_rows, hidden_rows))), torch.empty(0))

    def narrow(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = inputs[0][0]
        # A model that ignores logits_to_keep brings every row.
        whole = rows.shape[0] != tap.kept.shape[0]
        of_wanted, of_pooled = (
            some if whole else torch.searchsorted(tap.kept, some) for some in (logit_rows, hidden_rows)
        )
        tap.hidden_states = rows[of_pooled]
        return rows[of_wanted][None], *inputs[1:]

    with model.get_output_embeddings().register_forward_pre_hook(narrow):
        yield tap
    if tap.hidden_states.shape[0] != hidden_rows.shape[0]:
        raise NotImplementedError("the model makes its logits without its output layer")


def encode(model: Any, media: Mapping[str, Tensor], start_token: int) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer, the keys [heads, length, width] and values of cross attention for what an encoder takes, batch of one.

    The model runs as it is on the media and one token, `start_token`, and its own cache is read. Layers that attend to the
    token are among the result where the model has one cache for both.
    """
    twofold = "decoder_input_ids" in _parameters(model.__class__.forward)
    token = torch.tensor([[start_token]], device=next(model.parameters()).device)
    held = DynamicCache()
    memory = EncoderDecoderCache(DynamicCache(), held) if twofold else held
    model(**media, **{"decoder_input_ids" if twofold else "input_ids": token}, past_key_values=memory)
    return {at: (layer.keys[0], layer.values[0]) for at, layer in enumerate(held.layers) if layer.is_initialized}


def _decoder_inputs(tokens: Tensor, positions: Tensor) -> dict[str, Any]:
    """What a model with encoder and decoder takes in the encoder's absence."""
    return {
        "input_ids": None,
        "decoder_input_ids": tokens[None],
        # Some derive a mask of their own, whose length they take from the cache, unless they get one.
        "decoder_attention_mask": torch.ones_like(tokens)[None],
        "encoder_outputs": BaseModelOutput(torch.zeros(1, 1, 1, device=tokens.device)),
        "past_key_values": _EncoderDecoderFacade(positions),
    }


def install_bias(model: Any) -> None:
    """Let layers that add a bias to their scores by distance (T5) hand over the rule in place of the numbers.

    The numbers would be those of neighbours in the packed row, who may be strangers.
    """
    for module in model.modules():
        compute = getattr(module, "compute_bias", None)
        if compute is not None and not hasattr(compute, "unpacked"):
            module.compute_bias = _defer_bias(compute)


def _defer_bias(compute: Callable[..., Tensor]) -> Callable[..., Tensor | ScoreBias]:
    def bias(rows: int, before: int) -> Tensor:
        return compute(rows, before + rows, past_seen_tokens=before)[0]

    def compute_bias(*args: Any, **settings: Any) -> Tensor | ScoreBias:
        return bias if has_backend() else compute(*args, **settings)

    compute_bias.unpacked = compute  # type: ignore[attr-defined]
    return compute_bias


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
        module.latent_projection = LatentProjection(*weight.split(widths, 1))
        module.expand_kv = _skip_expansion(expand)


def _skip_expansion(expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def expand_kv(latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        return (latent, turned) if has_backend() else expand(latent, turned)

    return expand_kv


def has_backend() -> bool:
    """Whether somebody takes the calls of models now."""
    return _state.get(None) is not None


def recur(kind: str, operation: RecurrentOperation) -> list[Tensor]:
    """Hand a recurrent operation to the listener, named by its layer and by how often that layer called it before."""
    reception = _state.get()
    place = (kind, *reception.recurrent_layer)
    reception.call_counts[place] += 1
    return reception.backend.recur((*place, reception.call_counts[place]), operation)


@dataclass(slots=True)
class _HookState:
    """A listener, and what the facade heard last: the attention layer, and the recurrent layer and state number."""

    backend: AttentionBackend
    layer: int | None = None
    is_cross: bool = False
    recurrent_layer: tuple[int, int] = (-1, 0)
    call_counts: Counter[Hashable] = field(default_factory=Counter)


_state: ContextVar[_HookState] = ContextVar("engine.model.hooks.current")


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
    position_bias: Tensor | ScoreBias | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: query [1, heads, rows, width], output [1, rows, heads, value_width]."""
    reception = _state.get(None)
    if reception is None:
        own = {"scaling": scaling, "position_bias": position_bias, **others}
        alone: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **own)
        return alone
    # Layers that share weights (Zamba) have no index of their own; the cache call before tells which layer this is.
    layer = reception.layer if reception.layer is not None else int(module.layer_idx)  # type: ignore[arg-type]
    crosses, reception.layer, reception.is_cross = reception.is_cross, None, False
    own = {"attention_mask": attention_mask, **{name: others.get(name) for name in _SPARSE_ARGUMENTS}}
    if not crosses and any(value is not None for value in own.values()):
        raise NotImplementedError(f"a layer chooses what it sees: {[name for name in own if own[name] is not None]}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    latent = getattr(module, "latent_projection", None)
    if latent is not None:
        # What comes as key and value are the latent and its rotated part: install_latent saw to that.
        key, value = torch.cat((key, value), -1), value[..., :0]
    window, bias = sliding_window or None, position_bias if callable(position_bias) else None
    call = AttentionCall(layer, query[0], key[0], value[0], scale, window, softcap, s_aux, latent, bias, crosses)
    return reception.backend.attend(call)[None], None


class CacheFacade(HFCache):  # type: ignore[misc]
    """A cache that keeps nothing: the listener does. Lives for one forward."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__(layers=[])
        self._positions = positions

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Remember which layer is at work; the new keys and values go on as they came."""
        reception = _state.get()
        reception.layer, reception.is_cross = layer_idx, False
        return key, value

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """None, so that mixers take the form that computes whole sequences: the operations know the states."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is recorded here."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """See has_previous_state."""
        _state.get().recurrent_layer = (layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """See has_previous_state."""
        _state.get().recurrent_layer = (layer_idx, state_idx)

    def update_conv_state(self, rows: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Remember which layer is at work; the rows go on as they came."""
        _state.get().recurrent_layer = (layer_idx, state_idx)
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


class _EncoderLayers:
    """In place of a cache's layers where these hold what an encoder made: whoever takes keys from one crosses there."""

    is_initialized = True

    def __init__(self, device: torch.device) -> None:
        self._placeholder = torch.zeros(1, 1, 1, 1, device=device)

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[_EncoderLayers]:
        return iter(())

    def __getitem__(self, layer: int) -> _EncoderLayers:
        reception = _state.get()
        reception.layer, reception.is_cross = layer, True
        return self

    @property
    def keys(self) -> Tensor:
        """A tensor that is not empty, for models that skip the layer otherwise."""
        return self._placeholder

    @property
    def values(self) -> Tensor:
        """See keys."""
        return self._placeholder


class _EncoderDecoderFacade(EncoderDecoderCache):  # type: ignore[misc]
    """The facade for models that keep what an encoder made apart from the decoder's own keys."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__(CacheFacade(positions), CacheFacade(positions))
        self.cross_attention_cache.layers = _EncoderLayers(positions.device)
        self.is_updated = _AlwaysUpdated()


class _AlwaysUpdated(dict[int, bool]):
    """Every layer's keys are there: models ask before they would make them."""

    def get(self, layer: int, default: object = None) -> bool:
        return True


AttentionInterface.register(ATTENTION_NAME, _attention)
