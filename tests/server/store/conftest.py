"""Every kind of database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.store.database import MEMORY, connect
from tests.server import postgres


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a PostgreSQL database."""
    if not postgres.installed():
        pytest.skip("there is no PostgreSQL here")
    pytest.importorskip("psycopg")
    with postgres.serving() as url:
        yield url


@pytest.fixture(params=["memory", "file", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Every kind of database, empty."""
    if request.param == "memory":
        return MEMORY
    if request.param == "file":
        return str(tmp_path / "folder" / "store.sqlite")
    url: str = request.getfixturevalue("url")
    database = connect(url)
    for table in ("items", "responses", "file_chunks", "files", "batch_results", "batches"):
        database.run(f"DROP TABLE IF EXISTS {table}")
    database.close()
    return url
