"""Reads the tokenizer of a model from the files of a folder, or from the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.gguf.container import Metadata, read_metadata
from engine.gguf.tokenizer import read_tokenizer as read_gguf_tokenizer
from engine.load.checkpoint import is_gguf


def read_tokenizer(path: Path, metadata: Metadata | None = None) -> Any:
    """The tokenizer of a model's folder or GGUF file. Raises GgufError, and the errors of transformers.

    metadata  of the GGUF file if it has been read
    """
    if metadata is None and is_gguf(path):
        metadata = read_metadata(path)
    if metadata is not None:
        return read_gguf_tokenizer(metadata)
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
