"""`cellar plan` on the console: the memory of a model by use, and a table of slots and contexts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from engine.types.sizes import format_size
from server.terminal.sizes import format_count

if TYPE_CHECKING:
    from engine.load.plan.model_plan import GroupSize, ModelPlan
    from server.configuration.settings import Settings

EXIT_IMPOSSIBLE = 1


def run_plan(settings: Settings, *, as_json: bool) -> int:
    """Print the plan; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    # The imports take seconds, and their memory is part of the plan.
    with console.status("import of torch and transformers"):
        import server.app  # noqa: F401
        from engine.errors import ModelError
        from engine.load.machine.device import resolve_device
        from engine.load.plan.model_plan import plan_with_draft
        from engine.load.read.checkpoint import resolve_headers
    try:
        config = resolve_device(settings.engine_config())
        with console.status("configuration and headers"):
            draft = None if config.draft_model is None else resolve_headers(config.draft_model)
            planned = plan_with_draft(config, resolve_headers(config.model), draft)
    except ModelError as error:
        console.print(f"cellar: {error}", markup=False)
        return EXIT_IMPOSSIBLE
    if as_json:
        console.print_json(json.dumps(asdict(planned) | {"total_bytes": planned.total_bytes}))
    else:
        _print_plan(console, planned)
    draft_fits = planned.draft is None or planned.draft.memory is not None
    return 0 if planned.memory is not None and draft_fits else EXIT_IMPOSSIBLE


def _print_plan(console: Console, planned: ModelPlan) -> None:
    console.print(
        f"{planned.model}: {planned.architecture}, {format_count(planned.parameters)} parameters", markup=False
    )
    for name, text in _lines(planned):
        console.print(f"  {name:<10} {text}", markup=False)
    console.print("\nMemory in all, by the context of each slot (*: more than is free):", markup=False)
    console.print(_table(planned))
    for reason in (planned.reason, None if planned.draft is None else planned.draft.reason):
        if reason is not None:
            console.print(f"cellar: {reason}", markup=False)


def _lines(planned: ModelPlan) -> Iterator[tuple[str, str]]:
    yield "weights", f"{format_size(planned.weights_bytes)} ({planned.weights})"
    for group in planned.groups:
        yield "cells", f"{format_size(group.token_bytes)} a token ({planned.kv_dtype}): {_group_text(group)}"
    if planned.state_bytes:
        yield (
            "states",
            (
                f"{format_size(planned.state_bytes)} a sequence, and as much a checkpoint in the prefix cache: "
                f"up to {format_size(planned.states_bytes)} for {planned.slots} slots"
            ),
        )
    if planned.encoder_bytes:
        yield "images", f"up to {format_size(planned.encoder_bytes)} for encoded images"
    yield "process", f"{format_size(planned.process_bytes)} (Python, libraries, tokenizer)"
    memory = planned.memory
    if memory is None:
        return
    yield "slots", f"{planned.slots} slots, {planned.context} tokens a sequence (trained: {planned.max_context})"
    yield "cache", f"{format_size(memory.cache_bytes)} for {memory.cells} tokens of all slots"
    yield "work", f"{format_size(memory.workspace_bytes)} at most, during a step"
    total = planned.total_bytes
    assert total is not None
    yield "total", f"{format_size(total)} with full slots, of {format_size(planned.available_bytes)} free"
    if planned.draft is not None:
        yield "draft", _draft_text(planned.draft)


def _draft_text(draft: ModelPlan) -> str:
    """The memory of the draft model, which the total of the model does not include."""
    if draft.memory is None or draft.total_bytes is None:
        return f"{draft.model} does not fit"
    parts = {"weights": draft.memory.weights_bytes, "cache": draft.memory.cache_bytes}
    parts |= {"work": draft.memory.workspace_bytes}
    uses = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items())
    return f"{format_size(draft.total_bytes)} more for {draft.model}: {uses}"


def _group_text(group: GroupSize) -> str:
    reach = "all tokens of a slot" if group.window is None else f"the last {group.window} tokens of a slot"
    values = f" + {group.value_width}" if group.value_width else ""
    return f"{group.layers} layers x {group.heads} heads x ({group.key_width}{values}), {reach}"


def _table(planned: ModelPlan) -> Table:
    """The totals: a row for each context, a column for each number of slots."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("  context", justify="right")
    for slots in sorted({entry.slots for entry in planned.table}):
        table.add_column("1 slot" if slots == 1 else f"{slots} slots", justify="right")
    for context in sorted({entry.context for entry in planned.table}):
        entries = sorted((entry for entry in planned.table if entry.context == context), key=lambda entry: entry.slots)
        table.add_row(
            f"{context}", *(f"{format_size(entry.total_bytes)}{' ' if entry.fits else '*'}" for entry in entries)
        )
    return table
