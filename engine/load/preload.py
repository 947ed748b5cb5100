"""Loads torch's shared libraries while other modules are imported. Imports neither torch nor transformers."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from contextlib import suppress
from pathlib import Path

# Rounds that a waiting OpenMP thread spins before it sleeps. A step with two threads on busy cores (measured): 451 ms
# with libgomp's default of 300,000 rounds, 67 ms with 20,000, 13 ms with 2,000, 8 ms with 0 or 200.
SPIN_COUNT = "1000"
# In the order and with the visibility of the import of torch.
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch_python.so", os.RTLD_LOCAL))


def limit_spinning() -> None:
    """Limit the spinning of waiting OpenMP threads, unless the user has set it. Call before the import of torch.

    On a busy machine a spinning thread takes the processor from the thread that it waits for.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


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
