"""What an engine says whose model runs natively: what transformers says, and the same in any company."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.load.load import LoadedModel
from engine.native.runner import NativeRunner
from tests.engine.models import Reference, load_model
from tests.engine.speculated import Case, differences
from tests.engine.test_oracle import run
from tests.libraries import built

built("step")

Folder = Callable[[str], Path]
CASES = (
    Case("partly", "full", 8, 7, "preempt"),
    Case("lookup", "full", 3, 64, "cancel"),
    Case("partly", "hybrid", 3, 7, "preempt"),
    Case("random", "hybrid", 3, 64, "shift"),
)


@pytest.fixture
def natively(folder: Folder) -> Callable[..., LoadedModel]:
    """A family's tiny model in float32, quantised if need be, and known to run natively."""

    @cache
    def load(family: str, dtype: str = "float32", quantize: str = "none") -> LoadedModel:
        loaded = load_model(folder(family), dtype, quantize=quantize, threads=1)
        assert isinstance(loaded.runner, NativeRunner)
        return loaded

    return load


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "qwen3_next", "olmo_hybrid", "lfm2", "bamba"])
def test_any_mix_says_what_generate_says_alone(
    natively: Callable[..., LoadedModel], folder: Folder, family: str
) -> None:
    """Chunks, copies of prefixes and single rows of many sequences: tokens differ from transformers' at ties only."""
    references = cache(lambda name, dtype: Reference(folder(name), getattr(torch, dtype)))

    assert 40 < run(natively, references, family, range(4000, 4003), "float32")


@pytest.fixture
def halves(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in bfloat16, which counts as a large one, on a processor that multiplies it."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not multiply bfloat16: float32 is what it computes in")
    shutil.copytree(folder("llama"), tmp_path, dirs_exist_ok=True)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr("engine.load.load.is_small", lambda folder: False)
    return tmp_path


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_a_checkpoint_of_16_bits_is_computed_in_float32_and_takes_no_more(halves: Path, quantize: str) -> None:
    """What is not quantised stays as it is stored, and so do cells; what is told of it says both."""
    loaded = load_model(halves, "auto", quantize=quantize, threads=1)
    plain = load_model(halves, "bfloat16", quantize=quantize, threads=1)
    weights = "bfloat16" if quantize == "none" else quantize

    assert isinstance(loaded.runner, NativeRunner)
    assert f"float32, {weights} weights" == loaded.info.dtype
    assert torch.bfloat16 == loaded.kv_dtype
    assert plain.memory.weights_bytes == loaded.memory.weights_bytes
    assert not isinstance(plain.runner, NativeRunner)
    assert plain.info.dtype.startswith("bfloat16")


def test_weights_of_16_bits_say_what_widened_ones_say(halves: Path) -> None:
    """Greedy text is that of the same weights in float32, but where two tokens are all but equal."""
    references = cache(lambda name, dtype: Reference(halves, torch.float32))
    loaded = load_model(halves, "auto", kv_dtype="float32", threads=1)
    unrounded = dataclasses.replace(loaded, runner=exact(loaded.runner))

    assert 40 < run(lambda family, dtype: unrounded, references, "llama", range(4000, 4003), "float32")


def exact(runner: object) -> NativeRunner:
    """The same, with no row rounded to meet a weight."""
    assert isinstance(runner, NativeRunner)
    return NativeRunner(runner.fallback, runner._decoder, runner._library, rounds_to_bfloat16=False)


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_drafts_and_company_change_no_token(natively: Callable[..., LoadedModel], case: Case, quantize: str) -> None:
    """Drawn in any way, in float32 and quantised: there are no ties to excuse, for rows are the same bit for bit."""
    assert [] == differences(case, lambda family: natively(family, "float32", quantize))
