"""What holds for all tests."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from bench.launch import cellar
from engine.load.machine.resources import limit_spinning

# Modules and collected tests live to the end: the collector would visit their two million objects again and again.
gc.disable()

# Two threads on a busy machine would wait for each other for minutes. The processes that tests start inherit it.
limit_spinning()
if not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd")):
    # Without a GPU Triton's kernels are interpreted; Triton, which transformers imports, reads it when imported.
    os.environ["TRITON_INTERPRET"] = "1"

# On a busy machine an example takes any time.
hypothesis.settings.register_profile("cellar", deadline=None)
hypothesis.settings.load_profile("cellar")


def pytest_collection_finish() -> None:
    gc.freeze()
    # Tests leave few cycles: collections of all objects would be 5 % of the run.
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


@pytest.fixture(scope="session")
def bundled_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server process with the bundled model and a store."""
    folder = tmp_path_factory.mktemp("server")
    with cellar(["--store", str(folder / "store.sqlite"), "--threads", "1"], folder / "log") as base:
        yield base.removesuffix("/v1")


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

    from engine.load.machine.device import no_gpu_reason

    if not torch.cuda.is_available():
        pytest.skip(no_gpu_reason())
