"""What holds for all tests."""

import gc
import os
from pathlib import Path

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
