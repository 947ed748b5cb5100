"""The stores of files and batches: leases, results and limits, the same in SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from server.store.batches import LEASE_SECONDS, BatchStore
from server.store.files import FileStore, StorageFullError, StoredFile


class Clock:
    """A clock that the test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def content(*chunks: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    """The chunks of an upload, which may break off."""
    for chunk in chunks:
        yield chunk
    if error is not None:
        raise error


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_one_server_has_a_batch_at_a_time(tmp_path: Path) -> None:
    """The other one gets it when the lease has expired or is released; then the first one cannot write it."""
    clock, place = Clock(), str(tmp_path / "store.sqlite")
    first, second = BatchStore("first", place, clock), BatchStore("second", place, clock)

    async def work() -> None:
        await first.create("batch", "", b"new")
        assert ["batch"] == [one.id for one in await first.claim()]
        assert [] == await second.claim()
        clock.now += LEASE_SECONDS / 2
        assert await first.renew("batch") is not None
        clock.now += LEASE_SECONDS / 2 + 1
        assert [] == await second.claim()
        clock.now += LEASE_SECONDS
        assert ["batch"] == [one.id for one in await second.claim()]
        assert await first.renew("batch") is None
        assert not await first.save("batch", b"late", final=True)
        await second.release("batch")
        assert ["batch"] == [one.id for one in await first.claim()]
        assert await first.save("batch", b"done", final=True)
        clock.now += 2 * LEASE_SECONDS
        assert [] == await second.claim()
        found = await second.get("batch", "")
        assert found is not None
        assert (b"done", True) == (found.body, found.final)

    run(work())
    first.close()
    second.close()


def test_a_line_has_one_result(place: str) -> None:
    """Results come in the order of the lines, failed ones apart."""
    store = BatchStore("holder", place)

    async def work() -> None:
        await store.create("batch", "owner", b"")
        for line in (2, 1, 250, *range(3, 240)):
            await store.add_result("batch", line, b"%d" % line, failed=line == 250)
        await store.add_result("batch", 1, b"again", failed=False)
        assert (239, 1) == await store.count("batch")
        assert [b"%d" % line for line in range(1, 240)] == [one async for one in store.results("batch", failed=False)]
        assert [b"250"] == [one async for one in store.results("batch", failed=True)]
        assert {*range(1, 240), 250} == await store.finished_lines("batch")
        assert await store.get("batch", "other") is None
        assert [] == await store.all("other")
        assert ["batch"] == [one.id for one in await store.all("owner")]
        assert 1 == await store.count_open("owner")

    run(work())
    store.close()


def test_a_cancellation_reaches_the_server_that_runs_the_batch(place: str) -> None:
    """Only the owner can cancel, and only a batch that is not final."""
    store = BatchStore("holder", place, Clock())

    async def work() -> None:
        await store.create("batch", "owner", b"")
        assert await store.cancel("batch", "other") is None
        await store.claim()
        assert await store.cancel("batch", "owner") is not None
        renewed = await store.renew("batch")
        assert renewed is not None
        assert 1000 == renewed.cancelling
        await store.save("batch", b"", final=True)
        assert await store.cancel("batch", "owner") is None

    run(work())
    store.close()


def test_files_have_chunks_and_an_expiry(place: str) -> None:
    """A file with the id of another one replaces it."""
    clock = Clock()
    store = FileStore(place, 1000, clock)

    async def work() -> None:
        file = StoredFile("file", "owner", "batch", "name", 1000, expires=2000)
        assert 3 == (await store.create(file, content(b"ab", b"c"))).bytes
        assert 2 == (await store.create(file, content(b"de"))).bytes
        assert [b"de"] == [chunk async for chunk in store.chunks("file")]
        assert await store.get("file", "other") is None
        assert not await store.delete("file", "other")
        clock.now = 2000
        assert await store.get("file", "owner") is None
        assert [] == await store.all("owner")

    run(work())
    store.close()


def test_a_broken_or_too_large_upload_leaves_nothing(place: str) -> None:
    """The limit is on the bytes of all files."""
    store = FileStore(place, 1000)

    async def work() -> None:
        await store.create(StoredFile("first", "", "batch", "name", 1), content(b"x" * 600))
        with pytest.raises(StorageFullError):
            await store.create(StoredFile("second", "", "batch", "name", 1), content(b"x" * 300, b"x" * 300))
        with pytest.raises(ConnectionError):
            await store.create(StoredFile("third", "", "batch", "name", 1), content(b"x", error=ConnectionError()))
        assert ["first"] == [file.id for file in await store.all("")]
        assert [] == [chunk async for chunk in store.chunks("second")]
        fourth, fifth = (
            store.create(StoredFile(id, "", "batch", "name", int(time.time())), content(b"x" * 150, b"x" * 150))
            for id in ("fourth", "fifth")
        )
        at_once = await asyncio.gather(fourth, fifth, return_exceptions=True)
        assert any(isinstance(one, StorageFullError) for one in at_once)
        await store.create(StoredFile("sixth", "", "batch", "name", 1), content(b"x" * 100))

    run(work())
    store.close()
