"""A start reads the decoder that an earlier one detected, unless the model or the file has changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.load import checking, outcomes, selection
from engine.load.decoder_file import DecoderFile, Decoders
from engine.load.load import LoadedModel
from engine.native.detection import linears
from engine.native.runner import NativeRunner
from tests.engine.models import load_model
from tests.libraries import built

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., tuple[LoadedModel, list[Decoders]]]


@pytest.fixture
def start(folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Loads a tiny model as if it were large; returns it and the decoders that were detected."""
    built("step")
    monkeypatch.setattr(outcomes, "cache_folder", lambda kind: tmp_path / kind)
    monkeypatch.setattr(checking, "is_small", lambda folder: False)
    detected: list[Decoders] = []
    own = selection._decoders

    def noted(*given: Any, **named: Any) -> Decoders:
        detected.append(own(*given, **named))
        return detected[-1]

    monkeypatch.setattr(selection, "_decoders", noted)

    def start(family: str, **settings: Any) -> tuple[LoadedModel, list[Decoders]]:
        detected.clear()
        return load_model(folder(family), "float32", **settings), list(detected)

    return start


def the_file(tmp_path: Path) -> Path:
    """The only file of a decoder."""
    [file] = (tmp_path / "checks").glob("*.decoder")
    return file


@pytest.mark.parametrize(
    ("family", "quantize"),
    [("gemma3", "none"), ("gemma3", "int8"), ("qwen3_next", "none"), ("qwen3_next", "int8"), ("llama_long", "none")],
)
def test_second_start_reads_the_decoder(start: Start, tmp_path: Path, family: str, quantize: str) -> None:
    """It equals the detected one, and refers to the weights of the second model."""
    first, [detected] = start(family, quantize=quantize)
    second, others = start(family, quantize=quantize)

    assert [] == others
    assert isinstance(second.runner, NativeRunner)
    read = DecoderFile(the_file(tmp_path), second.model).read()
    assert read is not None
    assert list(leaves(detected)) == list(leaves(read))
    own = {id(tensor) for tensor in (*second.model.parameters(), *second.model.buffers())}
    assert id(read[0].embedding) in own
    assert id(detected[0].embedding) not in own
    weights = [linear.weight for linear in linears(read[0])]
    assert all(id(weight) in own for weight in weights if isinstance(weight, nn.Parameter))


def test_decoder_of_other_values_is_detected(start: Start, tmp_path: Path) -> None:
    """The digest of a checkpoint samples its bytes, so the values of norms are compared."""
    loaded, [_] = start("gemma3")
    file = DecoderFile(the_file(tmp_path), loaded.model)
    assert file.read() is not None
    with torch.inference_mode():
        next(own for own in loaded.model.parameters() if own.dim() == 1)[0] += 1

    assert DecoderFile(the_file(tmp_path), loaded.model).read() is None


@pytest.mark.parametrize("damage", [b"", b"no decoder", None])
def test_damaged_file_is_replaced(start: Start, tmp_path: Path, damage: bytes | None) -> None:
    """The content is cut, foreign or of another length."""
    start("gemma3")
    file = the_file(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[:-1] if damage is None else damage)

    assert 1 == len(start("gemma3")[1])
    assert [] == start("gemma3")[1]


def test_file_with_other_classes_is_refused(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Even one with a right digest runs no code."""
    loaded, _ = start("gemma3")
    file = DecoderFile(the_file(tmp_path), loaded.model)
    content = pickle.dumps(print)
    the_file(tmp_path).write_bytes(file._digest + outcomes.hashlib.sha256(content).digest() + content)

    assert file.read() is None
    assert "builtins.print" in caplog.text


def leaves(value: Any) -> list[object]:
    """The values of nested dataclasses and tuples, tensors as their bytes."""
    if isinstance(value, Tensor):
        return [str(value.dtype), tuple(value.shape), value.detach().float().flatten().tolist()]
    if is_dataclass(value):
        return [type(value), *(leaf for field in fields(value) for leaf in leaves(getattr(value, field.name)))]
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, tuple) else [value]
