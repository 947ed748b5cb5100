"""Where the server is. Without one, as in `make test`, nothing is collected: the packages are not there either."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

URL = os.environ.get("CELLAR_CLIENTS_URL")
collect_ignore_glob = [] if URL else [f"{path.name}/*" for path in Path(__file__).parent.iterdir() if path.is_dir()]


@pytest.fixture(scope="session")
def server() -> Any:
    """Started by tests/clients/__main__.py."""
    from subject import Server

    assert URL is not None
    return Server(URL, *(os.environ[f"CELLAR_CLIENTS_{name}"] for name in ("KEY", "MODEL", "FOLDER")))


@pytest.fixture(scope="session")
def weather_schema() -> dict[str, Any]:
    """The parameters of the one tool that all clients offer."""
    return {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
        "additionalProperties": False,
    }
