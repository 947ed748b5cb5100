"""Compiled norms, rotations and dense MLPs: the text of the model without them, in any mix, over recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.load.fusion import fuse, inductor
from engine.load.load import LoadedModel
from engine.run.graphs import CallRecorder, GraphRunner
from kvcache.attention_group import AttentionGroup
from kvcache.cell_pool import CellPool
from kvcache.device_table import DeviceTable
from kvcache.kv_buffer import allocate_kv_buffers
from kvcache.spec import GroupSpec
from tests.engine.kit.mixes import mix, prompts
from tests.engine.kit.models import VOCABULARY, Reference, core, load_model
from tests.engine.kit.play import Job, ask, play, texts
from tests.engine.test_oracle import run

Folder = Callable[[str], Path]
Function = Callable[..., Any]
LLAMA = ("LlamaMLP", "LlamaRMSNorm", "apply_rotary_pos_emb")
FAMILIES = {
    "llama": LLAMA,
    "gemma3": ("Gemma3MLP", "Gemma3RMSNorm", "apply_rotary_pos_emb"),
    "gpt_oss": ("GptOssRMSNorm", "apply_rotary_pos_emb"),
    "deepseek_v3": ("DeepseekV3MLP", "DeepseekV3RMSNorm", "apply_rotary_pos_emb_interleave"),
    "qwen3_next": ("Qwen3NextMLP", "Qwen3NextRMSNorm", "Qwen3NextRMSNormGated", "apply_rotary_pos_emb"),
}

pytestmark = pytest.mark.usefixtures("one_thread")


class Graphs:
    """Graphs of torch.compile that run without fusion: their number, and that of their calls."""

    def __init__(self) -> None:
        self.made = self.called = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Function:
        self.made += 1

        def called(*args: Any) -> Any:
            self.called += 1
            return graph.forward(*args)

        return called

    def compiler(self, function: Function) -> Function:
        return torch.compile(function, dynamic=True, fullgraph=True, backend=self, isolate_recompiles=True)


class CalledNorms:
    """Counts the calls of a model's norms."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.count += 1


@pytest.fixture(autouse=True)
def default_stance() -> Iterator[None]:
    """Other tests compile as by default."""
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def device_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches on the CPU have the cell tables and the spare cell of other devices."""
    make_group, make_pool = AttentionGroup.__init__, CellPool.__init__

    def group(self: AttentionGroup, *args: Any, device: torch.device, **settings: Any) -> None:
        make_group(self, *args, device=device, **settings)
        self.device_table = DeviceTable(self._tables, device)

    def pool(self: CellPool, spec: GroupSpec, cells: int, *args: Any) -> None:
        make_pool(self, spec, cells, *args)
        self.keys, self.values = allocate_kv_buffers(spec, cells + 1, *args)

    monkeypatch.setattr(AttentionGroup, "__init__", group)
    monkeypatch.setattr(CellPool, "__init__", pool)


def recorded(loaded: LoadedModel) -> LoadedModel:
    """The model with recorded steps, on the CPU."""
    runner = GraphRunner(loaded.model, loaded.layers, "auto", loaded.runner.attend, recorder=CallRecorder())  # type: ignore[attr-defined]
    return replace(loaded, runner=runner)


def served(loaded: LoadedModel, seed: int) -> dict[str, Any]:
    """The texts of a mix of batches of all sizes, prompts in chunks, cancels and preemption."""
    traffic = mix(seed, prompts(5), scarce=True)
    settings = {"slots": traffic.slots, "chunk": traffic.chunk, "cells": traffic.cells}
    return texts(play(core(recorded(loaded), **settings), traffic.jobs))


def changed(function: Function) -> Function:
    def other(*args: Any, **settings: Any) -> Any:
        output = function(*args, **settings)
        return output * 1.001 if isinstance(output, Tensor) else output

    return other


def broken(function: Function) -> Function:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\nand a trace")

    return fail


@pytest.mark.parametrize(
    ("compiler", "kept", "warning"),
    [
        (lambda function: function, LLAMA, ""),
        (changed, LLAMA[2:], "LlamaRMSNorm is not compiled: its output differs by 0.001, where 4.8e-07 is rounding"),
        (broken, (), "apply_rotary_pos_emb is not compiled: RuntimeError: no compiler"),
    ],
)
def test_functions_that_differ_stay_as_they_are(
    compiler: Callable[[Function], Function],
    kept: Sequence[str],
    warning: str,
    folder: Folder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log names each with the reason."""
    job = Job(ask("one", range(3, 12), 6))
    loaded = load_model(folder("llama"), "float32", kernels="torch")
    expected = texts(play(core(loaded), [job]))

    with caplog.at_level("INFO", "cellar.engine"):
        names = fuse(loaded.model, VOCABULARY, compiler)

    assert tuple(kept) == names
    assert f": {', '.join(kept) or 'nothing'}" in caplog.text
    assert warning in caplog.text
    assert len(LLAMA) - len(kept) == caplog.text.count("is not compiled")
    assert expected == texts(play(core(loaded), [job]))


@pytest.mark.slow
@pytest.mark.usefixtures("device_tables")
@pytest.mark.parametrize("family", FAMILIES)
def test_two_graphs_serve_all_batches_of_a_function(family: str, folder: Folder) -> None:
    """One for a single token and one for more; for each width of norms, and with other numbers of heads. No graph is
    made for a request, and each norm calls one.
    """
    loaded = load_model(folder(family), "float32", kernels="torch")
    expected, graphs = served(loaded, 3), Graphs()
    names = fuse(loaded.model, VOCABULARY, graphs.compiler)
    made, called, norms = graphs.made, graphs.called, CalledNorms(loaded.model)
    answers = served(loaded, 3)

    assert FAMILIES[family] == names
    assert {"llama": 6, "gpt_oss": 4}.get(family, made) == made
    assert expected == answers
    assert made == graphs.made
    assert 100 < norms.count <= graphs.called - called


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.usefixtures("device_tables")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_equals_generate(family: str, folder: Folder, reference: Callable[..., Reference]) -> None:
    """Of fused functions, over recorded steps: the text of transformers' `generate`, in float32 except for ties."""
    loaded = load_model(folder(family), "float32", kernels="torch")
    names = fuse(loaded.model, VOCABULARY, inductor)
    judged = run(lambda *_: recorded(loaded), reference, family, range(1000, 1003), "float32")

    assert FAMILIES[family] == names
    assert 40 < judged
