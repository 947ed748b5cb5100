"""Hooks into transformers: unmodified models attend over the cells of the shared cache.

A batch is one packed row [1, tokens] with explicit positions. Three hooks carry it:
* an attention function in transformers' AttentionInterface, which passes (query, key, value) of each layer to the
  current `AttentionBackend`;
* a cache facade, which stores nothing and answers the models' own position arithmetic;
* for recurrent layers, operations that split the row by sequence (engine/model/recurrence.py).

A cross-attention layer reads its keys from the facade, which marks the call as cross attention; the backend has the
keys and values of each sequence's encoder entry. Without a backend, attention is transformers' own (encoders run this
way). The backend is a context variable because some models (StableLM, Nemotron) drop keyword arguments on the way.
Written for transformers 5.23: its cache and attention interfaces change with every minor version.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutput

from engine.kernels.attention_input import ScoreBias
from engine.kernels.latent import LatentProjection
from engine.step.input import FINAL_NORM, decoder_layers_of

ATTENTION_NAME = "cells"

# Keyword arguments of layers with sparse attention that select the positions of each query (DeepSeek-V3.2, MiniMax-M3).
_SPARSE_ARGUMENTS = ("indices", "block_indices")


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention call: query [heads, tokens, width], key and value [key_heads, tokens, width].

    With latent attention the key is [latent, rotary part] of one head and the value has no columns. In cross attention
    (`is_cross`) key and value are placeholders.
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


class RecurrentOperation(Protocol):
    """An operation that mixes the tokens of a sequence, over the rows of a packed batch."""

    def __call__(self, start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output of tokens [start, stop) from the state before them (None: zeros), and the next state."""
        ...

    def run_rows(self, rows: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs [rows, ...] of single tokens of different sequences, and the next states.

        rows    int64, of the batch
        states  [rows, ...]: a state of `__call__` each
        """
        ...


class AttentionBackend(Protocol):
    """Computes every operation of a forward that mixes tokens: the runner while serving, the calibration at load."""

    def attend(self, call: AttentionCall) -> Tensor:
        """The output [tokens, heads, value_width]."""
        ...

    def recur(self, name: Hashable, operation: RecurrentOperation) -> list[Tensor]:
        """Run the recurrent operation `name` for each sequence: its outputs in batch order."""
        ...


def default_attention(model: Any) -> str:
    """The attention implementation of the unmodified model."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def set_attention(model: Any, name: str) -> None:
    """Set the attention implementation of the text layers; those of other parts, such as vision towers, keep theirs."""
    config = model.config
    text = config.get_text_config(decoder=True)
    key = next((key for key in config.sub_configs if getattr(config, key, None) is text), None)
    has_parts = key is not None or (config.sub_configs and text is config)
    model.set_attn_implementation({"": name, **({} if key is None else {key: name})} if has_parts else name)


def tower_modules(model: Any) -> frozenset[nn.Module]:
    """The modules other than the decoder, the embeddings and the output layer."""
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    text = {module for part in parts if part is not None for module in part.modules()}
    return frozenset(module for module in model.modules() if text.isdisjoint(module.modules()))


def set_tower_attention(model: Any) -> None:
    """Set the default attention implementation for the parts other than the text: they need masks of padding."""
    config, text = model.config, model.config.get_text_config(decoder=True)
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    towers = [key for key, part in parts.items() if part is not None and part is not text]
    if towers:
        model.set_attn_implementation(dict.fromkeys(towers, default_attention(model)))


@contextmanager
def use_attention(model: Any, name: str) -> Iterator[None]:
    """`set_attention` within the block."""
    earlier = model.config._attn_implementation
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, earlier)


@contextmanager
def use_backend(backend: AttentionBackend) -> Iterator[None]:
    """Inside the block, models with the attention implementation ATTENTION_NAME call `backend`."""
    token = _state.set(_HookState(backend))
    try:
        yield
    finally:
        _state.reset(token)


def forward(
    model: Any,
    tokens: Tensor,
    positions: Tensor,
    logit_rows: Tensor,
    *,
    cross_mask: Tensor | None = None,
    position_axes: Tensor | None = None,
) -> Tensor:
    """Logits [logit_rows, vocabulary] of a packed batch: tokens and positions [tokens], `logit_rows` indices into it.

    cross_mask     [tokens], true where a token attends to the encoder output of its sequence; None: no token does
    position_axes  [axes, tokens] in place of the positions, which stay the indices of the tokens in their sequences
    """
    accepted = _parameters(model.__class__.forward)
    inputs = {
        "input_ids": tokens[None],
        "position_ids": positions[None] if position_axes is None else _position_ids(position_axes),
        "use_cache": True,
        "logits_to_keep": logit_rows,
    }
    if "decoder_input_ids" in accepted:
        inputs |= _decoder_inputs(tokens, positions)
    else:
        inputs["past_key_values"] = inputs["cache_params"] = facade = CacheFacade(positions)
        if cross_mask is not None:
            facade.layers = _EncoderLayers(positions.device)
            inputs["cross_attention_mask"] = cross_mask.long()[None, :, None, None]
    logits: Tensor = model(**{name: value for name, value in inputs.items() if name in accepted}).logits[0]
    # A model that ignores logits_to_keep returns every row; `capture_hidden_states` returns fewer.
    return logits if logits.shape[0] <= logit_rows.shape[0] else logits[logit_rows]


