"""Tile tables on a device that is not there: they are in the one upload of a step, and give the text of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.kernels.attention_input import AttentionInput, RowAttentionInput
from engine.kernels.triton import batch
from engine.kernels.triton.batch import BatchTables
from engine.run.graphs import CallRecorder, GraphRunner
from kvcache.kv_buffer import CellIndex, LayerKV, store_rows
from tests.engine.kernels.triton.interpreter import DEVICE, SMALL, TritonKernels, launch
from tests.engine.kit.models import core, load_model
from tests.engine.kit.play import Job, ask, play, texts
from tests.engine.test_transfers import STEP, step_transfers
from tests.fake_device import FAKE, DeviceTensor, fake_device
from tests.selection import quick

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the device of these tests is the CPU"),
]
JOBS = (
    Job(ask("long", range(3, 23), 5)),
    Job(ask("short", range(27, 32), 3), 1),
    # It shares cells with the first one, so that its own are no run.
    Job(ask("shared", [*range(3, 19), *range(50, 54)], 2), 4),
)
SETTINGS = {"slots": 3, "context": 64, "chunk": 16}


def in_memory(value: Any) -> Any:
    """The tensor of the CPU with the numbers of one of the device."""
    return value.memory if isinstance(value, DeviceTensor) else value


class InterpretedKernels(TritonKernels):
    """Triton's interpreter on the memory of the device."""

    def __init__(self) -> None:
        super().__init__(SMALL)

    def store(self, keys: LayerKV, values: LayerKV, cells: CellIndex, key_rows: Tensor, value_rows: Tensor) -> None:
        store_rows(keys, values, cells, key_rows, value_rows)

    def _launch(
        self,
        inputs: AttentionInput | RowAttentionInput,
        keys: launch.StoredRows,
        values: launch.StoredRows,
        tables: BatchTables,
    ) -> Tensor:
        stored = (replace(rows, numbers=in_memory(rows.numbers)) for rows in (keys, values))
        tile_sets = tuple(replace(each, table=in_memory(each.table)) for each in tables.tile_sets)
        for each in (tables.bounds, *(own.table for own in tables.tile_sets)):
            assert each.data_ptr() % 16 == 0 if not isinstance(each, DeviceTensor) else each.storage_offset() % 4 == 0
        own = BatchTables(in_memory(tables.cells), in_memory(tables.bounds), tile_sets)
        moved = replace(inputs, query=in_memory(inputs.query), sinks=in_memory(inputs.sinks))
        return DeviceTensor(super()._launch(moved, *stored, own))


@pytest.fixture(autouse=True)
def storage_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the device have no storage of their own."""
    list_cells = batch._listed_cells
    monkeypatch.setattr(batch, "_listed_cells", lambda tables: list_cells([*map(in_memory, tables)]))


@pytest.mark.parametrize("family", quick(["gemma3"], ["llama", "gemma3", "llama4", "gpt_oss", "deepseek_v3"]))
def test_tables_are_in_the_upload_of_the_step(family: str, folder: Callable[[str], Path]) -> None:
    """Of chunks of prompts beside decoding sequences, and of recorded steps."""
    expected = texts(play(core(load_model(folder(family), "float32", kernels="torch"), **SETTINGS), JOBS))
    with fake_device() as device:
        model = load_model(folder(family), "float32", device=FAKE)
        kernels, mla = InterpretedKernels(), model.runner.mla  # type: ignore[attr-defined]
        runner = GraphRunner(model.model, model.layers, mla, kernels, recorder=CallRecorder())
        engine = core(replace(model, runner=runner), **SETTINGS)
        recorded = [*runner.record_all(engine.cache, 3)]
        found, by_kind = step_transfers(engine, device, JOBS)

    assert (3, 3) == recorded[-1]
    assert expected == found
    assert {"prompt", "mixed", "decode"} == by_kind.keys()
    assert [] == [each for steps in by_kind.values() for each in steps if each != STEP]
