"""Quantised weights on a device that is not there: the text of the unpacked weights, as rows are not quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.config import EngineConfig
from engine.gguf.container import read_model
from engine.kernels import dispatch
from engine.kernels.device_products import DeviceProducts, MultiplyByExpert, ReadOutputs
from engine.kernels.linear import MultiplyRows
from engine.kernels.packing import PackedMatrix
from engine.load.check import selftest
from engine.load.load import LoadedModel, load
from engine.load.plan.model_plan import plan_model
from engine.quantize.embedding import QuantizedEmbedding
from engine.quantize.experts import QuantizedExperts
from engine.quantize.layers import QuantizedLinear
from engine.run.graphs import CallRecorder, GraphRunner
from tests.engine.gguf.files import write_types, write_wide
from tests.engine.kernels.triton.interpreter import linear
from tests.engine.kit.mixes import mix, prompts
from tests.engine.kit.models import CONTEXT, core, load_model
from tests.engine.kit.play import Job, ask, play, texts
from tests.fake_device import FAKE, DeviceTensor, Recorder, fake_device
from tests.selection import quick

Folder = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("one_thread")


class InterpretedProducts(DeviceProducts):
    """Triton's kernels in its interpreter, on the memory of the device's tensors."""

    def __init__(self, dtype: torch.dtype, device: str, *, one_tile: bool = False) -> None:
        super().__init__(torch.device(device))
        self._products = linear.TritonProducts(torch.device("cpu"), dtype, one_tile=one_tile)

    def __call__(self, matrices: Sequence[PackedMatrix]) -> MultiplyRows:
        multiply = self._products([in_memory(one) for one in matrices])
        return lambda rows: [DeviceTensor(own) for own in multiply(rows.memory)]  # type: ignore[attr-defined]

    def experts(self, matrices: Sequence[PackedMatrix]) -> MultiplyByExpert | None:
        multiply = self._products.experts([in_memory(one) for one in matrices])
        assert multiply is not None
        return lambda rows, experts: DeviceTensor(multiply(rows.memory, experts.memory))  # type: ignore[attr-defined]

    def outputs(self, matrix: PackedMatrix) -> ReadOutputs:
        read = self._products.outputs(in_memory(matrix))
        return lambda outputs: DeviceTensor(read(outputs.memory))  # type: ignore[attr-defined]


def in_memory(matrix: PackedMatrix) -> PackedMatrix:
    """The matrix as tensors of the CPU."""
    assert isinstance(matrix.codes, DeviceTensor)
    assert isinstance(matrix.scales, DeviceTensor)
    return replace(matrix, codes=matrix.codes.memory, scales=matrix.scales.memory)


@pytest.fixture
def device() -> Iterator[Recorder]:
    with fake_device() as recorder:
        yield recorder


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by Triton in place of torch."""
    monkeypatch.setattr(dispatch, "device_products", InterpretedProducts)


def unpacked(loaded: LoadedModel, folder: Path) -> LoadedModel:
    """The model on the CPU with the unpacked weights of a quantised one."""
    plain = load_model(folder, "float32", kernels="torch")
    for name, module in loaded.model.named_modules():
        if isinstance(module, QuantizedLinear):
            own = plain.model.get_submodule(name)
            weights = in_memory(module.packed).unpack(torch.float32)
            weights = weights.T.contiguous() if isinstance(own, Conv1D) else weights
            # Not that of an embedding with the same weights.
            own.weight = nn.Parameter(weights, requires_grad=False)
        elif isinstance(module, QuantizedExperts):
            own = plain.model.get_submodule(name)
            for stack, matrices in ((module.experts.up, module.up), (module.experts.down, module.down)):
                weights = torch.stack([in_memory(one).unpack(torch.float32) for one in matrices])
                stacked = weights.transpose(1, 2).contiguous() if stack.transposed else weights
                getattr(own, stack.parameter).data = stacked
    return plain


