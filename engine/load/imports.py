"""Imports torch and transformers without the parts of torch for compilation and distributed runs, and without a scan of
the models of transformers (import_structure.py).

transformers imports torch._dynamo for decorators of compiled models, and torch.distributed.tensor for isinstance
checks; both import sympy, 880 modules in all. Measured: 0.9 s of the 2.9 s of the engine's imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.load.import_structure import install_stored_structure
from engine.load.meta_kernels import import_meta_kernels, import_torch

_DYNAMO = "torch._dynamo"
# Imported for every model (transformers.masking_utils) without use of the package.
_SUBMODULE = f"{_DYNAMO}._trace_wrapped_higher_order_op"
_MODELS = "transformers.models"
_LOCK = threading.RLock()


class _LazyDynamo(ModuleType):
    """torch._dynamo, executed at the first use of anything but its decorators. It has no `__path__` until then."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        # Another thread waits until the package is complete, as at an import.
        with _LOCK:
            if type(self) is _LazyDynamo:
                _execute(self)
        return getattr(self, name)


def import_transformers(*, distributed: bool = False) -> None:
    """Import torch and the base of transformers; call it before any other module imports them.

    distributed  with the parts for distributed runs, which tensor parallelism requires

    Has no effect if torch._dynamo is imported already.
    """
    if not distributed:
        import_torch()
    if _DYNAMO not in sys.modules:
        _install_lazy_dynamo()
    install_stored_structure()
    if not distributed:
        _without_distributed()
    if _MODELS not in sys.modules:
        _import_models()
    importlib.import_module("transformers.modeling_utils")


def _install_lazy_dynamo() -> None:
    spec = importlib.util.find_spec(_DYNAMO)
    assert spec is not None, "torch has its compiler"
    module = sys.modules[_DYNAMO] = importlib.util.module_from_spec(spec)
    for decorator in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(module, decorator, _unchanged)
    importlib.import_module(_SUBMODULE)
    # Without `__path__` the import of any other submodule executes the package first.
    del module.__path__
    module.__class__ = _LazyDynamo


def _execute(module: ModuleType) -> None:
    """Execute a package as its first import does."""
    import_meta_kernels()
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    assert spec.submodule_search_locations is not None
    module.__class__ = ModuleType
    module.__path__ = spec.submodule_search_locations
    spec.loader.exec_module(module)


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments, that returns the function unchanged."""
    return _unchanged if function is None else function


def _without_distributed() -> None:
    """Make transformers detect no torch.distributed, as with builds of torch that lack it."""
    import torch
    from transformers.utils import is_torch_distributed_available

    available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        # transformers caches the first result.
        is_torch_distributed_available()
    finally:
        torch.distributed.is_available = available


def _import_models() -> None:
    """Import transformers.models with the classes that transformers has listed already; a second scan of 2,500 files
    takes 0.2 s.
    """
    from transformers.utils import import_utils

    find, classes = import_utils.define_import_structure, model_classes()
    import_utils.define_import_structure = lambda path: classes
    try:
        importlib.import_module(_MODELS)
    finally:
        import_utils.define_import_structure = find


def model_classes() -> dict[frozenset[str], dict[str, set[str]]]:
    """Names of model classes by their requirements and modules, in the form of transformers.models."""
    import transformers
    from transformers.utils.import_utils import define_import_structure

    # transformers makes the same call, so its result is cached.
    found = define_import_structure(Path(transformers.__file__).parent / "models", prefix="models")
    return {required: _inside_models(modules) for required, modules in found.items()}


def _inside_models(modules: dict[str, set[str]]) -> dict[str, set[str]]:
    prefix = "models."
    return {name.removeprefix(prefix): own for name, own in modules.items() if name.startswith(prefix)}
