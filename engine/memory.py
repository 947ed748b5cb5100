"""How much memory goes where, decided before the cache is allocated: a plan that cannot fit is refused in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.config import EngineConfig
from engine.errors import PlanTooLarge
from engine.types import MemoryPlan

_LONGEST_DEFAULT_CONTEXT = 8192
_MOST_DEFAULT_SLOTS = 8
# What the cache may take when nobody said how large it is: the machine has other uses, and estimates are estimates.
_DEFAULT_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the plan needs to know of a loaded model. `longest` is the context that it was trained for."""

    weights_bytes: int
    cell_bytes: int
    row_bytes: int
    longest: int


def available_bytes() -> int:
    """Memory that this process may still take, the limit of a container counted."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def plan_memory(config: EngineConfig, sizes: Sizes, available: int) -> tuple[MemoryPlan, int, int]:
    """The plan, the context of a sequence and the number of slots.

    Settings that were given are kept or refused (PlanTooLarge); those left open shrink until the plan fits:
    first slots down to 2, then the context, then to one slot. `available` is counted without the weights.
    """
    context = config.context or min(sizes.longest, _LONGEST_DEFAULT_CONTEXT)
    slots = config.slots or _MOST_DEFAULT_SLOTS
    share = int(available * _DEFAULT_SHARE)
    while not config.cells and context * slots * sizes.cell_bytes > share:
        if not config.slots and slots > 2:
            slots //= 2
        elif not config.context and context > 1024:
            context //= 2
        elif not config.slots and slots > 1:
            slots = 1
        else:
            break
    cells = config.cells or context * slots
    work = sizes.row_bytes * (config.chunk + slots)
    plan = MemoryPlan(
        weights_bytes=sizes.weights_bytes,
        cells=cells,
        cell_bytes=sizes.cell_bytes,
        cache_bytes=cells * sizes.cell_bytes,
        work_bytes=work,
        available_bytes=available + sizes.weights_bytes,
    )
    if plan.cache_bytes + work > available:
        needed = plan.weights_bytes + plan.cache_bytes + work
        advice = f"lower --context ({context}) or --slots ({slots}), or choose a smaller --dtype"
        raise PlanTooLarge(needed, plan.available_bytes, advice)
    return plan, context, slots
