"""What an engine says whose model runs natively: what transformers says, and the same in any company."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu import build
from engine.load import Loaded
from engine.native.runner import NativeRunner
from tests.engine.models import Reference, load_model
from tests.engine.speculated import Case, differences
from tests.engine.test_oracle import run

try:
    build.library("step", next(iter(build.variants("step"))))
except (build.NoLibrary, StopIteration) as error:
    pytest.skip(str(error), allow_module_level=True)

Folder = Callable[[str], Path]


@pytest.fixture
def natively(folder: Folder) -> Callable[..., Loaded]:
    """A family's tiny model in float32, quantised if need be, and known to run natively."""

    @cache
    def load(family: str, dtype: str = "float32", quantize: str = "none") -> Loaded:
        loaded = load_model(folder(family), dtype, quantize=quantize, threads=1)
        assert isinstance(loaded.runner, NativeRunner)
        return loaded

    return load


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_any_mix_says_what_generate_says_alone(natively: Callable[..., Loaded], folder: Folder, family: str) -> None:
    """Chunks, copies of prefixes and single rows of many sequences: tokens differ from transformers' at ties only."""
    references = cache(lambda name, dtype: Reference(folder(name), getattr(torch, dtype)))

    assert 40 < run(natively, references, family, range(4000, 4003), "float32")


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("case", [Case("partly", "full", 8, 7, "preempt"), Case("lookup", "full", 3, 64, "cancel")])
def test_drafts_and_company_change_no_token(natively: Callable[..., Loaded], case: Case, quantize: str) -> None:
    """Drawn in any way, in float32 and quantised: there are no ties to excuse, for rows are the same bit for bit."""
    assert [] == differences(case, lambda family: natively(family, "float32", quantize))
