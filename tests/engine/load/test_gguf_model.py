"""A later start of a GGUF file: matrices that are repacked are not dequantised, and the logits stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from engine.gguf import matrices
from engine.gguf.container import read_model
from engine.load import checking, gguf_model, outcomes
from engine.load.load import LoadedModel
from tests.engine.gguf.files import empty_cache, feed, load_file, prompt, write_types, write_wide


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


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "phi3"])
def test_a_later_start_reads_fewer_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and experts have the weights of the file."""
    file = write(name, Type.Q4_K, tmp_path)
    read, read_parameters = list[set[str]](), gguf_model.read_parameters

    def spy(sources: Any, *args: Any, **settings: Any) -> Any:
        read.append(set(sources))
        return read_parameters(sources, *args, **settings)

    monkeypatch.setattr(gguf_model, "read_parameters", spy)

    first, second = load_file(file), load_file(file)

    assert torch.equal(logits(first), logits(second))
    repacked = {name for name in read[0] if "proj" in name and not name.endswith("bias")}
    assert repacked
    assert repacked.isdisjoint(read[1])
    assert {name for name in read[0] if "norm" in name} <= read[1]


def test_a_later_start_dequantises_types_without_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their matrices become int8, of the same weights."""
    monkeypatch.setattr(matrices, "EXACT_FORMATS", {})
    file = write("llama", Type.Q4_K, tmp_path)

    assert torch.equal(logits(load_file(file)), logits(load_file(file)))
