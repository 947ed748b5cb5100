"""Libraries of kernels for tests. Where there is none and no compiler there is nothing to test: a skip says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.kernels.cpu import build


def built(kernel: str, variant: str | None = None) -> Path:
    """The library of a kernel, by default of the fastest variant; without it the test is skipped, or the whole file."""
    if not build.variants(kernel):
        pytest.skip(f"this processor has no variant of {kernel}", allow_module_level=True)
    try:
        return build.library(kernel, variant)
    except build.LibraryUnavailable as error:
        pytest.skip(error.reason, allow_module_level=True)