def _position_ids(axes: Tensor) -> Tensor:
    """[1, tokens], or [axes, 1, tokens]."""
    return axes if len(axes) == 1 else axes[:, None]


@contextmanager
def watch_output_layer(model: Any) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether the model has called its output layer inside the block.

    A model that computes logits without it does not support `capture_hidden_states`.
    """
    calls: list[bool] = []
    layer = model.get_output_embeddings()
    handle = None if layer is None else layer.register_forward_pre_hook(lambda *_: calls.append(True))
    try:
        yield lambda: bool(calls)
    finally:
        if handle is not None:
            handle.remove()


@dataclass(frozen=True, slots=True)
class OutputIndices:
    """Indices into the output rows of a forward, int64: rows with logits, and rows with hidden states."""

    logits: Tensor
    hidden_states: Tensor


@contextmanager
def capture_hidden_states(
    model: Any, output_rows: Tensor, indices: OutputIndices, layers: Sequence[int] = (FINAL_NORM,)
) -> Iterator[dict[int, Tensor]]:
    """Inside the block, a forward with these `output_rows` computes logits by `indices`.

    Its hidden states [rows, width] after each of `layers` (HiddenRows) are in the yielded dictionary then.

    Rows with hidden states alone get no logits, which take most memory.
    """
    states: dict[int, Tensor] = {}

    def narrow(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = inputs[0][0]
        # A model that ignores logits_to_keep passes every row.
        if rows.shape[0] != output_rows.shape[0]:
            rows = rows[output_rows]
        states[FINAL_NORM] = rows[indices.hidden_states]
        return rows[indices.logits][None], *inputs[1:]

    def read(layer: int, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        rows = output[0] if isinstance(output, tuple) else output
        states[layer] = rows[0][output_rows[indices.hidden_states]]

    with ExitStack() as handles:
        handles.enter_context(model.get_output_embeddings().register_forward_pre_hook(narrow))
        for layer in decoder_layers_of(layers):
            module = decoder_layers(model)[layer]
            handles.enter_context(module.register_forward_hook(partial(read, layer)))
        yield states
    if not states.keys() >= {FINAL_NORM, *layers}:
        raise NotImplementedError("the model computes logits without its output layer, or without one of its layers")


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """The layers of the decoder; their outputs are hidden states; empty if they are not in one list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return tuple(module)
    return ()


def encode(model: Any, media: Mapping[str, Tensor], start_token: int) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer, the cross-attention keys [heads, length, width] and values of encoder inputs with batch size 1.

    Runs the unmodified model on the media and one token, `start_token`, and reads transformers' cache. In models with
    one cache for both kinds of layers the result contains the self-attention layers of that token too.
    """
    encoder_decoder = "decoder_input_ids" in _parameters(model.__class__.forward)
    token = torch.tensor([[start_token]], device=next(model.parameters()).device)
    cross_cache = DynamicCache()
    cache = EncoderDecoderCache(DynamicCache(), cross_cache) if encoder_decoder else cross_cache
    model(**media, **{"decoder_input_ids" if encoder_decoder else "input_ids": token}, past_key_values=cache)
    return {
        index: (layer.keys[0], layer.values[0])
        for index, layer in enumerate(cross_cache.layers)
        if layer.is_initialized
    }


def _decoder_inputs(tokens: Tensor, positions: Tensor) -> dict[str, Any]:
    """Inputs of an encoder-decoder model without its encoder."""
    return {
        "input_ids": None,
        "decoder_input_ids": tokens[None],
        # Some models derive a mask from the length of the cache unless they get one.
        "decoder_attention_mask": torch.ones_like(tokens)[None],
        "encoder_outputs": BaseModelOutput(torch.zeros(1, 1, 1, device=tokens.device)),
        "past_key_values": _EncoderDecoderFacade(positions),
    }


def install_bias(model: Any) -> None:
    """Let layers with a relative position bias (T5) pass the function of the bias instead of its values.

    The values would be wrong: neighbours in the packed row may belong to different sequences.
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
    """Let layers with latent attention pass their latents instead of the expanded keys and values.

    All such layers of transformers expand by the method `expand_kv` with weights of one layout, which are used
    directly.
    """
    for module in model.modules():
        expand = getattr(module, "expand_kv", None)
        if expand is None or hasattr(module, "latent_projection"):
            continue
        widths = (module.qk_nope_head_dim, module.v_head_dim)
        weight = module.kv_b_proj.weight.detach().view(-1, sum(widths), module.kv_lora_rank)
        module.latent_projection = LatentProjection(*weight.split(widths, 1))
        module.expand_kv = _skip_expansion(expand)


