"""A disk that other programs fill: stored responses and files can be deleted, and the freed space is used again."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from server.store.database import RESERVE_BYTES, StoreError, StoreFullError, connect
from server.store.worker import DatabaseWorker
from tests.house.source import ROOT

MOUNT = "mount -t tmpfs -o size=40m disk"
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


def test_a_full_disk_is_emptied(tmp_path: Path) -> None:
    """Nothing more is stored on it; all can be cancelled and deleted, then as much is stored again; also at a start."""
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, f"{MOUNT} {tmp_path}"], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    command = f"{MOUNT} {tmp_path} && exec {sys.executable} -m tests.server.store.full_disk {tmp_path}"
    done = subprocess.run([*UNSHARE, command], check=True, capture_output=True, cwd=ROOT, timeout=60)

    assert {
        "upload": "full",
        "cancel": True,
        "deleted": [True, True],
        "put": None,
        "deleted then": [True, True],
        "restarted": [True, True],
        "upload after all": True,
    } == json.loads(done.stdout)


def test_a_reserve_is_kept_for_deletions(tmp_path: Path) -> None:
    """It is private, released by work that frees space and finds the disk full, and kept again after that."""
    place = tmp_path / "store.sqlite"
    reserve = tmp_path / "store.sqlite-reserve"
    worker = DatabaseWorker(str(place), ())
    attempts: list[bool] = []

    def work(database: object) -> None:
        attempts.append(reserve.exists())
        if reserve.exists():
            raise StoreFullError("full")

    async def run(*, frees: bool) -> None:
        await worker.run(work, frees=frees)

    async def story() -> None:
        with pytest.raises(StoreFullError):
            await run(frees=False)
        assert (RESERVE_BYTES, 0o600) == (reserve.stat().st_size, reserve.stat().st_mode & 0o777)
        await run(frees=True)

    asyncio.run(story())
    worker.close()
    assert [True, True, True, False] == attempts
    assert reserve.exists()


def test_a_full_database_is_an_error_of_its_own(tmp_path: Path) -> None:
    """SQLite's other errors are not."""
    database = connect(str(tmp_path / "store.sqlite"))
    database.run("CREATE TABLE things (id BLOB)")
    database.run("PRAGMA max_page_count = 3")
    with pytest.raises(StoreFullError):
        database.run("INSERT INTO things VALUES (?)", [bytes(100_000)])
    with pytest.raises(StoreError) as other:
        database.run("INSERT INTO nothing VALUES (1)")
    database.close()

    assert StoreError is other.type
