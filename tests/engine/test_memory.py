"""The memory plan: what layers of each reach take, and what is refused in which words."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import PlanTooLarge
from engine.memory import Sizes, most_rows, plan_memory
from kvcache.cache import Cache
from kvcache.spec import LayerSpec, Reach

WINDOW = LayerSpec(2, 64, 64, Reach("window", 512))
FULL = LayerSpec(2, 64, 64)
CELL = 2 * (64 + 64) * 2


def sizes(*layers: LayerSpec, longest: int = 32768) -> Sizes:
    """A model of these layers in bfloat16, with weights of 1000 bytes."""
    return Sizes(weights_bytes=1000, layers=layers, stored=torch.bfloat16, row_bytes=10, longest=longest)


def test_the_plan_is_what_the_cache_takes() -> None:
    """Bytes are those of the pools, group by group, for the same slots and rows."""
    config = EngineConfig(context=4096, slots=4, chunk=100)
    layers = (FULL, WINDOW, WINDOW, LayerSpec(1, 8, 8, Reach("chunk", 1024)))
    plan, context, slots = plan_memory(config, sizes(*layers), 2**40)
    cache = Cache(layers, slots=slots, capacity=context, cells=plan.cells, rows=most_rows(config, slots))

    assert plan.cache_bytes == sum(group.pool.cells * group.spec.cell_bytes(torch.bfloat16) for group in cache.groups)
    assert plan.cells * plan.cell_bytes == 4 * 4096 * CELL
    assert plan.cache_bytes == plan.cells * plan.cell_bytes + plan.window_bytes


def test_layers_that_see_a_window_take_memory_for_the_window() -> None:
    """Twice what the slots see and a step brings, however long the context is; all, where the window is as long."""
    plans = [
        plan_memory(EngineConfig(context=n, slots=4, chunk=96), sizes(WINDOW), 2**40)[0] for n in (512, 4096, 8192)
    ]

    assert [4 * 512 * CELL, 2 * (4 * 511 + 100) * CELL, 2 * (4 * 511 + 100) * CELL] == [
        plan.cache_bytes for plan in plans
    ]
    assert [CELL, 0, 0] == [plan.cell_bytes for plan in plans]


def test_windows_leave_memory_for_longer_contexts() -> None:
    """Five layers of six with a window: the same memory holds a context, or slots, that full layers would not."""
    config = EngineConfig(chunk=256)
    available = 200 * 2**20
    _, full_context, full_slots = plan_memory(config, sizes(*[FULL] * 6), available)
    _, context, slots = plan_memory(config, sizes(*[WINDOW] * 5, FULL), available)

    assert (8192, 4) == (full_context, full_slots)
    assert (8192, 8) == (context, slots)


def test_what_does_not_fit_is_refused_with_what_takes_the_memory() -> None:
    """The error names the settings to lower and every part of the sum."""
    config = EngineConfig(context=2**20, slots=8)
    with pytest.raises(PlanTooLarge) as refusal:
        plan_memory(config, sizes(FULL, WINDOW, longest=2**20), 2**30)

    assert "lower --context (1048576) or --slots (8)" in str(refusal.value)
    assert "4.0 GiB for 8388608 tokens, 0.0 GiB for the windows of 8 slots" in str(refusal.value)
    assert refusal.value.needed_bytes > refusal.value.available_bytes == 2**30 + 1000
