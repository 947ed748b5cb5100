"""What holds for all tests."""

import gc
import os
from pathlib import Path

import pytest

from engine.load.preload import limit_spinning

# Modules and collected tests live to the end: the collector would visit their two million objects again and again.
gc.disable()

# Two threads on a busy machine would wait for each other for minutes. The processes that tests start inherit it.
limit_spinning()
if not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd")):
    # Without a GPU Triton's kernels are interpreted; Triton, which transformers imports, reads it when imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, and a GPU; tests on it are skipped where torch can use none."""
    if request.param == "cuda":
        skip_without_gpu()
    return str(request.param)


def skip_without_gpu() -> None:
    """Skip a test where torch can use no GPU."""
    # Most tests need no torch.
    import torch

    from engine.load.device import no_gpu_reason

    if not torch.cuda.is_available():
        pytest.skip(no_gpu_reason())
