"""Simulated systems: what only Linux has is not used elsewhere."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.kernels import arena
from engine.load.machine import resources
from engine.load.machine.machine import find_gpus
from tests.house.source import ROOT


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS: no affinity mask, no advice for huge pages, no malloc_trim, and the suffix dylib."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    monkeypatch.setattr(ctypes, "CDLL", load_nothing)


def load_nothing(name: str | None, **_: object) -> SimpleNamespace:
    """The C library without functions of glibc; no file with a Linux name."""
    if name is not None and name.endswith(".so"):
        raise OSError(f"{name}: no such file")
    return SimpleNamespace()


@pytest.mark.usefixtures("macos")
def test_processors_and_memory_without_control_groups(tmp_path: Path) -> None:
    assert os.cpu_count() == resources.processor_count(tmp_path)
    assert resources.free_memory_bytes(tmp_path) is None
    assert () == find_gpus(tmp_path)
    resources.release_freed_memory()


@pytest.mark.usefixtures("macos")
def test_memory_of_weights_without_huge_pages() -> None:
    import torch

    assert (3, 5) == arena.Arena(64).allocate(torch.Size((3, 5)), torch.float32).shape


def test_windows_gets_one_sentence_at_every_command() -> None:
    """Also where the modules that Windows lacks cannot be imported."""
    # The libraries would look for parts of the real Windows.
    code = (
        "import asyncio, cyclopts.config, rich.progress, sys; sys.platform = 'win32'; "
        "sys.modules.update(dict.fromkeys(('fcntl', 'resource', 'pwd'))); from server.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "serve"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert 1 == done.returncode
    assert "Windows is not supported; run it in WSL" in done.stderr
    assert "Traceback" not in done.stderr
