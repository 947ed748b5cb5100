"""Records the decoding steps of a model at the start, so that no request waits for a recording."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig
from engine.load.load import LoadedModel
from engine.load.machine.available_memory import available_bytes
from engine.load.plan.memory import recorded_tokens
from engine.run.graphs import GraphRunner
from engine.types.progress import report_progress
from engine.types.sizes import format_size
from kvcache.cache import Cache

log = logging.getLogger("cellar.engine")


def record_steps(
    config: EngineConfig,
    loaded: LoadedModel,
    cache: Cache,
    on_phase: Callable[[str], None],
    *,
    draft_vocabulary: int = 0,
) -> None:
    """Record the steps of a runner on a GPU over its empty cache; others record none. The log has time and memory.

    draft_vocabulary  tokens of which a draft model samples; 0: it is no draft model
    """
    if not isinstance(loaded.runner, GraphRunner):
        return
    on_phase("graphs")
    began, free, count = time.monotonic(), available_bytes(config), 0
    tokens = recorded_tokens(replace(config, is_draft=draft_vocabulary > 0), cache.slots)
    for count, total in loaded.runner.record_all(cache, tokens, draft_vocabulary):
        report_progress("graphs", count, total)
    used = max(free - available_bytes(config), 0)
    log.info("graphs: %d recorded in %.1f s, %s", count, time.monotonic() - began, format_size(used))
