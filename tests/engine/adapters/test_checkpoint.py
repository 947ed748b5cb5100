"""Folders of adapters: what is read, and that broken ones are refused with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adapters.adapter import Adapter
from engine.adapters.checkpoint import WEIGHTS_FILE, read_adapter
from engine.adapters.config import CONFIG_FILE
from engine.errors import AdapterUnsupported
from tests.engine.kit.adapters import KINDS, change_config, change_weights, save_adapter

LAYER = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{LAYER}.lora_{side}.weight" for side in "AB")
SHAPES = {
    f"model.layers.{at}.self_attn.{name}_proj": (rows, 32) for at in (0, 1) for name, rows in (("q", 32), ("v", 16))
}


@pytest.fixture(scope="module")
def saved(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as PEFT saves it."""
    return save_adapter(folder("llama"), tmp_path_factory.mktemp("adapters") / "saved", KINDS[0])


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(saved, tmp_path / "copy")


def read(folder: Path, dtype: torch.dtype = torch.float32) -> Adapter:
    """The adapter in a folder."""
    return read_adapter("mine", folder, SHAPES, dtype)


def test_factors_have_the_scaling(saved: Path) -> None:
    """Of alpha / rank, in the second factor."""
    adapter, stored = read(saved), {}
    change_weights(shutil.copytree(saved, saved.parent / "other"), lambda tensors: stored.update(tensors) or tensors)

    assert adapter.layers.keys() == SHAPES.keys()
    assert torch.equal(adapter.layers[LAYER].down, stored[A])
    assert torch.equal(adapter.layers[LAYER].up, stored[B] * (16 / 8))
    assert (adapter.info.rank, adapter.info.targets, adapter.info.name) == (8, ("q_proj", "v_proj"), "mine")
    assert adapter.bytes == adapter.info.bytes == 4 * 8 * (32 + 32 + 32 + 16) * 2


def test_the_digest_is_that_of_the_contents(saved: Path, copied: Path) -> None:
    """Not of name or folder; a changed setting or matrix changes it."""
    before = read(saved).digest

    assert read_adapter("other", copied, SHAPES).digest == before
    change_config(copied, lora_alpha=17)
    changed = read(copied).digest
    assert changed != before
    change_weights(copied, lambda tensors: {**tensors, A: tensors[A] + 1})
    assert read(copied).digest not in (before, changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtypes_are_converted(copied: Path, dtype: torch.dtype) -> None:
    """Factors are float32, or float64 for a model in float64; bfloat16 ones are kept."""
    change_weights(copied, lambda tensors: {name: matrix.to(dtype) for name, matrix in tensors.items()})

    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    assert {read(copied).layers[LAYER].down.dtype, read(copied).layers[LAYER].up.dtype} == {kept}
    assert read(copied, torch.float64).layers[LAYER].up.dtype == torch.float64


@pytest.mark.parametrize(("alpha", "dtype"), [(4, torch.bfloat16), (11, torch.float32)])
def test_scaled_bfloat16_numbers_are_exact(copied: Path, alpha: int, dtype: torch.dtype) -> None:
    """A scaling that would round them makes them float32."""
    stored = dict[str, Tensor]()
    change_weights(copied, lambda tensors: {name: matrix.bfloat16() for name, matrix in tensors.items()})
    change_weights(copied, lambda tensors: stored.update(tensors) or tensors)
    change_config(copied, lora_alpha=alpha)
    factors = read(copied).layers[LAYER]

    assert (factors.down.dtype, factors.up.dtype) == (dtype, dtype)
    assert torch.equal(factors.down.float(), stored[A].float())
    assert torch.equal(factors.up.float(), stored[B].float() * (alpha / 8))


def _without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: matrix for name, matrix in tensors.items() if name not in names}


