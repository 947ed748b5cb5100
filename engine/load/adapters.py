"""Reads the adapters of a model, and loads those of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.adapters.adapter import Adapter
from engine.adapters.catalog import AdapterLimits
from engine.adapters.checkpoint import read_adapter
from engine.adapters.modules import AdaptableLayers
from engine.adapters.store import AdapterStore
from engine.config import EngineConfig
from engine.errors import AdapterUnsupported
from engine.gguf.adapter import read_gguf_adapter
from engine.model.encoder import has_encoder
from engine.native.runner import NativeRunner
from engine.run.runner import ModelRunner, runners_of
from engine.step.input import StepFeatures, StepInput
from kvcache.cache import Cache
from kvcache.spec import Span

# The default of --lora-memory is the least of both: bytes, and a part of the free memory.
_MEMORY_BYTES, _MEMORY_DIVISOR = 512 * 2**20, 20
# Tokens of the check: two with an adapter, and one without.
_LENGTHS = (2, 1)


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters of one model. From any thread.

    shapes    [outputs, columns] of its linear layers, by name
    called    the layers that a step calls with all rows
    computed  those of them that all runners adapt
    config    of the model of transformers
    dtype     of factors in memory
    """

    shapes: Mapping[str, tuple[int, int]]
    called: frozenset[str]
    computed: frozenset[str]
    config: Any
    dtype: torch.dtype

    def read(self, name: str, path: Path, root: Path | None = None) -> Adapter:
        """The adapter in a folder or a GGUF file; symbolic links in a folder are followed inside of `root` only.

        Raises AdapterUnsupported.
        """
        if path.suffix == ".gguf":
            adapter = read_gguf_adapter(name, path, self.shapes, self.config, self.dtype)
        else:
            adapter = read_adapter(name, path, self.shapes, self.dtype, root)
        for layer in adapter.layers:
            if layer not in self.called:
                raise AdapterUnsupported(name, f"the model does not call its layer {layer} for every token")
            if layer not in self.computed:
                reason = f"the native step cannot adapt its layer {layer}; --kernels torch can"
                raise AdapterUnsupported(name, reason)
        return adapter


def load_adapters(
    config: EngineConfig, model: Any, runner: ModelRunner, *, recurrent: bool
) -> tuple[AdapterStore, AdapterReader | None]:
    """The adapters of the settings, and the reader of others; None if the settings permit none.

    Raises AdapterUnsupported.
    """
    if not config.has_adapters:
        return AdapterStore(), None
    reason = runner.supports(StepFeatures(adapters=True))
    if reason is None and has_encoder(model.config):
        reason = "models with an encoder have no adapters"
    if reason is not None:
        raise AdapterUnsupported(next(iter(config.adapters), config.lora_dir or ""), reason)
    layers = AdaptableLayers(model)
    cache = _cache(runner, model.dtype, recurrent=recurrent)
    called = layers.find_called(lambda: _run(runner, cache))
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    native = [part.add_adapters(layers.modules) for part in runners_of(runner) if isinstance(part, NativeRunner)]
    computed = called.intersection(*(adapters.names for adapters in native))
    reader = AdapterReader(layers.shapes, called, computed, model.config.get_text_config(), dtype)
    store = AdapterStore(layers, *native)
    for name, folder in config.adapters.items():
        store.load(reader.read(name, Path(folder).expanduser()))
    return store, reader


def adapter_limits(config: EngineConfig, available_bytes: int) -> AdapterLimits:
    """Of the adapters that are loaded at run time."""
    memory = config.lora_memory
    if memory is None:
        memory = min(_MEMORY_BYTES, available_bytes // _MEMORY_DIVISOR)
    return AdapterLimits(config.max_loras, memory)


def _cache(runner: ModelRunner, dtype: torch.dtype, *, recurrent: bool) -> Cache:
    """An empty cache for the check."""
    length = sum(_LENGTHS)
    specs = [layer.spec for layer in runner.layers]
    state_bytes = 0 if recurrent else None
    return Cache(specs, slots=2, capacity=length, cells=2 * length, state_bytes=state_bytes, dtype=dtype)


def _run(runner: ModelRunner, cache: Cache) -> None:
    """A step with two sequences, the first with an adapter."""
    spans = [Span(number, 0, length) for number, length in enumerate(_LENGTHS)]
    tokens = range(sum(_LENGTHS))
    with cache.forward(spans) as forward:
        runner.run(StepInput(forward, tokens, [tokens[-1]], adapters=(1, 0)))
