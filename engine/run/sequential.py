"""Runs one sequence at a time over the shared cache, for models with attention or masks that cannot be packed.

Each span is a forward of its own: a cache of transformers is filled with the cells of the slot, the unmodified model
runs with its own attention, masks and positions, and the new keys and values are stored. It attends to them as they are
read back from the cells, so chunks change no bit. This supports every model with keys and values in a cache of
transformers. It is slower, as cells are copied and sequences share no matrix product, and
keys are never rotated: a context shift recomputes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from engine.kernels.products import RowInvariantProduct
from engine.model import hooks, rope
from engine.model.invariant import RowInvariant, StableTopK
from engine.model.layers import CachedLayer
from engine.model.rope import RopeSwitch
from engine.run.packed import hidden_states_reason, output_arrays
from engine.run.runner import LocalRunner
from engine.sample.device_sampler import sampler_for
from engine.sample.sampler import Sampler
from engine.step.input import StepFeatures, StepInput
from engine.step.output import StepOutput, sampled_output
from kvcache.forward import Forward
from kvcache.kv_buffer import LayerKV
from kvcache.spec import LayerSpec, Span

HFCache: TypeAlias = Any  # a cache of transformers


_SUPPORTED_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)


class UnsupportedCache(Exception):
    """The model caches something other than keys and values by layer, or caches it elsewhere."""


class _CellLayer(DynamicIndexedLayer):  # type: ignore[misc]
    """A layer of transformers' cache over cells: all its keys and values are read back from cells.

    Masks exclude keys beyond a window, so it keeps those that a layer with a window would drop.
    """

    def __init__(self, spec: LayerSpec, cells: tuple[LayerKV, LayerKV], dtype: torch.dtype) -> None:
        """`dtype` is that of numbers read from cells."""
        super().__init__()
        self._key_cells, self._value_cells = cells
        self._value_width, self._index_width = spec.value_width - spec.index_width, spec.index_width
        self._cell_dtype = dtype

    def load(self, cells: slice | Tensor, length: int) -> None:
        """Append the first `length` of some cells."""
        keys, values = (self._read(stored, cells)[None, :, :length] for stored in (self._key_cells, self._value_cells))
        super().update(keys, values[..., : self._value_width])
        if self._index_width:
            super().update_indexer(values[:, 0, :, self._value_width :])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        """See DynamicLayer."""
        self._new_keys, self._new_values = (states.to(self._cell_dtype) for states in (key_states, value_states))
        keys = self._key_cells.buffer.round(self._new_keys)
        values = self._round_values(functional.pad(self._new_values, (0, self._index_width)))
        values = values[..., : self._value_width]
        attended: tuple[Tensor, Tensor] = super().update(
            keys.to(key_states.dtype), values.to(value_states.dtype), *args, **settings
        )
        return attended

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """See DynamicIndexedLayer."""
        self._new_index = indexer_key_states.to(self._cell_dtype)
        keys = self._round_values(functional.pad(self._new_index, (self._value_width, 0)))
        attended: Tensor = super().update_indexer(keys[..., self._value_width :].to(indexer_key_states.dtype))
        return attended

    def new_rows(self) -> tuple[Tensor, Tensor]:
        """The new rows of cells, not rounded: keys and values [heads, positions, width]."""
        keys, values = self._new_keys[0], self._new_values[0]
        return keys, torch.cat((values, self._new_index), -1) if self._index_width else values

    def _read(self, stored: LayerKV, cells: slice | Tensor) -> Tensor:
        return stored.transform(stored.read(cells, self._cell_dtype))

    def _round_values(self, rows: Tensor) -> Tensor:
        return self._value_cells.buffer.round(rows)


class SequentialRunner(LocalRunner):
    """Runs a model one sequence at a time over the shared cache. Belongs to the engine thread.

    model  transformers' model; running two tokens shows the layers that store cells
    """

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
        stored = {layer_index: layer for layer_index, layer in enumerate(cache.layers) if layer.is_initialized}
        self.layers = tuple(CachedLayer(layer_index, _spec(layer)) for layer_index, layer in stored.items())
        self.long_factor_layers = self.layers
        if not self.layers:
            raise UnsupportedCache("its cache is empty")

    def make_invariant(self, product: RowInvariantProduct) -> None:
        """See LocalRunner."""
        self._invariant = RowInvariant(product)

    def supports(self, features: StepFeatures) -> str | None:
        """See ModelRunner."""
        if features.bidirectional:
            return "this model cannot run packed"
        if features.contents or features.position_axes or features.far_positions:
            return "images and audio need a model that runs packed"
        if features.adapters:
            return "adapters need a model that runs packed"
        return hidden_states_reason(self.model, features.hidden_layers, has_hidden_states=self.has_hidden_states)

    def run(self, step: StepInput) -> StepOutput:
        """See ModelRunner. Raises ValueError for other features: the model's own masks would ignore them."""
        reason = self.supports(step.features)
        if reason is not None:
            raise ValueError(reason)
        forward, logits, caches, row = step.forward, [], [], 0
        layers = step.features.hidden_layers
        states: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        for number, span in enumerate(forward.spans):
            stop = row + span.length
            cache, tokens = self._fill_cache(forward, number), step.tokens[row:stop]
            logit_rows, hidden_rows = (
                [logit_row - row for logit_row in rows if row <= logit_row < stop]
                for rows in (step.logit_rows, () if step.hidden is None else step.hidden.rows)
            )
            output_rows, *places = map(self._tensor, output_arrays(logit_rows, hidden_rows if layers else None))
            if places:
                indices = hooks.OutputIndices(*places)
                with hooks.capture_hidden_states(self.model, output_rows, indices, layers) as captured:
                    logits.append(self._run(cache, span, tokens, output_rows))
                for layer, parts in states.items():
                    parts.append(captured[layer])
            else:
                logits.append(self._run(cache, span, tokens, output_rows))
            caches.append(cache)
            row = stop
        for index, cached in enumerate(self.layers):
            keys, values = zip(*(cache.layers[cached.index].new_rows() for cache in caches), strict=True)
            forward.store_kv(index, torch.cat(keys, 1), torch.cat(values, 1))
        hidden_states = {layer: torch.cat(rows) for layer, rows in states.items()}
        return sampled_output(step, self.sampler, torch.cat(logits), hidden_states)

    def _fill_cache(self, forward: Forward, number: int) -> HFCache:
        """A cache of transformers with the contents of the slot before the span `number`."""
        cache, before = DynamicCache(), forward.spans[number].start
        cache.layers = [DynamicLayer() for _ in range(1 + max(layer.index for layer in self.layers))]
        for index, cached in enumerate(self.layers):
            layer = _CellLayer(cached.spec, forward.layer_kv(index), self.model.dtype)
            if before > 0:
                layer.load(forward.segments(index)[number].cells, before)
            cache.layers[cached.index] = layer
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


def _spec(layer: Any) -> LayerSpec:
    """A layer of transformers' cache, without a known rotation of its keys. Raises UnsupportedCache."""
    if type(layer) not in _SUPPORTED_LAYERS or layer.keys.dim() != 4 or layer.keys.shape[2] != 2:
        raise UnsupportedCache(f"its cache has layers of the kind {type(layer).__name__}")
    keys, values, index = layer.keys, layer.values, getattr(layer, "indexer_keys", None)
    index_width = 0 if index is None else index.shape[-1]
    width = values.shape[-1] + index_width
    return LayerSpec(keys.shape[1], keys.shape[-1], width, rotation=None, index_width=index_width)
