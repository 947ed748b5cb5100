"""Runs one sequence at a time over the shared cache, for models with attention or masks that cannot be packed.

Each span is a forward of its own: a cache of transformers is filled with the cells of the slot, the unmodified model
runs with its own attention, masks and positions, and the new keys and values are stored. This supports every model with
keys and values in a cache of transformers. It is slower, as cells are copied and sequences share no matrix product, and
keys are never rotated: a context shift recomputes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from engine.kernels.products import RowInvariantProduct
from engine.model import hooks, rope
from engine.model.encoder_mask import EncoderMask
from engine.model.invariant import RowInvariant, StableTopK
from engine.model.layers import CachedLayer
from engine.model.model_runner import LocalRunner
from engine.model.rope import RopeSwitch
from engine.sample.device_sampler import sampler_for
from engine.sample.sampler import Sampler
from kvcache.forward import Forward
from kvcache.kv_buffer import LayerKV
from kvcache.spec import LayerSpec, Span

HFCache: TypeAlias = Any  # a cache of transformers

# Classes of cache layers: masks exclude keys beyond a window, so a layer that would drop them may keep them.
_FULL_LENGTH_LAYERS = {
    DynamicLayer: DynamicLayer,
    DynamicSlidingWindowLayer: DynamicLayer,
    DynamicIndexedLayer: DynamicIndexedLayer,
}


class UnsupportedCache(Exception):
    """The model caches something other than keys and values by layer, or caches it elsewhere."""


@dataclass(frozen=True, slots=True)
class _LayerFormat:
    """One layer of transformers' cache: its class, and the columns of its values; keys of an indexer follow them."""

    kind: type[DynamicLayer]
    value_width: int


class SequentialRunner(LocalRunner):
    """Runs a model one sequence at a time over the shared cache. Belongs to the engine thread.

    model  transformers' model; running two tokens shows the layers that store cells
    """

    # The masks are the model's own.
    supports_bidirectional = False

    def __init__(self, model: Any, switch: RopeSwitch | None = None) -> None:
        """Raises UnsupportedCache, or whatever the model raises."""
        self.model, self.switch = model, switch
        self.sampler: Sampler = sampler_for(next(model.parameters()).device)
        self._invariant: RowInvariant | None = None
        self.has_hidden_states = False
        self._device = next(model.parameters()).device
        self._parameters = frozenset(inspect.signature(type(model).forward).parameters)
        cache = DynamicCache(config=model.config)
        self._run(cache, Span(0, 0, 2), [0, 1], self._tensor([1]))
        stored = {at: layer for at, layer in enumerate(cache.layers) if layer.is_initialized}
        self._formats = {at: _layer_format(layer) for at, layer in stored.items()}
        self.layers = tuple(CachedLayer(at, _spec(*_read(layer, 0))) for at, layer in stored.items())
        self.long_factor_layers = self.layers
        if not self.layers:
            raise UnsupportedCache("its cache is empty")

    def make_invariant(self, product: RowInvariantProduct) -> None:
        """See LocalRunner."""
        self._invariant = RowInvariant(product)

    def run(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> Tensor:
        """See ModelRunner."""
        return self.run_with_hidden_states(forward, tokens, logit_rows, (), encoder_masks)[0]

    def run_with_hidden_states(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        hidden_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """See ModelRunner. Raises ValueError for bidirectional ranges."""
        if any(span.bidirectional for span in forward.spans):
            raise ValueError("the sequential runner does not support bidirectional ranges")
        logits, states, caches, row = [], [], [], 0
        for number, span in enumerate(forward.spans):
            stop = row + span.length
            cache = self._fill_cache(forward, number)
            own_logit_rows, own_hidden_rows = (
                [at - row for at in rows if row <= at < stop] for rows in (logit_rows, hidden_rows)
            )
            if own_hidden_rows:
                with hooks.capture_hidden_states(self.model, own_logit_rows, own_hidden_rows) as capture:
                    logits.append(self._run(cache, span, tokens[row:stop], self._tensor(capture.output_rows)))
                states.append(capture.hidden_states)
            else:
                logits.append(self._run(cache, span, tokens[row:stop], self._tensor(own_logit_rows)))
            caches.append(cache)
            row = stop
        for index, layer in enumerate(self.layers):
            added = [
                _read(cache.layers[layer.index], span.start) for cache, span in zip(caches, forward.spans, strict=True)
            ]
            keys, values = (torch.cat(parts, 1) for parts in zip(*added, strict=True))
            forward.store_kv(index, keys, values)
        return torch.cat(logits), torch.cat(states) if states else logits[0][:0]

    def _fill_cache(self, forward: Forward, number: int) -> HFCache:
        """A cache of transformers with the contents of the slot before the span `number`."""
        cache = DynamicCache()
        kinds = [
            self._formats[at].kind if at in self._formats else DynamicLayer for at in range(max(self._formats) + 1)
        ]
        cache.layers = [kind() for kind in kinds]
        before = forward.spans[number].start
        if before == 0:
            return cache
        for index, cached in enumerate(self.layers):
            cells = forward.segments(index)[number].cells
            keys, values = (
                _read_cells(stored, cells, self.model.dtype)[None, :, :before] for stored in forward.layer_kv(index)
            )
            layer, width = cache.layers[cached.index], self._formats[cached.index].value_width
            layer.update(keys, values[..., :width])
            if isinstance(layer, DynamicIndexedLayer):
                layer.update_indexer(values[:, 0, :, width:])
        return cache

    def _run(self, cache: HFCache, span: Span, tokens: Sequence[int], logit_rows: Tensor) -> Tensor:
        inputs = {
            "input_ids": self._tensor(tokens)[None],
            "position_ids": torch.arange(span.start, span.stop, device=self._device)[None],
            "attention_mask": torch.ones(1, span.stop, dtype=torch.long, device=self._device),
            "past_key_values": cache,
            "use_cache": True,
            "logits_to_keep": logit_rows,
        }
        long_rows = None if self.switch is None else self.switch.long_factors([span])
        with torch.inference_mode(), rope.use_long_factors(long_rows), StableTopK(), self._invariant or nullcontext():
            output = self.model(**{name: value for name, value in inputs.items() if name in self._parameters})
        logits: Tensor = output.logits[0]
        return logits if logits.shape[0] <= len(logit_rows) else logits[logit_rows]

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)


def _layer_format(layer: Any) -> _LayerFormat:
    kind = _FULL_LENGTH_LAYERS.get(type(layer))
    if getattr(layer, "indexer_keys", None) is None and kind is not None:
        kind = DynamicLayer
    if kind is None or layer.keys.dim() != 4 or layer.keys.shape[2] != 2:
        raise UnsupportedCache(f"its cache has layers of the kind {type(layer).__name__}")
    return _LayerFormat(kind, layer.values.shape[-1])


def _read(layer: Any, start: int) -> tuple[Tensor, Tensor]:
    """Keys and values [heads, positions, width] of a layer from a position on, in the layout of cells."""
    keys, values = layer.keys[0, :, start:], layer.values[0, :, start:]
    if getattr(layer, "indexer_keys", None) is not None:
        values = torch.cat((values, layer.indexer_keys[:, start:]), -1)
    return keys, values


def _read_cells(stored: LayerKV, cells: slice | Tensor, dtype: torch.dtype) -> Tensor:
    """The stored numbers of cells, in the dtype of the model."""
    return stored.transform(stored.read(cells, dtype))


def _spec(keys: Tensor, values: Tensor) -> LayerSpec:
    """A layer without a known rotation of its keys."""
    return LayerSpec(keys.shape[0], keys.shape[-1], values.shape[-1], rotation=None)
