"""A server with the bundled model, and folders of the user."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def url(bundled_url: str) -> str:
    """The address of a server with the bundled model."""
    return bundled_url


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Variables for empty folders of the user; the cache folder has compiled kernels and stays."""
    folders = {name: str(tmp_path / name) for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    return {"XDG_CACHE_HOME": str(Path.home() / ".cache"), **folders}