def replaced(loaded: LoadedModel) -> list[type]:
    """The kinds of quantised modules."""
    kinds = (QuantizedLinear, QuantizedExperts, QuantizedEmbedding)
    return [kind for kind in kinds if any(isinstance(each, kind) for each in loaded.model.modules())]


CASES = [("llama", "int8"), ("qwen3_moe", "int4"), ("deepseek_v3", "int8"), ("gpt2", "int4"), ("qwen3_next", "int8")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "quantize"), quick(CASES[:1], CASES))
def test_any_mix_is_that_of_the_unpacked_weights(family: str, quantize: str, folder: Folder, device: Recorder) -> None:
    """Prompts in chunks, shared prefixes, cancels and preemption; products in torch."""
    traffic = mix(3, prompts(len(family)), scarce=True)
    settings = {"slots": traffic.slots, "chunk": traffic.chunk, "cells": traffic.cells}
    loaded = load_model(folder(family), "float32", device=FAKE, quantize=quantize)

    answers = play(core(loaded, **settings), traffic.jobs)

    assert texts(play(core(unpacked(loaded, folder(family)), **settings), traffic.jobs)) == texts(answers)


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("family", "quantize"), quick((), [("qwen3_moe", "int8"), CASES[0]]))
def test_recorded_steps_multiply_without_a_wait(
    family: str, quantize: str, folder: Folder, device: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's products, also of experts: the text of the unpacked weights, and one upload and one wait a step."""
    monkeypatch.setattr(selftest, "recorder_for", lambda device: CallRecorder())
    loaded = load_model(folder(family), "float32", device=FAKE, quantize=quantize)
    jobs = [Job(ask(f"{at}", range(3, 9 + at), 4, ignore_eos=True)) for at in range(2)]
    engine = core(loaded, slots=2)
    device.clear()
    answers = play(engine, jobs)

    # Each recording uploads the numbers of its empty batch once.
    uploads = [line for line in device.uploads if "run/graphs" not in line]
    assert isinstance(loaded.runner, GraphRunner)
    assert [engine.stats().steps_total] * 2 == [len(uploads), len(device.waits)]
    assert texts(play(core(unpacked(loaded, folder(family))), jobs)) == texts(answers)


@pytest.mark.parametrize("name", quick(["llama"], ["llama", "mixtral", "gpt_oss"]))
def test_files_keep_their_formats(name: str, tmp_path: Path, device: Recorder) -> None:
    """Layers, experts and the embedding; the plan without weights has the bytes of the load."""
    file = tmp_path / "other.gguf"
    write_types(read_model(write_wide(name, tmp_path)), file, Type.Q4_K)
    config = EngineConfig(model=str(file), device=FAKE, context=CONTEXT)
    loaded = load(config, lambda phase: None)
    expected = load(
        EngineConfig(model=str(file), context=CONTEXT, dtype="float32", kernels="torch"), lambda phase: None
    )
    jobs = [Job(ask(f"{at}", range(3, 9 + at), 6)) for at in range(2)]

    assert texts(play(core(expected), jobs)) == texts(play(core(loaded), jobs))
    assert QuantizedLinear in replaced(loaded)
    assert (name == "llama") == (QuantizedExperts not in replaced(loaded))
    assert plan_model(config, file).weights_bytes == pytest.approx(loaded.memory.weights_bytes, rel=0.01)


def test_quantised_bytes_are_planned(folder: Folder, device: Recorder) -> None:
    """Packed weights are on the device, with nothing of the original ones."""
    config = EngineConfig(model=str(folder("llama")), device=FAKE, context=CONTEXT, quantize="int8", dtype="float32")
    loaded = load(config, lambda phase: None)
    tensors: list[Tensor] = [*loaded.model.parameters(), *loaded.model.buffers()]

    assert {FAKE} == {str(each.device) for each in tensors}
    # The plan aligns each matrix.
    assert plan_model(config, folder("llama")).weights_bytes == pytest.approx(loaded.memory.weights_bytes, rel=0.01)
    assert loaded.memory.weights_bytes < sum(each.nbytes for each in load_model(folder("llama")).model.parameters()) / 4
