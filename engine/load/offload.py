"""Where what is remembered goes for which there are no cells, and what survives the process: as the settings say it."""

from __future__ import annotations

import logging
from pathlib import Path

from engine.config import EngineConfig
from kvcache.offload import OffloadConfig

log = logging.getLogger("cellar.engine")


def offload_config(config: EngineConfig, identity: str) -> OffloadConfig:
    """The shelf of one model, of which `identity` is a digest. Trouble with a file is logged, and fails no request."""
    return OffloadConfig(
        memory_bytes=config.host_cache_bytes,
        folder=None if config.disk_cache is None else Path(config.disk_cache).expanduser(),
        disk_bytes=config.disk_cache_bytes,
        identity=identity,
        report=log.warning,
    )
