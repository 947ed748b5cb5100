"""The KV cache of a loaded model, with its disk cache, from the settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig
from engine.load.load import LoadedModel
from engine.load.plan.memory import STATE_SHARE, max_batch_tokens, state_budget
from engine.model.layers import CachedLayer
from kvcache.cache import Cache
from kvcache.offload import OffloadConfig

log = logging.getLogger("cellar.engine")

# Recurrent states of a draft model in the prefix tree take half as much as those of the model.
_DRAFT_STATE_SHARE = STATE_SHARE / 2


def model_cache(config: EngineConfig, model: LoadedModel) -> Cache:
    """The cache of the served model."""
    return _make_cache(config, model, model.layers, model.identity, STATE_SHARE)


def draft_cache(config: EngineConfig, model: LoadedModel) -> Cache:
    """The cache of a draft model."""
    return _make_cache(config, model, model.layers, model.identity, _DRAFT_STATE_SHARE)


def mtp_cache(config: EngineConfig, model: LoadedModel, layers: Sequence[CachedLayer]) -> Cache:
    """The cache of the MTP layers of a model: as many slots and cells as the model's own."""
    return _make_cache(config, model, layers, f"{model.identity}-mtp", 0.0)


def offload_config(config: EngineConfig, identity: str) -> OffloadConfig:
    """Host memory and disk for one model's evicted prefixes; `identity` is the model's digest.

    Failed reads and writes are logged and fail no request.
    """
    return OffloadConfig(
        memory_bytes=config.host_cache_bytes,
        folder=None if (folder := config.disk_cache_folder) is None else Path(folder).expanduser(),
        disk_bytes=config.disk_cache_bytes,
        identity=identity,
        report=log.warning,
    )


def _make_cache(
    config: EngineConfig, model: LoadedModel, layers: Sequence[CachedLayer], identity: str, state_share: float
) -> Cache:
    """A cache for `layers` with the slots and cells of a model; `state_share` 0: the layers are not recurrent."""
    state_bytes = state_budget(model.memory, state_share) if model.recurrent and state_share else None
    return Cache(
        [layer.spec for layer in layers],
        slots=model.info.slots,
        capacity=model.capacity,
        cells=model.memory.cells,
        max_batch_tokens=max_batch_tokens(config, model.info.slots),
        state_bytes=state_bytes,
        state_spacing=config.chunk,
        offload=offload_config(config, identity),
        dtype=model.kv_dtype,
        device=config.device,
        on_move=model.on_move,
    )
