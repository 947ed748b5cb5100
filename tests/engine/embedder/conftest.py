"""Tiny embedding models on disk, each written once a session, and one thread for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.embedder.folders import save_embedder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: more threads than one only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def embedder_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind of tiny embedding model."""
    root = tmp_path_factory.mktemp("embedders")
    return cache(lambda kind: save_embedder(kind, root / kind))
