"""Embeddings in the formats of GGUF files: rows equal the dequantised table bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from engine.gguf.container import GgufModel, read_model
from engine.gguf.matrices import FileMatrices
from engine.gguf.sources import PLAIN_TYPES
from engine.load.load import LoadedModel
from engine.native.runner import NativeRunner
from engine.quantize.embedding import QuantizedEmbedding
from engine.quantize.quantize import bytes_of
from engine.run.runner import runners_of
from tests.engine.gguf.files import TYPES, empty_cache, feed, load_file, prompt, write_types, write_wide
from tests.libraries import built
from tests.selection import quick

Wide = Callable[[str], GgufModel]
KINDS = [kind for kind in TYPES if kind not in PLAIN_TYPES]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    """A checkpoint's file with matrices that have blocks of every type, in floats."""
    return cache(lambda name: read_model(write_wide(name, tmp_path_factory.mktemp(name))))


def logits(loaded: LoadedModel) -> Tensor:
    """The logits after each token of the prompt."""
    return feed(loaded, empty_cache(loaded), prompt())


def float_embeddings(monkeypatch: pytest.MonkeyPatch, file: Path) -> LoadedModel:
    """The model with a dequantised table."""
    with monkeypatch.context() as patch:
        patch.setattr(FileMatrices, "embeddings", lambda *_: [])
        return load_file(file)


# One kind of each structure of scales.
COMMON = (Type.Q8_0, Type.Q4_1, Type.Q5_0, Type.Q4_K, Type.Q6_K, Type.IQ4_XS, Type.MXFP4)
# Rounding follows the dequantisation, whatever the kind: one kind with it is enough.
QUICK = [(Type.Q4_K, "gemma3", False), (Type.Q4_K, "llama", True), *((kind, "llama", False) for kind in COMMON)]
CASES = [
    (kind, name, rounds)
    for kind, name in ((Type.Q4_K, "gemma3"), *((kind, "llama") for kind in KINDS))
    for rounds in (False, True)
]


@pytest.mark.parametrize(
    ("kind", "name", "rounds"), quick(QUICK, CASES), ids=lambda value: getattr(value, "name", str(value))
)
def test_native_rows_equal_the_dequantised_table(
    kind: Type, name: str, rounds: bool, wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied and untied, also where weights are rounded to bfloat16."""
    built("step")
    # Small models are computed in float32.
    dtype = torch.bfloat16 if rounds else torch.float32
    monkeypatch.setattr("engine.load.load.choose_dtype", lambda *_, **__: dtype)
    file = tmp_path / "other.gguf"
    write_types(wide(name), file, kind)

    expected, actual = float_embeddings(monkeypatch, file), load_file(file)

    assert isinstance(runners_of(actual.runner)[0], NativeRunner)
    assert isinstance(actual.model.get_input_embeddings(), QuantizedEmbedding)
    assert torch.equal(logits(expected), logits(actual))
    assert bytes_of(actual.model) < bytes_of(expected.model)


@pytest.mark.parametrize("name", quick(("granite",), ("llama", "gemma3", "granite")))
def test_torch_rows_equal_the_dequantised_table(
    name: str, wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of the module with its scale, whatever the kind of the table."""
    file = tmp_path / "other.gguf"
    write_types(wide(name), file, Type.Q5_K)
    tokens = torch.tensor([[3, 0, 17], [3, 200, 1]])

    expected, actual = (
        loaded.model.get_input_embeddings()(tokens)
        for loaded in (float_embeddings(monkeypatch, file), load_file(file, kernels="torch"))
    )

    assert torch.equal(expected, actual)


def test_per_layer_tables_keep_their_format(wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are most of the weights of small Gemma 4 models."""
    built("step")
    file = tmp_path / "other.gguf"
    write_types(wide("gemma4"), file, Type.Q8_0)

    expected, actual = float_embeddings(monkeypatch, file), load_file(file)

    tables = [module for module in actual.model.modules() if isinstance(module, QuantizedEmbedding)]
    assert len(tables) == 2
    assert isinstance(runners_of(actual.runner)[0], NativeRunner)
    assert torch.equal(logits(expected), logits(actual))
