"""Plans the memory of weights, cells and activations before the cache is allocated; refuses what does not fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import PlanTooLarge
from engine.load.machine.available_memory import available_bytes
from engine.run.graph_sizes import BATCH_SIZES, all_sizes
from engine.types.request import MAX_DRAFT_TOKENS
from engine.types.sizes import format_size
from engine.types.status import MemoryPlan
from kvcache.spec import LayerSpec, group_layers
from kvcache.state_pool import StatePool

# Default tokens of the cache for each slot: fewer slots are planned rather than less context for a chat.
_MIN_TOKENS_PER_SLOT = 8192
# Most slots by default, on a CPU and on a GPU.
_MAX_DEFAULT_SLOTS, _MAX_DEFAULT_GPU_SLOTS = 8, 64
# Default contexts are multiples of this number of tokens.
_CONTEXT_MULTIPLE = 1024
# Share of the available memory for a cache of default size: the machine has other uses, and sizes are estimates. On a
# GPU it is the share of the memory without the activations.
_CACHE_SHARE, _GPU_CACHE_SHARE = 0.6, 0.9
# Recurrent states in the prefix tree may take this part of the free memory.
STATE_SHARE = 1 / 8
# Memory of a recorded step without the activations, which all recorded steps share: estimated from the published
# figures of other servers.
_GRAPH_BYTES = 16 * 2**20
# The entry of a token in the cell table of a group, on a device.
_TABLE_ENTRY_BYTES = 8
# Temporary memory of a logit: on a CPU of each token of a step, on other devices of each sequence, with sorted copies.
_LOGIT_BYTES, _DEVICE_LOGIT_BYTES = 8, 64


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a loaded model that the plan depends on. `max_context` is the context that it was trained for.

    layers            specs of the attention layers, with cells of the dtype `kv_dtype`
    activation_bytes  temporary memory of one token of a step
    sampling_bytes    temporary memory of the logits of one sequence, if `activation_bytes` does not contain them
    state_bytes       of the recurrent states of one sequence; 0: the model has none, or they are not planned
    """

    weights_bytes: int
    layers: tuple[LayerSpec, ...]
    kv_dtype: torch.dtype
    activation_bytes: int
    max_context: int
    sampling_bytes: int = 0
    state_bytes: int = 0


def encoder_budget(available_bytes: int) -> int:
    """Maximum bytes of all encoder entries, of images or sounds: an eighth of the available memory."""
    return available_bytes // 8


def rank_bytes(config: EngineConfig, reserved_bytes: int) -> int:
    """`available_bytes` of one rank, without reserved bytes: ranks share the memory of a CPU, and have a GPU each."""
    available = max(available_bytes(config) - reserved_bytes, 0)
    return available // config.tensor_parallel if config.device == "cpu" else available


def model_sizes(
    config: EngineConfig,
    text: Any,
    layers: tuple[LayerSpec, ...],
    *,
    weights_bytes: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    longest: int,
    state_bytes: int = 0,
) -> ModelSizes:
    """The sizes of a model with the text configuration `text`.

    dtype    of the computation
    longest  context that it was trained for
    """
    element = torch.finfo(dtype).bits // 8
    # Activations of one layer at a time, about 16 widths with the MLP's.
    activations, vocabulary = 16 * int(text.hidden_size) * element, int(text.vocab_size)
    on_cpu = config.device == "cpu"
    return ModelSizes(
        weights_bytes=weights_bytes,
        layers=layers,
        kv_dtype=kv_dtype,
        activation_bytes=activations + _LOGIT_BYTES * vocabulary if on_cpu else activations,
        max_context=longest,
        sampling_bytes=0 if on_cpu else _DEVICE_LOGIT_BYTES * vocabulary,
        state_bytes=0 if on_cpu else state_bytes,
    )


def max_batch_tokens(config: EngineConfig, slots: int) -> int:
    """Most tokens of one step: a prefill chunk, and one token for every slot."""
    return config.chunk + slots


def state_budget(memory: MemoryPlan, share: float = STATE_SHARE) -> int:
    """Bytes of recurrent states in the prefix tree at most."""
    return int(memory.available_bytes * share)


def plan_memory(config: EngineConfig, sizes: ModelSizes, available: int) -> tuple[MemoryPlan, int, int]:
    """The plan, the context of a sequence in tokens, and the number of slots.

    Given settings are kept or refused (PlanTooLarge); the others are chosen to fit `available`, the bytes without the
    weights. All slots share the cells, so one sequence may have the whole trained context if the cells suffice. The
    number of slots is reduced for contexts of 8192 tokens, down to two slots, and to one slot for contexts of 1024.
    """
    for slots in _slot_counts(config):
        share = _default_cache_bytes(config, sizes, available, slots)
        context = config.context or _default_context(config, sizes, share, slots)
        plan = memory_plan(config, sizes, available, context, slots)
        enough = config.context or min(sizes.max_context, _MIN_TOKENS_PER_SLOT if slots > 2 else _CONTEXT_MULTIPLE)
        if config.cells or (plan.cache_bytes <= share and context >= enough):
            break
    needed = plan.weights_bytes + plan.cache_bytes + plan.workspace_bytes
    if needed > plan.available_bytes:
        raise PlanTooLarge(needed, plan.available_bytes, _advice(plan, context, slots))
    return plan, context, slots


