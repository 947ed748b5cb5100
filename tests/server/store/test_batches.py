"""The stores of files and batches: leases, results and limits, the same in SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from server.store import batches
from server.store.batches import LEASE_SECONDS, BatchStore
from server.store.files import FileStore, StorageFullError, StoredFile
from tests.server.store.test_store import Clock


async def content(*chunks: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    """The chunks of an upload, which may break off."""
    for chunk in chunks:
        yield chunk
    if error is not None:
        raise error


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@pytest.mark.parametrize("years", [10, -10])
def test_a_clock_that_jumped_keeps_no_batch_from_the_next_server(tmp_path: Path, years: int) -> None:
    """The server that had it ended; the next one has its own lease again."""
    clock, place = Clock(), str(tmp_path / "store.sqlite")
    first, second = BatchStore("first", place, clock), BatchStore("second", place, clock)

    async def work() -> None:
        await first.create("batch", "", b"new")
        assert ["batch"] == [one.id for one in await first.claim()]
        clock.now += years * 365 * 86400
        assert ["batch"] == [one.id for one in await second.claim()]
        assert [] == await first.claim()

    run(work())


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
        assert [] == await store.page("other", 9)
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
        assert [] == await store.page("owner", 9)

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
        assert ["first"] == [file.id for file in await store.page("", 9) or ()]
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


@pytest.mark.parametrize("ascending", [True, False])
def test_pages_of_files_are_those_of_the_whole_list(place: str, ascending: bool) -> None:
    """By time and id, also where times are equal; an `after` that is no id of the list is None."""
    store = FileStore(place, 1000, Clock())

    async def work() -> None:
        for number in range(7):
            purpose = "batch_output" if number % 3 == 2 else "batch"
            await store.create(StoredFile(f"f{number}", "owner", purpose, "", 1 + number // 3), content(b""))
        await store.create(StoredFile("other", "other", "batch", "", 1), content(b""))
        for wanted, numbers in ((None, range(7)), ("batch", (0, 1, 3, 4, 6))):
            ids = [f"f{number}" for number in numbers]
            found: list[str] = []
            while page := await store.page("owner", 2, *found[-1:], purpose=wanted, ascending=ascending):
                found += [file.id for file in page]
            assert (ids if ascending else ids[::-1]) == found
        for after, owner in (("none", "owner"), ("other", "owner"), ("f2", "owner")):
            assert await store.page(owner, 2, after, purpose="batch") is None
        assert (7, 1) == (await store.count("owner"), await store.count("other"))

    run(work())
    store.close()


def test_pages_of_batches_are_those_of_the_whole_list(place: str) -> None:
    """Latest first, also where times are equal."""
    clock = Clock()
    store = BatchStore("holder", place, clock)

    async def work() -> None:
        for number in range(7):
            clock.now = 1000 + number // 3
            await store.create(f"b{number}", "owner", b"")
        await store.create("other", "other", b"")
        found: list[str] = []
        while page := await store.page("owner", 2, *found[-1:]):
            assert len(page) <= 2
            found += [one.id for one in page]
        assert [f"b{number}" for number in reversed(range(7))] == found
        assert await store.page("owner", 2, "other") is None

    run(work())
    store.close()


def test_the_oldest_final_batches_of_an_owner_are_deleted(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are not final, and those of other owners, stay."""
    monkeypatch.setattr(batches, "MAX_BATCHES", 3)
    clock = Clock()
    store = BatchStore("holder", place, clock)

    async def work() -> None:
        for number in range(8):
            clock.now += 1
            owner = "other" if number == 0 else "owner"
            await store.create(f"b{number}", owner, b"")
            await store.claim()
            if number != 1:
                await store.save(f"b{number}", b"", final=True)
        found = {owner: [one.id for one in await store.page(owner, 9) or ()] for owner in ("owner", "other")}
        assert {"owner": ["b7", "b6", "b5", "b1"], "other": ["b0"]} == found

    run(work())
    store.close()
