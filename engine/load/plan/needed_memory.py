"""The memory that a model takes in a process next to those of other models, before it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open

from engine.config import SLOTS_OF_SEVERAL, EngineConfig
from engine.errors import ModelUnsupported
from engine.load.machine.available_memory import available_bytes
from engine.load.machine.device import resolve_device
from engine.load.plan.model_plan import ModelPlan, plan_model
from engine.load.read.checkpoint import READ_ERRORS, bundled_draft, error_line, resolve_headers, weight_files
from engine.load.read.configuration import read_max_context
from engine.types.status import MemoryNeed

# Of each model by default: memory that is left is for other models.
_DEFAULT_CONTEXT = 8192
# For threads, grammars and buffers of a process, beyond what its plan measures; on a GPU also for its context.
_PROCESS_BYTES, _DEVICE_BYTES = 60 * 2**20, 512 * 2**20
# Share of the free memory for all models without --memory: the front end and other programs use the rest.
_BUDGET_SHARE = 0.9
# Of adapters that are loaded at run time without --lora-memory.
_ADAPTERS_BYTES = 512 * 2**20
# Numbers of a token's activations, as multiples of the embedding model's width.
_ACTIVATION_WIDTHS = 16
_FLOAT32_BYTES = 4


def memory_budget(config: EngineConfig) -> int:
    """Bytes for all models: the memory of the settings, or most of the free memory of their device."""
    available = available_bytes(resolve_device(replace(config, shares_memory=True)))
    return available if config.memory is not None else int(available * _BUDGET_SHARE)


def needed_memory(config: EngineConfig, budget_bytes: int) -> MemoryNeed:
    """The memory of a model with its drafter, adapters and embedding model, and the sizes of its cache.

    The context and the slots of the settings, or the default ones, or fewer to fit the budget. Raises ModelError.
    """
    config = resolve_device(replace(config, shares_memory=True, memory=None))
    folder = resolve_headers(config.model)
    planned = _planned(config, folder, budget_bytes)
    if planned.memory is None or planned.total_bytes is None:
        raise ModelUnsupported(planned.model, str(planned.reason))
    spare = _PROCESS_BYTES if config.device == "cpu" else _DEVICE_BYTES
    others = _draft_bytes(config, folder, planned) + _adapter_bytes(config) + _embedding_bytes(config)
    return MemoryNeed(
        bytes=planned.total_bytes + others + config.host_cache_bytes + spare,
        context=planned.context,
        slots=planned.slots,
        cells=planned.memory.cells,
    )


def _planned(config: EngineConfig, folder: Path, budget_bytes: int) -> ModelPlan:
    trained = read_max_context(str(config.model), folder)
    default = replace(
        config, context=config.context or min(trained, _DEFAULT_CONTEXT), slots=config.slots or SLOTS_OF_SEVERAL
    )
    planned = plan_model(default, folder, budget_bytes=budget_bytes)
    if planned.memory is not None:
        return planned
    return plan_model(config, folder, budget_bytes=budget_bytes)


def _draft_bytes(config: EngineConfig, folder: Path, planned: ModelPlan) -> int:
    """Of the draft model of the settings, or of the bundled model's."""
    name = config.draft_model or bundled_draft(config, folder)
    if name is None or config.drafter not in ("auto", "model") or planned.memory is None:
        return 0
    draft_folder = resolve_headers(name)
    context = min(planned.context, read_max_context(name, draft_folder))
    cells = min(context * planned.slots, planned.memory.cells)
    settings = config.for_draft(name, context=context, slots=planned.slots, cells=cells)
    draft = plan_model(settings, draft_folder, process_bytes=0)
    return draft.total_bytes or 0


def _adapter_bytes(config: EngineConfig) -> int:
    files = [file for path in config.adapters.values() for file in _files(Path(path).expanduser())]
    # Weights of 16 bits may become float32.
    size = 2 * sum(file.stat().st_size for file in files)
    if config.lora_dir is None:
        return size
    return size + (_ADAPTERS_BYTES if config.lora_memory is None else config.lora_memory)


def _files(path: Path) -> Iterator[Path]:
    yield from path.glob("*.safetensors") if path.is_dir() else [path]


def _embedding_bytes(config: EngineConfig) -> int:
    """Of the weights in float32 and of the activations of the longest text."""
    name = config.embedding_model
    if name is None:
        return 0
    folder = resolve_headers(name)
    try:
        values = json.loads((folder / "config.json").read_bytes())
        length, width = int(values.get("max_position_embeddings", _DEFAULT_CONTEXT)), int(values["hidden_size"])
        weights = sum(_numbers(file) for file in weight_files(folder)) * _FLOAT32_BYTES
    except READ_ERRORS as error:
        raise ModelUnsupported(name, error_line(error)) from error
    return weights + max(length, config.chunk) * _ACTIVATION_WIDTHS * width * _FLOAT32_BYTES


def _numbers(file: Path) -> int:
    """How many numbers a file of weights has."""
    count = 0
    with safe_open(file, framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            size = 1
            for length in tensors.get_slice(name).get_shape():
                size *= length
            count += size
    return count