def _default_cache_bytes(config: EngineConfig, sizes: ModelSizes, available: int, slots: int) -> int:
    if config.device == "cpu":
        return int(available * _CACHE_SHARE)
    states = int((available + sizes.weights_bytes) * STATE_SHARE) if sizes.state_bytes else 0
    return max(int((available - states - _workspace_bytes(config, sizes, slots)) * _GPU_CACHE_SHARE), 0)


def fitting_context(config: EngineConfig, sizes: ModelSizes, cache_bytes: int, slots: int) -> int:
    """The longest context, at most the trained one, that fits into the cache; at least the smallest default context."""
    lengths: list[int] = [*range(_CONTEXT_MULTIPLE, sizes.max_context, _CONTEXT_MULTIPLE), sizes.max_context]
    fitting = bisect_right(
        lengths, cache_bytes, key=lambda length: memory_plan(config, sizes, 0, length, slots).cache_bytes
    )
    return lengths[max(fitting - 1, 0)]


def max_fitting_context(config: EngineConfig, sizes: ModelSizes, available: int) -> int:
    """The longest context that fits if one sequence at a time may have the whole cache."""
    alone = replace(config, context=None, cells=None)
    return fitting_context(alone, sizes, available - _workspace_bytes(alone, sizes, slots=1), slots=1)


def _default_context(config: EngineConfig, sizes: ModelSizes, share: int, slots: int) -> int:
    """The longest context that fits a share of the memory; a draft model needs as many cells again."""
    if config.cells:
        return min(sizes.max_context, config.cells)
    if config.draft_model is not None:
        every_slot = memory_plan(config, sizes, 0, min(sizes.max_context, _MIN_TOKENS_PER_SLOT), slots).cache_bytes
        share = min(share, max(share // 2, every_slot))
    return fitting_context(config, sizes, share, slots)


def _slot_counts(config: EngineConfig) -> Iterator[int]:
    """Numbers of slots to try, in descending order."""
    slots = config.slots or (_MAX_DEFAULT_SLOTS if config.device == "cpu" else _MAX_DEFAULT_GPU_SLOTS)
    yield slots
    while not config.slots and slots > 1:
        slots //= 2
        yield slots


def memory_plan(config: EngineConfig, sizes: ModelSizes, available: int, context: int, slots: int) -> MemoryPlan:
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
        workspace_bytes=_workspace_bytes(config, sizes, slots),
        available_bytes=available + sizes.weights_bytes,
    )


def _workspace_bytes(config: EngineConfig, sizes: ModelSizes, slots: int) -> int:
    """Temporary memory of a step, and on a device the fixed memory of all steps."""
    step = sizes.activation_bytes * max_batch_tokens(config, slots) + sizes.sampling_bytes * slots
    return step if config.device == "cpu" else step + _device_bytes(config, sizes, slots)


def _device_bytes(config: EngineConfig, sizes: ModelSizes, slots: int) -> int:
    """Memory of recorded steps, of cell tables and of the pool of recurrent states."""
    context = config.context or sizes.max_context
    tables = _TABLE_ENTRY_BYTES * slots * context * len(group_layers(sizes.layers))
    fixed = tables + sizes.state_bytes * StatePool.rows(slots)
    if not config.records_steps:
        return fixed
    steps = [*all_sizes(recorded_tokens(config, slots), context)]
    # Draft loops have separate steps.
    has_loops = config.is_draft and not sizes.state_bytes
    count = len(steps) + (len([*all_sizes(slots, context)]) if has_loops else 0)
    return fixed + count * _GRAPH_BYTES + max(steps)[0] * (sizes.activation_bytes + sizes.sampling_bytes)


def recorded_tokens(config: EngineConfig, slots: int) -> int:
    """The tokens of the largest recorded step: with drafts a sequence has several.

    A draft model computes the last draft token and the token after it where all tokens of a draft were accepted.
    """
    if config.is_draft:
        return min(2 * slots, BATCH_SIZES[-1])
    draft_tokens = MAX_DRAFT_TOKENS if config.draft_tokens == "auto" else config.draft_tokens
    return min(slots * (1 if config.drafter == "none" else 1 + draft_tokens), BATCH_SIZES[-1])


def _default_cells(config: EngineConfig, context: int, slots: int) -> int:
    """Tokens of all slots together: a full context for each slot if the context is given."""
    return context * slots if config.context else max(context, min(context, _MIN_TOKENS_PER_SLOT) * slots)


def _advice(plan: MemoryPlan, context: int, slots: int) -> str:
    """The settings to lower, and the largest users of memory."""
    weights, tokens, windows, work = (
        format_size(part)
        for part in (plan.weights_bytes, plan.cells * plan.cell_bytes, plan.window_bytes, plan.workspace_bytes)
    )
    return (
        f"lower --context ({context}) or --slots ({slots}), or choose a smaller --dtype or --kv-dtype, or --quantize; "
        f"the plan has {weights} of weights, {tokens} for {plan.cells} tokens, "
        f"{windows} for sliding windows and {work} of activations"
    )
