"""The machine and the versions that figures were measured with."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine.load.machine.resources import processor_count


def environment() -> dict[str, Any]:
    """Processor, memory, load and versions, as JSON values."""
    return {
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable_threads": processor_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": psutil.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "httpx": httpx.__version__,
        "cellar": importlib.metadata.version("kvcellar"),
    }


def cpu_model() -> str:
    """The name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
