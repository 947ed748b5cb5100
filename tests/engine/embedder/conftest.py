"""Tiny embedding models on disk, written once a session, and one thread for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.engine.embedder.folders import save_embedder


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """One thread: tensors are small."""


@pytest.fixture(scope="session")
def embedder_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind of tiny embedding model."""
    root = tmp_path_factory.mktemp("embedders")
    return cache(lambda kind: save_embedder(kind, root / kind))
