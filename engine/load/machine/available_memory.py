"""Memory that this process may still allocate, on the CPU or on a GPU."""

from __future__ import annotations

import psutil

from engine.config import EngineConfig, parse_memory
from engine.load.machine.device import device_memory
from engine.load.machine.resources import free_memory_bytes, memory_limit_bytes


def available_bytes(config: EngineConfig | None = None) -> int:
    """Memory that this process may still allocate, within the limits of its container and of `config`.

    It is that of the device of `config`, which resolve_device has resolved; None: of the CPU.
    """
    if config is not None and config.device != "cpu":
        return _available_device_bytes(config)
    available, left = int(psutil.virtual_memory().available), free_memory_bytes()
    limits: list[int] = [available, *(() if left is None else (left,))]
    if config is not None and config.memory is not None:
        limits.append(max(0, _limit_bytes(config.memory) - process_bytes(config) - config.host_cache_bytes))
    return min(limits)


def process_bytes(config: EngineConfig) -> int:
    """Memory of this process: resident, or without the pages that it shares."""
    process = psutil.Process()
    return int(process.memory_full_info().uss if config.shares_memory else process.memory_info().rss)


def _available_device_bytes(config: EngineConfig) -> int:
    memory = device_memory(config.device)
    if config.memory is None:
        return memory.free_bytes
    limit = parse_memory(config.memory)(memory.total_bytes)
    return min(memory.free_bytes, max(0, limit - memory.allocated_bytes))


def _limit_bytes(memory: str) -> int:
    """The memory limit of the settings; a share is one of the container's limit or of the machine."""
    total, limit = int(psutil.virtual_memory().total), memory_limit_bytes()
    # A group without a limit may report one beyond the machine.
    return parse_memory(memory)(total if limit is None else min(total, limit))
