"""GGUF files without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gguf import GGUFWriter


def write_gguf(file: Path, numbers: Mapping[str, int], architecture: str = "llama") -> None:
    """Write a file with integers as its metadata."""
    writer = GGUFWriter(file, architecture)
    for key, value in numbers.items():
        writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
