"""Tiny models on disk, each written once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.load.load import LoadedModel
from engine.remote.zygote import Zygote
from tests.engine.kit.models import Reference, load_model, save_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny model."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda family: save_model(family, root / family))


@pytest.fixture(scope="session")
def loaded(folder: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    """A family's tiny model as the engine loads it, in float64 by default."""
    return cache(lambda family, dtype="float64": load_model(folder(family), dtype))


@pytest.fixture(scope="session")
def reference(folder: Callable[[str], Path]) -> Callable[..., Reference]:
    """A family's tiny model in transformers."""
    return cache(lambda family, dtype="float64": Reference(folder(family), getattr(torch, dtype)))


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks the workers of tests."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch and the kernels use one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
