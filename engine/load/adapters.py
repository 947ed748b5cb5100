"""Loads the adapters of the settings, and checks that the runner of the model computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.adapters.adapter import Adapter
from engine.adapters.checkpoint import read_adapter
from engine.adapters.modules import AdaptableLayers, watch_adapted_layers
from engine.adapters.store import AdapterStore
from engine.config import EngineConfig
from engine.errors import AdapterUnsupported
from engine.model.encoder import has_encoder
from engine.run.runner import ModelRunner
from engine.step.input import StepFeatures, StepInput
from kvcache.cache import Cache
from kvcache.spec import Span

# Tokens of the check: two with the adapter, and one without.
_LENGTHS = (2, 1)


def load_adapters(config: EngineConfig, model: Any, runner: ModelRunner, *, recurrent: bool) -> AdapterStore:
    """The adapters of the settings. Raises AdapterUnsupported."""
    if not config.lora:
        return AdapterStore()
    layers = AdaptableLayers(model)
    store, shapes = AdapterStore(layers), layers.shapes
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    reason = runner.supports(StepFeatures(adapters=True))
    if reason is None and has_encoder(model.config):
        reason = "models with an encoder have no adapters"
    for name, folder in config.adapters.items():
        if reason is not None:
            raise AdapterUnsupported(name, reason)
        adapter = read_adapter(name, Path(folder).expanduser(), shapes, dtype)
        _check(adapter, store.load(adapter), runner, _cache(runner, model.dtype, recurrent=recurrent))
    return store


def _cache(runner: ModelRunner, dtype: torch.dtype, *, recurrent: bool) -> Cache:
    """An empty cache for the check."""
    length = sum(_LENGTHS)
    specs = [layer.spec for layer in runner.layers]
    state_bytes = 0 if recurrent else None
    return Cache(specs, slots=2, capacity=length, cells=2 * length, state_bytes=state_bytes, dtype=dtype)


def _check(adapter: Adapter, slot: int, runner: ModelRunner, cache: Cache) -> None:
    """Raise AdapterUnsupported unless a step calls every adapted layer with all rows of the batch.

    A model may read the weights of a layer without a call, or call it with the rows of some tokens only.
    """
    spans = [Span(number, 0, length) for number, length in enumerate(_LENGTHS)]
    tokens = range(sum(_LENGTHS))
    with watch_adapted_layers() as called, cache.forward(spans) as forward:
        try:
            runner.run(StepInput(forward, tokens, [tokens[-1]], adapters=(slot, 0)))
        except ValueError as error:
            raise AdapterUnsupported(adapter.name, str(error)) from error
    missing = [layer for layer in adapter.layers if layer not in called]
    if missing:
        raise AdapterUnsupported(adapter.name, f"the model does not call its layer {missing[0]} for every token")
