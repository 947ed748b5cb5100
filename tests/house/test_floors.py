"""Imports go down: server > engine > kvcache, and no module imports another that needs it."""

from __future__ import annotations

import sys
from graphlib import TopologicalSorter

import pytest

from tests.house.source import PACKAGES, Source, imports, sources

# What each package never imports, whatever for.
FOREIGN = {
    "engine": {"server", "fastapi", "pydantic", "starlette", "uvicorn", "sse_starlette", "prometheus_client"},
    "server": {"torch", "transformers", "numpy", "safetensors", "huggingface_hub", "kvcache"},
}
KVCACHE_IMPORTS = {"torch", "numpy", "safetensors", "kvcache", *sys.stdlib_module_names}


def is_package_file(source: Source) -> bool:
    """Whether a file is an __init__.py."""
    return source.path.name == "__init__.py"


def top_level(source: Source) -> set[str]:
    """Top-level packages that a file imports, for annotations too."""
    return {name.split(".")[0] for name in imports(source, types=True)}


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_of_a_package_import_without_cycles(package: str) -> None:
    """The imports inside a package have an order from the ground up; a cycle is an error that names its modules."""
    within = {source.name: set(imports(source, types=False)) for source in sources(package)}

    order = list(TopologicalSorter(within).static_order())

    assert set(within) <= set(order)


def test_package_files_import_nothing_of_ours() -> None:
    """An __init__.py imports no module of the three packages."""
    files = [source for source in sources() if is_package_file(source)]

    assert {source.label: top_level(source) & set(PACKAGES) for source in files} == {
        source.label: set() for source in files
    }


def test_kvcache_imports_torch_numpy_and_the_library() -> None:
    """The lowest package knows no request, text or model code."""
    extra = {source.label: top_level(source) - KVCACHE_IMPORTS for source in sources("kvcache")}

    assert {label: names for label, names in extra.items() if names} == {}


def test_engine_knows_no_http_and_server_no_tensor() -> None:
    """Not even for an annotation."""
    found = {source.label: top_level(source) & FOREIGN[source.package] for source in sources("engine", "server")}

    assert {label: names for label, names in found.items() if names} == {}
