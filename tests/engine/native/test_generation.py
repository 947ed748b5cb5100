"""Text of an engine with the native step equals transformers', and does not depend on the batch."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.load.load import LoadedModel
from engine.native.runner import NativeRunner
from engine.run.packed import PackedRunner
from engine.run.runner import ModelRunner, runners_of
from tests.engine.kit.models import Reference, load_model
from tests.engine.kit.speculated import Case, differences
from tests.engine.test_oracle import run
from tests.libraries import built
from tests.selection import quick

built("step")

Folder = Callable[[str], Path]
CASES = (
    Case("partly", "full", 8, 7, "preempt"),
    Case("lookup", "full", 3, 64, "cancel"),
    Case("partly", "hybrid", 3, 7, "preempt"),
    Case("random", "hybrid", 3, 64, "shift"),
)


@pytest.fixture
def load_native(folder: Folder) -> Callable[..., LoadedModel]:
    """Loads a family's tiny model, which must run load_native."""

    @cache
    def load(family: str, dtype: str = "float32", quantize: str = "none") -> LoadedModel:
        loaded = load_model(folder(family), dtype, quantize=quantize, threads=1)
        assert isinstance(runners_of(loaded.runner)[0], NativeRunner)
        return loaded

    return load


MIXED = (
    "qwen3",
    "mistral",
    "ministral3",
    "gemma3",
    "gemma4_experts",
    "deepseek_v3",
    "qwen3_next",
    "olmo_hybrid",
    "lfm2",
    "bamba",
    "llama4_full",
)
QUICK = ("ministral3", "gemma3", "gemma4_experts", "deepseek_v3", "bamba", "llama4_full")


@pytest.mark.parametrize("family", quick(QUICK, MIXED))
def test_mixed_batches_equal_generate(load_native: Callable[..., LoadedModel], folder: Folder, family: str) -> None:
    """Chunks, prefix copies and single rows of many sequences: tokens differ at ties only."""
    references = cache(lambda name, dtype: Reference(folder(name), getattr(torch, dtype)))

    assert 40 < run(load_native, references, family, range(4000, 4003), "float32")


@pytest.fixture
def bfloat16_checkpoint(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bfloat16 checkpoint, loaded like a large one, on a processor with bfloat16 products."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not multiply bfloat16: float32 is what it computes in")
    shutil.copytree(folder("llama"), tmp_path, dirs_exist_ok=True)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr("engine.load.load.is_small", lambda folder: False)
    return tmp_path


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_bfloat16_checkpoint_keeps_its_memory(bfloat16_checkpoint: Path, quantize: str) -> None:
    """It is computed in float32; weights and cells stay bfloat16."""
    loaded = load_model(bfloat16_checkpoint, "auto", quantize=quantize, threads=1)
    plain = load_model(bfloat16_checkpoint, "bfloat16", quantize=quantize, threads=1)
    weights = "bfloat16" if quantize == "none" else quantize

    assert isinstance(runners_of(loaded.runner)[0], NativeRunner)
    assert f"float32, {weights} weights" == loaded.info.dtype
    assert torch.bfloat16 == loaded.kv_dtype
    assert plain.memory.weights_bytes == loaded.memory.weights_bytes
    assert not isinstance(runners_of(plain.runner)[0], NativeRunner)
    assert plain.info.dtype.startswith("bfloat16")


def test_bfloat16_weights_equal_float32_copies(bfloat16_checkpoint: Path) -> None:
    """Greedy text, but for ties."""
    references = cache(lambda name, dtype: Reference(bfloat16_checkpoint, torch.float32))
    loaded = load_model(bfloat16_checkpoint, "auto", kv_dtype="float32", threads=1)
    unrounded = dataclasses.replace(loaded, runner=exact(loaded.runner))

    assert 40 < run(lambda family, dtype: unrounded, references, "llama", range(4000, 4003), "float32")


def exact(runner: ModelRunner) -> NativeRunner:
    """A native runner that rounds no row to bfloat16."""
    native, packed = runners_of(runner)
    assert isinstance(native, NativeRunner)
    assert isinstance(packed, PackedRunner)
    return NativeRunner(packed, native._decoder, native._library, rounds_to_bfloat16=False)


@pytest.mark.parametrize(
    ("case", "quantize"),
    quick(
        list(zip(CASES, itertools.cycle(("none", "int8")), strict=False)), itertools.product(CASES, ("none", "int8"))
    ),
)
def test_text_does_not_depend_on_drafts_or_batch(
    load_native: Callable[..., LoadedModel], case: Case, quantize: str
) -> None:
    assert [] == differences(case, lambda family: load_native(family, "float32", quantize))


@pytest.mark.parametrize("family", ["ministral3", "gemma4_experts", "llama4_full"])
def test_text_of_a_family_does_not_depend_on_drafts_or_batch(
    load_native: Callable[..., LoadedModel], family: str
) -> None:
    assert [] == differences(Case("partly", "full", 8, 7, "preempt"), lambda _: load_native(family))
