"""Two server processes with one store: nothing is lost, and each reads the records of the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import postgres

RECORDS = 100
# Stores records, reads those of the other process as they appear, and renews leases; any StoreError ends it.
PROGRAM = f"""
import asyncio, sys
from server.store.store import Record, ResponseStore

async def work(location, own, other):
    store = ResponseStore(location)
    seen = set()
    for number in range({RECORDS}):
        previous = f"{{own}}-{{number - 1}}" if number else None
        id = f"{{own}}-{{number}}"
        await store.put(Record(id, previous, number % 2 == 0, b"body", b"input", (f"item-{{number}}",)))
        await store.renew_leases([id])
        if (record := await store.get(f"{{other}}-{{len(seen)}}")) is not None:
            assert record.body == b"body" and not record.lease_expired
            seen.add(record.id)
    async with asyncio.timeout(60):
        while await store.get(f"{{other}}-{RECORDS - 1}") is None:
            await asyncio.sleep(0.02)
    for name in (own, other):
        assert {RECORDS} == len(await store.history(f"{{name}}-{RECORDS - 1}"))
    assert {{f"a-7", f"b-7"}} & {{record.id for record in await store.find_by_items(["item-7"])}}
    store.close()

asyncio.run(work(*sys.argv[1:]))
"""


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that does not exist yet."""
    if request.param == "sqlite":
        yield str(tmp_path / "data" / "responses.sqlite")
    else:
        if not postgres.installed():
            pytest.skip("needs PostgreSQL")
        with postgres.serving() as url:
            yield url


def test_two_processes_share_a_store(location: str) -> None:
    """Both create it, write at the same time, and find all records in the end."""
    names = (("a", "b"), ("b", "a"))
    running = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, location, *each], stderr=subprocess.PIPE, text=True)
        for each in names
    ]

    assert [(0, ""), (0, "")] == [
        (process.communicate(timeout=120)[1], process.returncode)[::-1] for process in running
    ]
