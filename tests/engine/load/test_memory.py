"""The memory plan: sizes of layers of each attention range, defaults, and refusals."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import PlanTooLarge
from engine.load.plan.memory import ModelSizes, max_batch_tokens, max_fitting_context, plan_memory
from kvcache.cache import Cache
from kvcache.spec import AttentionRange, LayerSpec

WINDOW = LayerSpec(2, 64, 64, AttentionRange("window", 512))
FULL = LayerSpec(2, 64, 64)
CELL = 2 * (64 + 64) * 2


def sizes(*layers: LayerSpec, longest: int = 32768) -> ModelSizes:
    """A model with the given layers in bfloat16, and weights of 1000 bytes."""
    return ModelSizes(
        weights_bytes=1000, layers=layers, kv_dtype=torch.bfloat16, activation_bytes=10, max_context=longest
    )


def test_memory_plan_equals_the_pools_of_the_cache() -> None:
    config = EngineConfig(context=4096, slots=4, chunk=100)
    layers = (FULL, WINDOW, WINDOW, LayerSpec(1, 8, 8, AttentionRange("chunk", 1024)))
    plan, context, slots = plan_memory(config, sizes(*layers), 2**40)
    cache = Cache(
        layers, slots=slots, capacity=context, cells=plan.cells, max_batch_tokens=max_batch_tokens(config, slots)
    )

    assert plan.cache_bytes == sum(group.pool.cells * group.spec.cell_bytes(torch.bfloat16) for group in cache.groups)
    assert plan.cells * plan.cell_bytes == 4 * 4096 * CELL
    assert plan.cache_bytes == plan.cells * plan.cell_bytes + plan.window_bytes


def test_window_layers_are_planned_by_their_window() -> None:
    """Twice the window of each slot and the tokens of a step, whatever the context is."""
    plans = [
        plan_memory(EngineConfig(context=n, slots=4, chunk=96), sizes(WINDOW), 2**40)[0] for n in (512, 4096, 8192)
    ]

    assert [4 * 512 * CELL, 2 * (4 * 511 + 100) * CELL, 2 * (4 * 511 + 100) * CELL] == [
        plan.cache_bytes for plan in plans
    ]
    assert [CELL, 0, 0] == [plan.cell_bytes for plan in plans]


def test_window_layers_leave_memory_for_longer_contexts() -> None:
    config = EngineConfig(chunk=256)
    available = 200 * 2**20
    _, full_context, full_slots = plan_memory(config, sizes(*[FULL] * 6, longest=8192), available)
    _, context, slots = plan_memory(config, sizes(*[WINDOW] * 5, FULL, longest=8192), available)

    assert (8192, 4) == (full_context, full_slots)
    assert (8192, 8) == (context, slots)


def test_plan_beyond_the_memory_is_refused_with_its_parts() -> None:
    """The error names the settings to lower and every part of the sum."""
    config = EngineConfig(context=2**20, slots=8)
    with pytest.raises(PlanTooLarge) as refusal:
        plan_memory(config, sizes(FULL, WINDOW, longest=2**20), 2**30)

    assert "lower --context (1048576) or --slots (8)" in str(refusal.value)
    assert "4.0 GiB for 8388608 tokens, 4.2 MiB for sliding windows and 2.6 KiB" in str(refusal.value)
    assert refusal.value.needed_bytes > refusal.value.available_bytes == 2**30 + 1000


# Tokens that fit the default share, and the resulting context, slots and cells.
DEFAULTS = [
    (2**30, 131072, 8, 131072),
    (131072, 131072, 8, 131072),
    (100_000, 99_328, 8, 99_328),
    (65_536, 65_536, 8, 65_536),
    (65_000, 64_512, 4, 64_512),
    (32_767, 31_744, 2, 31_744),
    (16_384, 16_384, 2, 16_384),
    (10_000, 4_096, 2, 8_192),
    (2_048, 1_024, 2, 2_048),
    (2_000, 1_024, 1, 1_024),
]


@pytest.mark.parametrize(("fits", "context", "slots", "cells"), DEFAULTS)
def test_default_context_fits_the_memory_and_the_model(fits: int, context: int, slots: int, cells: int) -> None:
    """Slots share the cells: eight, four or two of 8192 tokens; one sequence may use all of them."""
    plan, *found = plan_memory(EngineConfig(chunk=1), sizes(FULL, longest=131072), available=int(fits * CELL / 0.6) + 2)

    assert [context, slots] == found
    assert cells == plan.cells


@pytest.mark.parametrize("longest", [100, 1024, 2048, 5000, 8192, 20000])
def test_every_slot_of_a_short_model_has_its_whole_context(longest: int) -> None:
    plan, context, slots = plan_memory(EngineConfig(), sizes(FULL, longest=longest), 2**40)

    assert (longest, 8, max(longest, 8 * min(longest, 8192))) == (context, slots, plan.cells)


def test_given_context_and_slots_are_kept() -> None:
    """A given context holds for every slot; given slots shorten the default context only."""
    plan, *others = plan_memory(EngineConfig(context=20_000), sizes(FULL), 2**40)
    _, context, slots = plan_memory(EngineConfig(slots=8, chunk=1), sizes(FULL), int(8 * 3000 * CELL / 0.6))

    assert (160_000, [20_000, 8]) == (plan.cells, others)
    assert (2048, 8) == (context, slots)


def test_default_context_leaves_memory_for_a_draft_model() -> None:
    long, plans = sizes(FULL, longest=131072), []
    for fits in (100_000, 200_000, 300_000):
        available = int(fits * CELL / 0.6)
        plans += [plan_memory(EngineConfig(draft_model=name), long, available)[1:] for name in (None, "d")]

    assert [(99_328, 8), (65_536, 8), (131_072, 8), (99_328, 8), (131_072, 8), (131_072, 8)] == plans


def test_max_fitting_context_uses_all_memory_for_one_slot() -> None:
    long = sizes(FULL, longest=131072)

    assert 2**20 // CELL // 1024 * 1024 == max_fitting_context(
        EngineConfig(context=8, slots=4, chunk=1), long, 2**20 + 20
    )
    assert 131072 == max_fitting_context(EngineConfig(), long, 2**40)
