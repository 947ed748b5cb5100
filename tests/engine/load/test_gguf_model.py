"""A later start of a GGUF file: matrices that are repacked are not dequantised, and the logits stay the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from engine.gguf import matrices
from engine.gguf.container import read_model
from engine.gguf.deferred import DeferredWeights
from engine.gguf.matrices import FileMatrices
from engine.load.check import checking, outcomes
from engine.load.load import LoadedModel
from engine.load.read import file_model
from tests.engine.gguf.files import empty_cache, feed, load_file, prompt, write_types, write_wide
from tests.selection import quick


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes of small models are stored in an empty folder."""
    monkeypatch.setattr(checking, "is_small", lambda folder: False)
    monkeypatch.setattr(outcomes, "cache_folder", lambda kind: tmp_path / kind)


def write(name: str, kind: Type, folder: Path) -> Path:
    """Write a file with its matrices in one type."""
    file = folder / "other.gguf"
    write_types(read_model(write_wide(name, folder)), file, kind)
    return file


def logits(loaded: LoadedModel) -> Tensor:
    """The logits after each token of the prompt."""
    return feed(loaded, empty_cache(loaded), prompt())


@pytest.mark.parametrize("name", quick(("gemma3", "mixtral"), ("llama", "gemma3", "mixtral", "phi3")))
def test_a_later_start_reads_fewer_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and experts have the weights of the file."""
    file = write(name, Type.Q4_K, tmp_path)
    read, read_parameters = list[set[str]](), file_model.read_parameters

    def spy(sources: Any, *args: Any, **settings: Any) -> Any:
        read.append(set(sources))
        return read_parameters(sources, *args, **settings)

    monkeypatch.setattr(file_model, "read_parameters", spy)

    with monkeypatch.context() as eager:
        eager.setattr(FileMatrices, "deferrable", lambda *_: {})
        first = load_file(file)
    second = load_file(file)

    assert torch.equal(logits(first), logits(second))
    repacked = {name for name in read[0] if "proj" in name and not name.endswith("bias")}
    assert repacked
    assert repacked.isdisjoint(read[1])
    assert {name for name in read[0] if "norm" in name} <= read[1]


@pytest.mark.slow
def test_a_later_start_with_experts_of_two_types(tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    write_types(read_model(write_wide("mixtral", tmp_path)), file, Type.Q4_K, others={"ffn_up_exps": Type.Q6_K})

    assert torch.equal(logits(load_file(file)), logits(load_file(file)))


def test_a_later_start_dequantises_types_without_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their matrices become int8, of the same weights."""
    monkeypatch.setattr(matrices, "EXACT_FORMATS", {})
    file = write("llama", Type.Q4_K, tmp_path)

    assert torch.equal(logits(load_file(file)), logits(load_file(file)))


@pytest.mark.parametrize("name", quick(("mixtral",), ("llama", "gemma3", "mixtral", "phi3", "qwen2")))
def test_the_first_start_dequantises_in_calls(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks, the replaced layers and the logits are those of a start that dequantises all matrices first."""
    file = write(name, Type.Q4_K, tmp_path)
    loaded = load_file(file)
    [outcome] = (tmp_path / "checks").glob("*.json")
    expected = outcome.read_text()
    outcome.unlink()
    monkeypatch.setattr(FileMatrices, "deferrable", lambda *_: {})

    eager = load_file(file)

    assert expected == outcome.read_text()
    assert torch.equal(logits(eager), logits(loaded))


def test_the_first_start_computes_the_experts_of_the_first_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others add zeros in the checks, whose outcome is the same; all are in the model that is served."""
    file = write("mixtral", Type.Q4_K, tmp_path)
    expected = logits(load_file(file))
    [outcome] = (tmp_path / "checks").glob("*.json")
    content = outcome.read_text()
    outcome.unlink()
    read, in_calls = DeferredWeights._read, list[str]()

    def spy(self: DeferredWeights, names: list[str]) -> None:
        in_calls.extend(names if self._restore else [])
        read(self, names)

    monkeypatch.setattr(DeferredWeights, "_read", spy)

    loaded = load_file(file)

    assert Counter(name.split(".")[2] for name in in_calls) == {"0": 2}
    assert outcome.read_text() == content
    assert torch.equal(logits(loaded), expected)


def test_weights_that_a_model_reads_outside_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read before the model is checked again."""
    file = write("llama", Type.Q4_K, tmp_path)
    expected = logits(load_file(file))
    forward = LlamaMLP.forward

    def read_directly(self: LlamaMLP, rows: Tensor) -> Tensor:
        output: Tensor = forward(self, rows)
        return output + 0 * self.down_proj.weight.sum()

    monkeypatch.setattr(LlamaMLP, "forward", read_directly)
    for outcome in (tmp_path / "checks").iterdir():
        outcome.unlink()

    loaded = load_file(file)

    assert torch.allclose(expected, logits(loaded), atol=0.2)
