"""Kinds of files by their first bytes."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from PIL import Image
from safetensors.torch import save_file

from engine.load.read.file_kind import file_kind


def zipped() -> bytes:
    """A zip archive."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("config.json", "{}")
    return target.getvalue()


def tarred() -> bytes:
    """A tar archive."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("config.json"))
    return target.getvalue()


def saved(*, new_format: bool) -> bytes:
    """PyTorch weights."""
    target = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, target, _use_new_zipfile_serialization=new_format)
    return target.getvalue()


def image(kind: str) -> bytes:
    """An image of one pixel."""
    target = io.BytesIO()
    Image.new("RGB", (1, 1)).save(target, kind)
    return target.getvalue()


def array() -> bytes:
    """An array of NumPy."""
    target = io.BytesIO()
    np.save(target, np.zeros(2))
    return target.getvalue()


ONNX = b"\x08\x08\x12\x07pytorch\x1a\x052.9.0:\xd3\x01\n"


KINDS = [
    (b"", "an empty file"),
    (zipped(), "a zip archive: unpack it"),
    (tarred(), "a tar archive: unpack it"),
    (gzip.compress(b"{}"), "a gzip archive: unpack it"),
    (saved(new_format=True), "PyTorch weights in Python's pickle format, which can run code"),
    (saved(new_format=False), "PyTorch weights in Python's pickle format, which can run code"),
    (pickle.dumps({"a": 1}), "PyTorch weights in Python's pickle format, which can run code"),
    (image("PNG"), "a PNG image"),
    (image("JPEG"), "a JPEG image"),
    (image("GIF"), "a GIF image"),
    (image("WEBP"), "a WebP image"),
    (array(), "a NumPy array"),
    (ONNX, "an ONNX model"),
    (b"tjgg\x03\0\0\0", "a GGML file from before GGUF"),
    (b"%PDF-1.7\n", "a PDF document"),
    (b"\n<!DOCTYPE html><html>", "an HTML page, such as the answer to a failed download"),
    (
        b"version https://git-lfs.example/spec/v1\noid sha256:0\n",
        "a Git LFS pointer in place of the file: run git lfs pull",
    ),
    (b'{"model_type": "llama"}', "a JSON file"),
    ("Ein Text über Modelle".encode(), "a text file"),
    ("ü".encode() * 1000, "a text file"),
    (b"x" + "ü".encode() * 1000, "a text file"),
    (b"\x00\x01\x02\x03", "a file of an unknown kind"),
    (bytes(range(128, 256)), "a file of an unknown kind"),
]


# Contents have times, so they cannot be the names of tests.
@pytest.mark.parametrize(("content", "kind"), KINDS, ids=[f"{number}-{kind}" for number, (_, kind) in enumerate(KINDS)])
def test_kind_is_named(content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)

    assert kind == file_kind(tmp_path / "file")


def test_models_are_named(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.close()

    assert "a safetensors file" == file_kind(tmp_path / "model.safetensors")
    assert "a GGUF file" == file_kind(tmp_path / "model.gguf")
