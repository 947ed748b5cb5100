"""A server with the bundled model, and folders of the user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.launch import cellar


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the bundled model."""
    log = tmp_path_factory.mktemp("server") / "log"
    with cellar(["--store", "none", "--threads", "1"], log) as base:
        yield base.removesuffix("/v1")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Variables for empty folders of the user; the cache folder has compiled kernels and stays."""
    folders = {name: str(tmp_path / name) for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    return {"XDG_CACHE_HOME": str(Path.home() / ".cache"), **folders}
