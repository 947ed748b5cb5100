"""The memory of a model before its weights are read: from its configuration, headers and tokenizer alone.

A model without weights (read/skeleton.py) has the layers that store cells or states. The sizes then go through the
plan of the load (memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config import BUNDLED_NAME, EngineConfig
from engine.errors import ModelUnsupported, PlanTooLarge
from engine.gguf.config import file_type
from engine.gguf.matrices import FileMatrices
from engine.kernels.blocks import TorchBlocks
from engine.kernels.formats import WeightFormat
from engine.kernels.packing import packed_bytes
from engine.load.machine.available_memory import available_bytes
from engine.load.machine.available_memory import process_bytes as resident_bytes
from engine.load.plan.memory import ModelSizes, encoder_budget, memory_plan, model_sizes, plan_memory, state_budget
from engine.load.read.checkpoint import Checkpoint, is_small, weight_files
from engine.load.read.configuration import choose_dtype, max_context, read_headers, read_max_context, text_alone
from engine.load.read.gguf_model import gguf_sources
from engine.load.read.modalities import text_only_reason
from engine.load.read.mxfp4 import has_mxfp4, mxfp4_matrices
from engine.load.read.skeleton import Skeleton, make_skeleton
from engine.load.read.tokenizer_files import read_model_tokenizer, read_template
from engine.load.read.weights import keeps_formats
from engine.quantize.formats import MAX_AVERAGE_BITS
from engine.quantize.plan import QuantizationPlan
from engine.quantize.quantize import bits_for, bytes_of
from engine.quantize.quantizer import PlannedEmbedding, matrix_shapes, planned_matrices
from engine.types.status import MemoryPlan
from kvcache.spec import group_layers

# Contexts and slots of the table.
_TABLE_CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
_TABLE_SLOTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The cells of attention layers with one geometry.

    window       positions that a query attends to; None: all
    token_bytes  of one token in all layers of the group
    """

    layers: int
    heads: int
    key_width: int
    value_width: int
    window: int | None
    token_bytes: int


