"""Imports torch without its kernels in Python for the meta device, until they are needed.

They are imported by torch for the shapes of compiled models; Cellar constructs models on the meta device with the few
kernels in C++, and imports the others where one is missing. Measured: 0.3 s of the 1.15 s of processor time of the
import of torch, and 18 MiB.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

# It registers the kernels, and imports the other modules in an order that works.
_KERNELS = "torch._meta_registrations"
_USED_BY_IT = ("torch._decomp", "torch._prims", "torch._refs")
_LOCK = threading.RLock()


class _Deferred(ModuleType):
    """In place of a module: its first use imports the kernels. It has no `__path__` until then."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        import_meta_kernels()
        return getattr(importlib.import_module(self.__name__), name)


def import_torch() -> None:
    """Import torch without the kernels; no effect if it is imported already."""
    if "torch" in sys.modules:
        return
    sys.modules[_KERNELS] = _Deferred(_KERNELS)
    torch = importlib.import_module("torch")
    if any(name in sys.modules for name in _USED_BY_IT):
        import_meta_kernels()
        return
    for name in _USED_BY_IT:
        # Also an attribute, as after an import: torch.broadcast_shapes reads torch._refs.
        sys.modules[name] = module = _Deferred(name)
        setattr(torch, name.removeprefix("torch."), module)
    _complete_generators(torch)


def import_meta_kernels() -> None:
    """Import the kernels if `import_torch` has left them out: models run on the meta device after it."""
    with _LOCK:
        if not isinstance(sys.modules.get(_KERNELS), _Deferred):
            return
        for name in (_KERNELS, *_USED_BY_IT):
            if isinstance(sys.modules.get(name), _Deferred):
                del sys.modules[name]
        importlib.import_module(_KERNELS)


def _complete_generators(torch: ModuleType) -> None:
    """Set the class of torch.Generator, which torch 2.13 does in one of these modules; without it there are none."""
    set_class = getattr(torch._C, "_set_generator_metaclass", None)
    if set_class is not None:
        set_class(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