def latent_projections(model: nn.Module) -> Iterator[LatentProjection]:
    """The projections of the layers with latent attention, after `install_latent`."""
    for module in model.modules():
        projection = getattr(module, "latent_projection", None)
        if projection is not None:
            yield projection


def _skip_expansion(expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def expand_kv(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        return (latent, rotated) if has_backend() else expand(latent, rotated)

    return expand_kv


def has_backend() -> bool:
    """Whether the calls of models go to a backend."""
    return _state.get(None) is not None


def recur(kind: str, operation: RecurrentOperation) -> list[Tensor]:
    """Pass a recurrent operation to the backend, named by its layer, its state and the number of earlier calls."""
    state = _state.get()
    operation_name = (kind, *state.recurrent_layer)
    state.call_counts[operation_name] += 1
    return state.backend.recur((*operation_name, state.call_counts[operation_name]), operation)


@dataclass(slots=True)
class _HookState:
    """The backend, the attention layer of the last cache update, and the recurrent layer and state index of the last
    access.
    """

    backend: AttentionBackend
    layer: int | None = None
    is_cross: bool = False
    recurrent_layer: tuple[int, int] = (-1, 0)
    call_counts: Counter[Hashable] = field(default_factory=Counter)


_state: ContextVar[_HookState] = ContextVar("engine.model.hooks.current")


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of a forward's parameters: recurrent models name their cache differently."""
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
    """Attention function of transformers: query [1, heads, tokens, width], output [1, tokens, heads, value_width]."""
    state = _state.get(None)
    if state is None:
        arguments = {"scaling": scaling, "position_bias": position_bias, **others}
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
        return output
    # Layers that share weights (Zamba) have no index: the preceding cache update has it.
    layer = state.layer if state.layer is not None else int(module.layer_idx)  # type: ignore[arg-type]
    is_cross, state.layer, state.is_cross = state.is_cross, None, False
    selections = {"attention_mask": attention_mask, **{name: others.get(name) for name in _SPARSE_ARGUMENTS}}
    if not is_cross and any(value is not None for value in selections.values()):
        raise NotImplementedError(
            f"a layer selects its positions by {[name for name, value in selections.items() if value is not None]}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    latent = getattr(module, "latent_projection", None)
    if latent is not None:
        # Key and value are the latent and its rotary part (install_latent).
        key, value = torch.cat((key, value), -1), value[..., :0]
    window, bias = sliding_window or None, position_bias if callable(position_bias) else None
    call = AttentionCall(layer, query[0], key[0], value[0], scale, window, softcap, s_aux, latent, bias, is_cross)
    return state.backend.attend(call)[None], None


class CacheFacade(HFCache):  # type: ignore[misc]
    """A transformers cache that stores nothing: the backend stores keys, values and states. Lives for one forward."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__(layers=[])
        self._positions = positions

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Note the current layer and return the new keys and values unchanged."""
        state = _state.get()
        state.layer, state.is_cross = layer_idx, False
        return key, value

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """False, so that mixers take their prefill path: the backend provides the states."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: nothing is recorded."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Note the current layer."""
        _state.get().recurrent_layer = (layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Note the current layer."""
        _state.get().recurrent_layer = (layer_idx, state_idx)

    def update_conv_state(self, rows: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Note the current layer and return its input unchanged."""
        _state.get().recurrent_layer = (layer_idx, state_idx)
        return rows

    def update_recurrent_state(self, state: Any, layer_idx: int, state_idx: int = 0, **_: Any) -> Any:
        """Return the state unchanged: the operation has passed it to the backend already."""
        return state

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """A tensor: `arange(tokens) + length` is the true position of each token (the arithmetic of Llama 4)."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0: only masks use it, and the backend masks."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The batch alone: only masks use it, and the backend masks."""
        return query_length, 0


class _EncoderLayers:
    """Stands for the layers of a cross-attention cache: reading keys of one marks the next attention call as cross
    attention.
    """

    is_initialized = True

    def __init__(self, device: torch.device) -> None:
        self._placeholder = torch.zeros(1, 1, 1, 1, device=device)

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[_EncoderLayers]:
        return iter(())

    def __getitem__(self, layer: int) -> _EncoderLayers:
        state = _state.get()
        state.layer, state.is_cross = layer, True
        return self

    @property
    def keys(self) -> Tensor:
        """A tensor that is not empty: some models skip a layer without keys."""
        return self._placeholder

    @property
    def values(self) -> Tensor:
        """As `keys`."""
        return self._placeholder


class _EncoderDecoderFacade(EncoderDecoderCache):  # type: ignore[misc]
    """The facade for models with separate caches of self attention and cross attention."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__(CacheFacade(positions), CacheFacade(positions))
        self.cross_attention_cache.layers = _EncoderLayers(positions.device)
        self.is_updated = _AlwaysUpdated()


class _AlwaysUpdated(dict[int, bool]):
    """Marks the cross-attention keys of every layer as computed."""

    def get(self, layer: int, default: object = None) -> bool:
        return True


AttentionInterface.register(ATTENTION_NAME, _attention)