def _replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def _renamed(name: str, other: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {other if each == name else each: matrix for each, matrix in tensors.items()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_without(A), "only one of the matrices"),
        (lambda tensors: {}, "is empty"),
        (_replaced(A, lambda matrix: matrix[:4]), r"shapes \[4, 32\] and \[32, 8\], not \[8, 32\] and \[32, 8\]"),
        (_replaced(A, lambda matrix: matrix[:0]), r"shapes \[0, 32\]"),
        (_replaced(A, lambda matrix: matrix[:, :16].contiguous()), r"shapes \[8, 16\]"),
        (_replaced(A, lambda matrix: matrix[None]), r"shapes \[1, 8, 32\]"),
        (_replaced(B, lambda matrix: matrix[:16]), r"and \[16, 8\], not"),
        (_replaced(A, lambda matrix: matrix.int()), "dtype torch.int32"),
        (_replaced(A, lambda matrix: matrix.index_fill(0, torch.tensor([3]), torch.nan)), "not finite"),
        (_replaced(B, lambda matrix: matrix.index_fill(0, torch.tensor([3]), torch.inf)), "not finite"),
        (_renamed(A, f"base_model.model.{LAYER}.lora_embedding_A"), "lora_embedding_A is no low-rank matrix"),
        (_renamed(A, f"base_model.model.{LAYER}.lora_magnitude_vector"), "is no low-rank matrix"),
        (_renamed(A, A.replace("q_proj", "qkv_proj")), "no linear layer model.layers.0.self_attn.qkv_proj"),
        (_renamed(A, "base_model.model.../../../etc/passwd.lora_A.weight"), "no linear layer .*etc/passwd"),
    ],
)
def test_broken_matrices_are_refused(copied: Path, change: Any, text: str) -> None:
    """Missing, misshapen, not finite, of other layers."""
    change_weights(copied, change)

    with pytest.raises(AdapterUnsupported, match=text):
        read(copied)


def test_many_unknown_keys_are_refused(copied: Path) -> None:
    """10,000 of them, with a short message."""
    change_weights(copied, lambda tensors: tensors | {f"x{at}" * 50: torch.zeros(1) for at in range(10_000)})

    with pytest.raises(AdapterUnsupported) as refused:
        read(copied)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(copied: Path, length: int) -> None:
    """Wherever it ends."""
    file = copied / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:length])

    with pytest.raises(AdapterUnsupported, match="cannot be read"):
        read(copied)


def test_a_scaling_that_overflows_is_refused(copied: Path) -> None:
    """The scaled matrix is checked too."""
    change_config(copied, lora_alpha=1e308)

    with pytest.raises(AdapterUnsupported, match="not finite"):
        read(copied)


def test_other_folders_are_refused(copied: Path, tmp_path: Path) -> None:
    """Without the files, with a pickle, with a configuration of any size; no pickle is read."""
    (copied / CONFIG_FILE).write_bytes(b" " * (2**20 + 1))
    with pytest.raises(AdapterUnsupported, match="more than 1048576 bytes"):
        read(copied)
    (copied / WEIGHTS_FILE).rename(copied / "adapter_model.bin")
    with pytest.raises(AdapterUnsupported, match=r"adapter_model\.bin is not read"):
        read(copied)
    (copied / "adapter_model.bin").unlink()
    with pytest.raises(AdapterUnsupported, match=r"has no adapter_model\.safetensors$"):
        read(copied)
    (copied / CONFIG_FILE).unlink()
    with pytest.raises(AdapterUnsupported, match=r"its folder has no adapter_config\.json$"):
        read(copied)
    with pytest.raises(AdapterUnsupported, match="its folder has no"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_no_refusal_has_the_path(copied: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients get the text: of missing files, and of files that fail to be read."""

    def fail(path: Path, *arguments: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as context:
        context.setattr(Path, "open", fail)
        with pytest.raises(AdapterUnsupported, match="Permission denied") as unreadable:
            read(copied)
    (copied / file).unlink()
    with pytest.raises(AdapterUnsupported) as missing:
        read(copied)
    assert copied.name not in f"{unreadable.value} {missing.value}"


def test_no_path_of_the_configuration_is_opened(copied: Path, tmp_path: Path) -> None:
    """The base model's name may be any path."""
    change_config(copied, base_model_name_or_path="../../secret", revision="../x", auto_mapping={"base": "../../x"})

    assert read(copied).layers.keys() == SHAPES.keys()
