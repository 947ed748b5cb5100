"""How much memory goes where, decided before the cache is allocated: a plan that cannot fit is refused in words."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from engine.config import EngineConfig
from engine.errors import PlanTooLarge
from engine.resources import memory_left
from engine.status import MemoryPlan
from kvcache.spec import LayerSpec, group_layers

_LONGEST_DEFAULT_CONTEXT = 8192
_MOST_DEFAULT_SLOTS = 8
# What the cache may take when nobody said how large it is: the machine has other uses, and estimates are estimates.
_DEFAULT_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the plan needs to know of a loaded model. `longest` is the context that it was trained for.

    layers     the attention layers, whose cells are stored as `stored`
    row_bytes  what one row of a step needs for a while
    """

    weights_bytes: int
    layers: tuple[LayerSpec, ...]
    stored: torch.dtype
    row_bytes: int
    longest: int


def available_bytes() -> int:
    """Memory that this process may still take, the limit of a container counted."""
    available, left = int(psutil.virtual_memory().available), memory_left()
    return available if left is None else min(available, left)


def most_rows(config: EngineConfig, slots: int) -> int:
    """Rows of one step at most: the chunk's rows of prompt, and one for every slot."""
    return config.chunk + slots


def plan_memory(config: EngineConfig, sizes: Sizes, available: int) -> tuple[MemoryPlan, int, int]:
    """The plan, the context of a sequence and the number of slots.

    Settings that were given are kept or refused (PlanTooLarge); those left open shrink until the plan fits:
    first slots down to 2, then the context, then to one slot. `available` is counted without the weights.
    """
    context = config.context or min(sizes.longest, _LONGEST_DEFAULT_CONTEXT)
    slots = config.slots or _MOST_DEFAULT_SLOTS
    share = int(available * _DEFAULT_SHARE)
    plan = _plan(config, sizes, available, context, slots)
    while not config.cells and plan.cache_bytes > share:
        if not config.slots and slots > 2:
            slots //= 2
        elif not config.context and context > 1024:
            context //= 2
        elif not config.slots and slots > 1:
            slots = 1
        else:
            break
        plan = _plan(config, sizes, available, context, slots)
    needed = plan.weights_bytes + plan.cache_bytes + plan.work_bytes
    if needed > plan.available_bytes:
        raise PlanTooLarge(needed, plan.available_bytes, _advice(plan, context, slots))
    return plan, context, slots


def _plan(config: EngineConfig, sizes: Sizes, available: int, context: int, slots: int) -> MemoryPlan:
    cells, rows = config.cells or context * slots, most_rows(config, slots)
    groups = group_layers([layer.within(min(context, cells)) for layer in sizes.layers])
    pools = [
        group.pool_cells(cells, slots=slots, rows=rows) * group.cell_bytes(sizes.stored)
        for group in groups
        if group.reach.kind != "full"
    ]
    cell = sum(group.cell_bytes(sizes.stored) for group in groups if group.reach.kind == "full")
    return MemoryPlan(
        weights_bytes=sizes.weights_bytes,
        cells=cells,
        cell_bytes=cell,
        window_bytes=sum(pools),
        cache_bytes=cells * cell + sum(pools),
        work_bytes=sizes.row_bytes * rows,
        available_bytes=available + sizes.weights_bytes,
    )


def _advice(plan: MemoryPlan, context: int, slots: int) -> str:
    """What to lower, and what takes the memory."""
    weights, tokens, windows, work = (
        f"{part / 2**30:.1f} GiB"
        for part in (plan.weights_bytes, plan.cells * plan.cell_bytes, plan.window_bytes, plan.work_bytes)
    )
    return (
        f"lower --context ({context}) or --slots ({slots}), or choose a smaller --dtype or --kv-dtype, or --quantize; "
        f"it is {weights} of weights, {tokens} for {plan.cells} tokens, {windows} for the windows of {slots} slots "
        f"and {work} of work"
    )
