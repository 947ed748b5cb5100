"""How much memory goes where, decided before the cache is allocated: a plan that cannot fit is refused in words."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
import torch

from engine.config import EngineConfig
from engine.errors import PlanTooLarge
from engine.load.resources import free_memory_bytes
from engine.types.status import MemoryPlan
from kvcache.spec import LayerSpec, group_layers

# Tokens for each slot before one sequence may have more: a slot is no use to a chat with less.
_MIN_TOKENS_PER_SLOT = 8192
_MAX_DEFAULT_SLOTS = 8
# Contexts that are chosen are multiples of this.
_CONTEXT_MULTIPLE = 1024
# What the cache may take when nobody said how large it is: the machine has other uses, and estimates are estimates.
_CACHE_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the plan needs to know of a loaded model. `longest` is the context that it was trained for.

    layers     the attention layers, whose cells are stored as `stored`
    activation_bytes  what one row of a step needs for a while
    """

    weights_bytes: int
    layers: tuple[LayerSpec, ...]
    kv_dtype: torch.dtype
    activation_bytes: int
    max_context: int


def available_bytes() -> int:
    """Memory that this process may still take, the limit of a container counted."""
    available, left = int(psutil.virtual_memory().available), free_memory_bytes()
    return available if left is None else min(available, left)


def max_batch_tokens(config: EngineConfig, slots: int) -> int:
    """Rows of one step at most: the chunk's rows of prompt, and one for every slot."""
    return config.chunk + slots


def plan_memory(config: EngineConfig, sizes: ModelSizes, available: int) -> tuple[MemoryPlan, int, int]:
    """The plan, the context of a sequence and the number of slots.

    Settings that were given are kept or refused (PlanTooLarge); those left open become what fits. All slots share the
    cells, so one sequence may be as long as the model knows, if so many cells fit. Slots are given up for contexts of
    8192 tokens, down to two, and the last but one for 1024. `available` is counted without the weights.
    """
    share = int(available * _CACHE_SHARE)
    for slots in _slot_counts(config):
        context = config.context or _default_context(config, sizes, share, slots)
        plan = _plan(config, sizes, available, context, slots)
        enough = config.context or min(sizes.max_context, _MIN_TOKENS_PER_SLOT if slots > 2 else _CONTEXT_MULTIPLE)
        if config.cells or (plan.cache_bytes <= share and context >= enough):
            break
    needed = plan.weights_bytes + plan.cache_bytes + plan.workspace_bytes
    if needed > plan.available_bytes:
        raise PlanTooLarge(needed, plan.available_bytes, _advice(plan, context, slots))
    return plan, context, slots


def fitting_context(config: EngineConfig, sizes: ModelSizes, cache_bytes: int, slots: int) -> int:
    """The longest context whose cells fit, at most that of the model; the shortest that is ever chosen if none does."""
    lengths: list[int] = [*range(_CONTEXT_MULTIPLE, sizes.max_context, _CONTEXT_MULTIPLE), sizes.max_context]
    fitting = bisect_right(lengths, cache_bytes, key=lambda one: _plan(config, sizes, 0, one, slots).cache_bytes)
    return lengths[max(fitting - 1, 0)]


def max_fitting_context(config: EngineConfig, sizes: ModelSizes, available: int) -> int:
    """The longest context that the model knows and the memory holds, if one sequence at a time may have all of it."""
    alone = replace(config, context=None, cells=None)
    return fitting_context(alone, sizes, available - sizes.activation_bytes * max_batch_tokens(alone, 1), slots=1)


def _default_context(config: EngineConfig, sizes: ModelSizes, share: int, slots: int) -> int:
    """The longest context whose cells fit a share of the memory; a draft model needs as many cells of its own."""
    if config.cells:
        return min(sizes.max_context, config.cells)
    if config.draft_model is not None:
        every_slot = _plan(config, sizes, 0, min(sizes.max_context, _MIN_TOKENS_PER_SLOT), slots).cache_bytes
        share = min(share, max(share // 2, every_slot))
    return fitting_context(config, sizes, share, slots)


def _slot_counts(config: EngineConfig) -> Iterator[int]:
    """Numbers of slots to try, the most first."""
    slots = config.slots or _MAX_DEFAULT_SLOTS
    yield slots
    while not config.slots and slots > 1:
        slots //= 2
        yield slots


def _plan(config: EngineConfig, sizes: ModelSizes, available: int, context: int, slots: int) -> MemoryPlan:
    cells, rows = config.cells or _default_cells(config, context, slots), max_batch_tokens(config, slots)
    groups = group_layers([layer.limited_to(min(context, cells)) for layer in sizes.layers])
    pools = [
        group.pool_cells(cells, slots=slots, max_batch_tokens=rows) * group.cell_bytes(sizes.kv_dtype)
        for group in groups
        if group.attention_range.kind != "full"
    ]
    cell = sum(group.cell_bytes(sizes.kv_dtype) for group in groups if group.attention_range.kind == "full")
    return MemoryPlan(
        weights_bytes=sizes.weights_bytes,
        cells=cells,
        cell_bytes=cell,
        window_bytes=sum(pools),
        cache_bytes=cells * cell + sum(pools),
        workspace_bytes=sizes.activation_bytes * rows,
        available_bytes=available + sizes.weights_bytes,
    )


def _default_cells(config: EngineConfig, context: int, slots: int) -> int:
    """Tokens that the slots hold together: a context each where one was asked for."""
    return context * slots if config.context else max(context, min(context, _MIN_TOKENS_PER_SLOT) * slots)


def _advice(plan: MemoryPlan, context: int, slots: int) -> str:
    """What to lower, and what takes the memory."""
    weights, tokens, windows, work = (
        f"{part / 2**30:.1f} GiB"
        for part in (plan.weights_bytes, plan.cells * plan.cell_bytes, plan.window_bytes, plan.workspace_bytes)
    )
    return (
        f"lower --context ({context}) or --slots ({slots}), or choose a smaller --dtype or --kv-dtype, or --quantize; "
        f"it is {weights} of weights, {tokens} for {plan.cells} tokens, {windows} for the windows of {slots} slots "
        f"and {work} of work"
    )
