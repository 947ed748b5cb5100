"""One thread: tensors are too small to be divided."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Each test computes on one thread."""
