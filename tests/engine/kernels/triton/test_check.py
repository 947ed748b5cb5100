"""The choice of the Triton kernels on a GPU, their check at load, and the fallback to torch."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator

import pytest
import torch

from engine.kernels import dispatch, reference
from engine.kernels.cell_kernels import CellKernels, KernelUnavailable
from tests.engine.kernels.triton.interpreter import DEVICE, HALF, SMALL, TritonKernels, check
from tests.selection import quick

SINGLE = torch.float32


@pytest.fixture(autouse=True)
def small_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A check of few blocks; no kernel is selected before or after the test."""
    monkeypatch.setattr(check, "_BATCH", ((1, 66), (17, 0)))
    monkeypatch.setattr(check, "TritonKernels", lambda tiling: TritonKernels(SMALL))
    dispatch.device_attention.cache_clear()
    yield
    dispatch.device_attention.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), quick([(SINGLE, SINGLE)], [(SINGLE, SINGLE), (HALF, HALF), (HALF, torch.int8)])
)
def test_kernels_pass_their_check(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    assert isinstance(check.checked_kernels(dtype, kv_dtype, DEVICE), CellKernels)


@pytest.mark.parametrize("factor", quick([math.nan], [1.1, math.nan]))
def test_wrong_output_is_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TritonKernels.__call__
    monkeypatch.setattr(TritonKernels, "__call__", lambda *given, **more: right(*given, **more) * factor)

    with pytest.raises(KernelUnavailable, match="its output differs by"):
        check.checked_kernels(SINGLE, SINGLE, DEVICE)


def test_torch_attends_where_a_kernel_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One log line gives the reason, however many models are loaded."""

    def fail(*given: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    monkeypatch.setattr(check, "_largest_error", fail)
    with caplog.at_level(logging.WARNING, "cellar.engine"):
        chosen = [dispatch.attention_kernel(HALF, HALF, "cuda:0") for _ in range(2)]

    assert [reference.attend] * 2 == chosen
    slower = "attention on cuda:0 is several times slower, in torch instead of Triton"
    assert [f"{slower}: RuntimeError: Failed to find C compiler."] == caplog.messages


def test_torch_attends_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "engine.kernels.triton.check", None)
    with caplog.at_level(logging.WARNING, "cellar.engine"):
        assert dispatch.attention_kernel(HALF, HALF, "cuda") is reference.attend
    assert ["in torch instead of Triton" in line for line in caplog.messages] == [True]


def test_triton_is_for_gpus_alone() -> None:
    assert not isinstance(dispatch.attention_kernel(SINGLE, SINGLE, "cpu"), CellKernels)
    assert dispatch.attention_kernel(SINGLE, SINGLE, "fake:0") is reference.attend
    assert dispatch.attention_kernel(torch.float64, torch.float64, "cuda") is reference.attend
