"""The libraries of torch are loaded before its import."""

from __future__ import annotations

import sys

import pytest

from tests.engine.load.test_imports import run

PRELOAD = """
import sys
from pathlib import Path
from engine.load.preload import preload_torch
preload_torch().join()
print("libtorch_cpu.so" in Path("/proc/self/maps").read_text(), "torch" in sys.modules, "numpy" in sys.modules)
import torch
print((torch.ones(2, 3) @ torch.ones(3, 1)).tolist(), torch.get_num_threads() > 0)
"""

RACE = PRELOAD.replace(".join()", "")

MISSING = """
import importlib.util
from engine.load.preload import preload_torch
importlib.util.find_spec = lambda name: None
preload_torch().join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="library names of Linux")
def test_libraries_are_loaded_without_an_import() -> None:
    """torch computes with them."""
    assert ["True False False", "[[3.0], [3.0]] True"] == run(PRELOAD)


@pytest.mark.slow
def test_import_may_begin_at_the_same_time() -> None:
    assert "[[3.0], [3.0]] True" == run(RACE)[-1]


def test_missing_torch_is_left_to_its_import() -> None:
    assert [] == run(MISSING)
