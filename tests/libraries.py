"""Libraries of kernels for tests. Where there is none and no compiler there is nothing to test: a skip says why.

    python -m tests.libraries

compiles the kernels of the tests that are not slow, two at a time, so that no two tests compile the same one.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from engine.kernels.cpu.build import libraries

# `make test` compiles the variants for other processors without most optimisations, in a third of the time.
OTHER_FLAGS = ("-O1",) if os.environ.get("QUICK_KERNELS") else ()
# Variants for other processors that take few seconds to compile: their tests are not slow.
QUICK = {"attention": ("avx2",), "linear": ("dotprod", "neon"), "step": ()}


def built(kernel: str, variant: str | None = None) -> Path:
    """The library of a kernel, by default of the fastest variant; without it the test is skipped, or the whole file."""
    if not libraries.variants(kernel):
        pytest.skip(f"this processor has no variant of {kernel}", allow_module_level=True)
    try:
        return compiled(kernel, variant)
    except libraries.LibraryUnavailable as error:
        pytest.skip(error.reason, allow_module_level=True)


def compiled(kernel: str, variant: str | None = None) -> Path:
    """The library of a kernel, by default of the fastest variant. Raises LibraryUnavailable."""
    is_fastest = variant in (None, libraries.variants(kernel)[0])
    return libraries.library(kernel, variant, flags=() if is_fastest else OTHER_FLAGS)


def every_variant(kernel: str, *, generic: bool = True) -> list[ParameterSet]:
    """The variants of a kernel as parameters of a test: slow are all but the fastest and QUICK ones."""
    return [
        pytest.param(name, marks=[] if name in quick_variants(kernel) else pytest.mark.slow)
        for name in libraries.variants(kernel)
        if generic or name != "generic"
    ]


def quick_variants(kernel: str) -> list[str]:
    """The fastest variant of a kernel and the QUICK ones."""
    return [name for at, name in enumerate(libraries.variants(kernel)) if at == 0 or name in QUICK[kernel]]


def compile_quick_variants() -> None:
    """Compile two at a time, the slowest first. Raises LibraryUnavailable."""
    chosen = [(kernel, name) for kernel in ("step", "linear", "attention") for name in quick_variants(kernel)]
    with ThreadPoolExecutor(2) as pool:
        [*pool.map(lambda one: compiled(*one), chosen)]


if __name__ == "__main__":
    try:
        compile_quick_variants()
    except libraries.LibraryUnavailable as error:
        print(f"cellar: tests without compiled kernels: {error.reason}")
