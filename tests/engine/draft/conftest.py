"""Small tensors: more threads than one only wait for each other."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Each test computes on one thread."""