@dataclass(frozen=True, slots=True)
class TableEntry:
    """The memory of a number of slots with a context each, all of them full."""

    slots: int
    context: int
    cache_bytes: int
    total_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The planned memory of a server.

    weights          format of the weights
    state_bytes      of the recurrent layers' state after one token
    states_bytes     of all full slots, with the checkpoints in the prefix tree
    process_bytes    of Python, its libraries and the tokenizer: measured in this process; 0 on a GPU
    memory           of the settings; None: they do not fit, for the `reason`
    context, slots   of the settings, or chosen as by `cellar serve`
    encoder_bytes    most bytes of encoded images, which the table leaves free
    draft            of the draft model in the memory that is left; None: the settings name none
    """

    model: str
    folder: str
    architecture: str
    parameters: int
    weights: str
    kv_dtype: str
    weights_bytes: int
    groups: tuple[GroupSize, ...]
    state_bytes: int
    states_bytes: int
    process_bytes: int
    available_bytes: int
    max_context: int
    context: int
    slots: int
    memory: MemoryPlan | None
    reason: str | None
    table: tuple[TableEntry, ...]
    encoder_bytes: int = 0
    draft: ModelPlan | None = None

    @property
    def total_bytes(self) -> int | None:
        """Resident memory of the server with full slots, during a step; None: the settings do not fit."""
        if self.memory is None:
            return None
        planned = self.memory
        model_bytes = planned.weights_bytes + planned.cache_bytes + planned.workspace_bytes
        return self.process_bytes + model_bytes + self.states_bytes + self.encoder_bytes


def plan_with_draft(config: EngineConfig, folder: Path, draft_folder: Path | None) -> ModelPlan:
    """As `plan_model`, with the plan of the draft model in `draft_folder`; None: there is none."""
    planned = plan_model(config, folder)
    if draft_folder is None or config.draft_model is None or planned.memory is None:
        return planned
    name, memory = config.draft_model, planned.memory
    context = min(planned.context, read_max_context(name, draft_folder))
    cells = min(context * planned.slots, memory.cells)
    settings = config.for_draft(name, context=context, slots=planned.slots, cells=cells)
    reserved = memory.weights_bytes + memory.cache_bytes + memory.workspace_bytes
    return replace(planned, draft=plan_model(settings, draft_folder, process_bytes=0, reserved_bytes=reserved))


def plan_model(
    config: EngineConfig,
    folder: Path,
    *,
    process_bytes: int | None = None,
    reserved_bytes: int = 0,
    budget_bytes: int | None = None,
) -> ModelPlan:
    """The plan of a model in a folder or GGUF file. Raises ModelUnsupported.

    reserved_bytes  of the free memory, for other uses
    budget_bytes    in place of the free memory
    """
    name = config.model or BUNDLED_NAME
    if config.tensor_parallel > 1:
        raise ModelUnsupported(name, "a plan is of one process; leave out --tensor-parallel")
    free_bytes = available_bytes(config) if budget_bytes is None else budget_bytes
    available = max(free_bytes - reserved_bytes, 0)
    checkpoint, model_config = read_headers(name, folder, config)
    if text_only_reason(checkpoint, model_config, config) is not None:
        checkpoint, model_config = text_alone(checkpoint, model_config)
    text = model_config.get_text_config()
    dtype = choose_dtype(config, model_config, small=bool(weight_files(folder)) and is_small(folder))
    skeleton, contents = _skeleton(config, name, checkpoint, model_config, dtype)
    encoder_bytes = encoder_budget(available) if contents else 0
    parameters = sum(parameter.numel() for parameter in skeleton.model.parameters())
    label, weights_bytes = _weights(config, checkpoint, model_config, skeleton, dtype, available)
    kv_dtype: torch.dtype = dtype if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)
    sizes = model_sizes(
        config,
        text,
        tuple(layer.spec for layer in skeleton.layers),
        weights_bytes=weights_bytes,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        longest=max_context(text),
        state_bytes=skeleton.state_bytes,
    )
    # It takes memory too, which stays with the process.
    template = read_template(name, config.chat_template)
    read_model_tokenizer(name, checkpoint, template, vocabulary=text.vocab_size)
    if process_bytes is None:
        process_bytes = _process_bytes(config)
    memory, reason, context, slots = _settings(config, sizes, available - weights_bytes - encoder_bytes)
    return ModelPlan(
        model=name,
        folder=str(folder),
        architecture=type(skeleton.model).__name__,
        parameters=parameters,
        weights=label,
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        weights_bytes=weights_bytes,
        groups=_groups(sizes),
        state_bytes=skeleton.state_bytes,
        states_bytes=0 if memory is None else _states_bytes(config, skeleton.state_bytes, memory, context, slots),
        process_bytes=process_bytes,
        available_bytes=available,
        max_context=max_context(text),
        context=context,
        slots=slots,
        memory=memory,
        reason=reason,
        table=_table(config, sizes, available - encoder_bytes, process_bytes, skeleton.state_bytes),
        encoder_bytes=encoder_bytes,
    )


def _skeleton(
    config: EngineConfig, name: str, checkpoint: Checkpoint, model_config: Any, dtype: torch.dtype
) -> tuple[Skeleton, bool]:
    """The model, and whether it has its vision tower, as it will be loaded."""
    if text_only_reason(checkpoint, model_config, config) is None:
        with suppress(ModelUnsupported):
            return make_skeleton(name, deepcopy(model_config), dtype, contents=True), True
    return make_skeleton(name, model_config, dtype), False


def _process_bytes(config: EngineConfig) -> int:
    return resident_bytes(config) if config.device == "cpu" else 0


def _weights(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model_config: Any,
    skeleton: Skeleton,
    dtype: torch.dtype,
    available: int,
) -> tuple[str, int]:
    """The format and the bytes of all weights, as they will be loaded."""
    model, plan, label = skeleton.model, skeleton.quantization, str(dtype).removeprefix("torch.")
    matrices = _file_matrices(checkpoint, model_config, model) if keeps_formats(config) else None
    if matrices is not None and matrices.quantised:
        limited = matrices.limit(plan)
        embeddings = matrices.embeddings(model, limited)
        packed = _packed_bytes(limited, matrices.formats, embeddings)
        for embedding in embeddings:
            embedding.module.register_parameter("weight", None)
        return matrices.label, _quantised_bytes(model, limited, packed)
    bits = bits_for(config.quantize, plan, available, device=config.device, stored_bytes=bytes_of(model))
    if bits is None:
        return label, bytes_of(model)
    if bits == 8:
        formats: dict[str, WeightFormat] = {matrix.name: "int8" for matrix in planned_matrices(plan)}
        return "int8", _quantised_bytes(model, plan, _packed_bytes(plan, formats))
    # The formats of the matrices are chosen by their values.
    return "int4", _quantised_bytes(model, plan, int(plan.weights * MAX_AVERAGE_BITS / 8))


def _file_matrices(checkpoint: Checkpoint, config: Any, model: nn.Module) -> FileMatrices | None:
    """The matrices of a file with quantised formats; None if weights are floats, or dequantised."""
    if (content := checkpoint.gguf) is not None:
        sources = gguf_sources(content, model, config, checkpoint.tower)
        return FileMatrices(sources, model, file_type(content.metadata) or "GGUF", TorchBlocks())
    return mxfp4_matrices(checkpoint.path, model, TorchBlocks()) if has_mxfp4(config) else None


def _packed_bytes(
    plan: QuantizationPlan, formats: dict[str, WeightFormat], embeddings: Sequence[PlannedEmbedding] = ()
) -> int:
    return packed_bytes((*shape, formats[name]) for name, shape in matrix_shapes(plan, embeddings).items())


def _quantised_bytes(model: nn.Module, plan: QuantizationPlan, packed: int) -> int:
    """The bytes of quantised weights and of the others; frees the weights of the plan."""
    for layer in plan.layers:
        layer.module.register_parameter("weight", None)
    for experts in plan.experts.values():
        for stack in (experts.up, experts.down):
            stack.module.register_parameter(stack.parameter, None)
    return bytes_of(model) + packed


def _groups(sizes: ModelSizes) -> tuple[GroupSize, ...]:
    """Layers with an attention range beyond the trained context count as full."""
    return tuple(
        GroupSize(
            layers=len(group.layers),
            heads=group.heads,
            key_width=group.key_width,
            value_width=group.value_width,
            window=None if group.attention_range.kind == "full" else group.attention_range.size,
            token_bytes=group.cell_bytes(sizes.kv_dtype),
        )
        for group in group_layers([layer.limited_to(sizes.max_context) for layer in sizes.layers])
    )


def _states_bytes(config: EngineConfig, state_bytes: int, plan: MemoryPlan, context: int, slots: int) -> int:
    """The last state of each slot, and its checkpoints in the prefix tree up to their budget: one for each chunk of a
    prompt, one at its end and one at the end of the answer.
    """
    checkpoints = slots * (context // config.chunk + 2)
    # On a device the workspace of the plan has the pool of the slots.
    last = slots * state_bytes if config.device == "cpu" else 0
    return last + min(checkpoints * state_bytes, state_budget(plan))


def _settings(config: EngineConfig, sizes: ModelSizes, left: int) -> tuple[MemoryPlan | None, str | None, int, int]:
    """The plan of `cellar serve` in `left` bytes without the weights, or the reason for its refusal; context, slots."""
    try:
        memory, context, slots = plan_memory(config, sizes, left)
    except PlanTooLarge as error:
        return None, str(error), config.context or sizes.max_context, config.slots or 1
    return memory, None, context, slots


def _table(
    config: EngineConfig, sizes: ModelSizes, available: int, process: int, state_bytes: int
) -> tuple[TableEntry, ...]:
    contexts = sorted({*(length for length in _TABLE_CONTEXTS if length < sizes.max_context), sizes.max_context})
    return tuple(
        _entry(replace(config, context=context, slots=slots, cells=None), sizes, available, process, state_bytes)
        for context in contexts[: len(_TABLE_CONTEXTS)]
        for slots in _TABLE_SLOTS
    )


def _entry(config: EngineConfig, sizes: ModelSizes, available: int, process: int, state_bytes: int) -> TableEntry:
    assert config.context is not None
    assert config.slots is not None
    plan = memory_plan(config, sizes, available - sizes.weights_bytes, config.context, config.slots)
    states = _states_bytes(config, state_bytes, plan, config.context, config.slots)
    needed = plan.weights_bytes + plan.cache_bytes + plan.workspace_bytes + states
    return TableEntry(
        slots=config.slots,
        context=config.context,
        cache_bytes=plan.cache_bytes + states,
        total_bytes=process + needed,
        fits=needed <= available,
    )
