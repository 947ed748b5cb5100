"""The store of responses: round trips and limits, the same in SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import stat
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from server.store.database import MEMORY, StoreError, connect
from server.store.store import (
    LEASE_SECONDS,
    Record,
    ResponseStore,
    RetentionLimits,
    check_store,
    default_location,
    describe_location,
    open_store,
)

Result = TypeVar("Result")


class Clock:
    """A clock that the test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(id: str, previous: str | None = None, **changes: object) -> Record:
    """A final record with its id as its body."""
    made = {"final": True, "body": id.encode(), "input": b"[]", **changes}
    return Record(id, previous, **made)  # type: ignore[arg-type]


def using(store: ResponseStore, work: Callable[[ResponseStore], Awaitable[Result]]) -> Result:
    """Run `work` in an event loop and close the store."""

    async def worked() -> Result:
        try:
            return await work(store)
        finally:
            store.close()

    return asyncio.run(worked())


def test_a_record_is_read_as_stored(place: str) -> None:
    """All bytes, the previous id and the events; a missing record is None."""

    async def work(store: ResponseStore) -> None:
        one = record("b", "a", body=bytes(range(256)) * 20, input="[\u2028]".encode(), items=("i", "j"))
        await store.put(one, b"event")

        kept = await store.get("b")
        assert kept is not None
        assert (one.body, one.input, "a", True, False) == (
            kept.body,
            kept.input,
            kept.previous,
            kept.final,
            kept.lease_expired,
        )
        assert b"event" == await store.events("b")
        assert (None, b"") == (await store.get("x"), await store.events("x"))

    using(ResponseStore(place), work)


def test_a_final_record_is_not_replaced(place: str) -> None:
    """A record in progress is replaced, a final one is not; the first cancellation counts."""

    async def work(store: ResponseStore) -> list[bytes]:
        found = []
        for settled, body in ((False, b"1"), (False, b"2"), (True, b"3"), (True, b"4"), (False, b"5")):
            await store.put(record("a", final=settled, body=body))
            kept = await store.get("a")
            found.append(kept.body if kept else b"")
        return found

    assert [b"1", b"2", b"3", b"3", b"3"] == using(ResponseStore(place), work)


def test_the_first_final_status_of_a_record_stays(place: str) -> None:
    """Whichever server stores it; in SQLite and PostgreSQL."""

    async def work(responses: ResponseStore) -> list[bytes]:
        for id in ("cancelled", "completed"):
            await responses.put(record(id, final=False))
        await responses.cancel("cancelled", "", b"cancelled")
        for id in ("cancelled", "completed"):
            await responses.put(record(id, body=b"completed"))
        await responses.cancel("completed", "", b"cancelled")
        found = [await responses.get("cancelled"), await responses.get("completed")]
        return [record.body for record in found if record is not None]

    assert [b"cancelled", b"completed"] == using(ResponseStore(place), work)


def test_the_history_is_read_oldest_first(place: str) -> None:
    """A missing ancestor ends it: the first record has a previous id."""

    async def work(store: ResponseStore) -> None:
        for id, previous in (("a", None), ("b", "a"), ("c", "b"), ("x", "gone")):
            await store.put(record(id, previous))

        assert ["a", "b", "c"] == [each.id for each in await store.history("c")]
        assert [("x", "gone")] == [(each.id, each.previous) for each in await store.history("x")]
        assert [] == await store.history("none")

    using(ResponseStore(place), work)


def test_a_cyclic_history_ends(place: str) -> None:
    """A broken database must not cause an endless loop."""

    async def work(store: ResponseStore) -> int:
        await store.put(record("a", "b"))
        await store.put(record("b", "a"))
        return len(await store.history("a"))

    assert 0 < using(ResponseStore(place), work) < 5000


def test_records_are_found_by_their_items(place: str) -> None:
    """Deleted records are not found."""

    async def work(store: ResponseStore) -> None:
        await store.put(record("a", items=("i", "shared")))
        await store.put(record("b", items=("j", "shared")))

        assert ["a", "b"] == [each.id for each in await store.find_by_items(["j", "i", "none"])]
        assert await store.delete("a")
        assert not await store.delete("a")
        assert ["b"] == [each.id for each in await store.find_by_items(["i", "shared"])]

    using(ResponseStore(place), work)


def test_the_least_recently_read_record_is_evicted(place: str) -> None:
    """By number of records; reading a record or its successors counts as use."""
    clock = Clock()

    async def work(store: ResponseStore) -> list[str]:
        for id, previous in (("a", None), ("b", None), ("c", "a")):
            clock.now += 1
            await store.put(record(id, previous))
        clock.now += 1
        await store.history("c")
        clock.now += 1
        await store.put(record("d"))
        return [id for id in "abcd" if await store.get(id)]

    assert ["a", "c", "d"] == using(ResponseStore(place, RetentionLimits(rows=3), clock), work)


def test_bytes_are_bounded(place: str) -> None:
    """Old records are evicted for new ones of any size; the newest one always stays."""
    clock = Clock()
    # Incompressible.
    noise = [random.Random(number).randbytes(1000) for number in range(8)]

    async def work(store: ResponseStore) -> None:
        for number, body in enumerate(noise):
            clock.now += 1
            await store.put(record(str(number), body=body))
        kept = [id for id in range(8) if await store.get(str(id))]
        assert [5, 6, 7] == kept
        clock.now += 1
        await store.put(record("huge", body=b"".join(noise) * 3))
        assert await store.get("huge")

    using(ResponseStore(place, RetentionLimits(bytes=4000), clock), work)


def test_age_is_bounded(place: str) -> None:
    """Since the creation, with or without reads."""
    clock = Clock()

    async def work(store: ResponseStore) -> list[str]:
        await store.put(record("old"))
        clock.now += 60
        await store.put(record("new"))
        clock.now += 41
        await store.get("old")
        await store.put(record("now"))
        return [id for id in ("old", "new", "now") if await store.get(id)]

    assert ["new", "now"] == using(ResponseStore(place, RetentionLimits(seconds=100), clock), work)


def test_a_lease_runs_out(place: str) -> None:
    """Without renewal the server counts as dead; final records need no lease."""
    clock = Clock()

    async def work(store: ResponseStore) -> None:
        for id in ("made", "left", "done"):
            await store.put(record(id, final=id == "done"))
        clock.now += LEASE_SECONDS - 1
        assert {"made"} == await store.renew_leases(["made", "done", "none"])
        clock.now += 2
        found = {id: await store.get(id) for id in ("made", "left", "done")}
        assert {"made": False, "left": True, "done": False} == {
            id: each.lease_expired for id, each in found.items() if each is not None
        }

    using(ResponseStore(place, clock=clock), work)


def test_two_servers_share_a_store(place: str) -> None:
    """Each reads records of the other, also while both write."""
    if place == MEMORY:
        pytest.skip("memory is nobody else's")
    one, other = ResponseStore(place), ResponseStore(place)

    async def work() -> None:
        await one.open()
        await asyncio.gather(*(store.put(record(f"{at}{id(store)}")) for at in range(20) for store in (one, other)))
        for at in range(20):
            assert await other.get(f"{at}{id(one)}")
            assert await one.get(f"{at}{id(other)}")
        one.close()
        other.close()

    asyncio.run(work())


def test_a_file_survives_its_server_and_is_private(tmp_path: Path) -> None:
    """The next store reads it; only its user may read the file."""
    place = tmp_path / "deep" / "folder" / "store.sqlite"
    using(ResponseStore(str(place)), lambda store: store.put(record("a"), b"event"))

    kept = using(ResponseStore(str(place)), lambda store: store.get("a"))
    assert kept is not None
    assert 0o600 == stat.S_IMODE(place.stat().st_mode)
    assert 0o700 == stat.S_IMODE(place.parent.stat().st_mode)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    database = connect(str(tmp_path / "store.sqlite"))
    database.run("CREATE TABLE things (id TEXT PRIMARY KEY)")

    def twice() -> None:
        with database.transaction():
            for _ in range(2):
                database.run("INSERT INTO things VALUES (?)", ["a"])

    with pytest.raises(StoreError):
        twice()

    assert [] == database.run("SELECT id FROM things")
    database.close()


def test_an_impossible_location_is_an_error(tmp_path: Path) -> None:
    """A folder in place of the file, or a database without a server."""
    for place in (str(tmp_path), "postgresql://nobody@127.0.0.1:1/none"):
        with pytest.raises(StoreError):
            using(ResponseStore(place), lambda store: store.open())


def test_a_server_does_not_start_without_its_store(tmp_path: Path) -> None:
    """A location of the option is opened at the start, the default one is not."""
    check_store(str(tmp_path / "new" / "store.sqlite"))
    assert (tmp_path / "new" / "store.sqlite").exists()
    for setting in (None, "none", "memory"):
        check_store(setting)

    with pytest.raises(StoreError):
        check_store(str(tmp_path))


def test_the_banner_shows_no_password() -> None:
    places = ("none", "memory", "/a/b.sqlite", "postgresql://user:secret@host/db")

    assert ["not kept", "in memory", "in /a/b.sqlite", "in PostgreSQL"] == [
        describe_location(place) for place in places
    ]


def test_a_record_belongs_to_its_owner(place: str) -> None:
    """Other owners cannot read, continue, find or delete it; nor does an owner see records without one."""

    async def work(store: ResponseStore) -> list[object]:
        await store.put(record("nobody's", items=("i0",)))
        await store.put(record("first", items=("i2",), owner="me"))
        await store.put(record("mine", "first", items=("i1",), owner="me"), b"e")
        found: list[object] = []
        for who in ("me", "you"):
            chain = [each.id for each in await store.history("mine", who)]
            held = [each.id for each in await store.find_by_items(["i0", "i1", "i2"], who)]
            found.append((bool(await store.get("mine", who)), await store.events("mine", who), chain, held))
        return [*found, await store.delete("mine", "you"), await store.delete("mine", "me")]

    mine, yours, *deleted = using(ResponseStore(place), work)
    assert (True, b"e", ["first", "mine"], ["first", "mine"]) == mine
    assert (False, b"", [], []) == yours
    assert [False, True] == deleted


def test_a_store_of_an_earlier_version_is_migrated(tmp_path: Path) -> None:
    """Its records have no owner: servers without keys read them, and the first key gets them."""
    place = tmp_path / "old.sqlite"
    using(ResponseStore(str(place)), lambda store: store.put(record("old")))
    with closing(sqlite3.connect(place)) as other:
        other.execute("ALTER TABLE responses DROP COLUMN owner")

    unowned = using(ResponseStore(str(place)), lambda store: store.get("old"))
    owned = using(ResponseStore(str(place), first_owner="me"), lambda store: store.get("old", "me"))
    assert unowned is not None
    assert owned is not None
    assert ("", "me") == (unowned.owner, owned.owner)


def test_the_option_selects_the_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is a file in the system's data folder, or memory if it cannot be written."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    found = [open_store(setting) for setting in (None, "memory", "~/x.sqlite", "postgresql://h/d")]

    places = [str(tmp_path / "cellar" / "responses.sqlite"), MEMORY, str(Path.home() / "x.sqlite"), "postgresql://h/d"]
    assert places == [store.location if store else None for store in found]
    assert open_store("none") is None
    monkeypatch.setattr("os.access", lambda *_: False)
    assert MEMORY == default_location()
    assert [] == list(tmp_path.iterdir())


def test_a_relative_data_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG base directory specification says: the file would depend on the working directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", "data")

    assert str(tmp_path / ".local" / "share" / "cellar" / "responses.sqlite") == default_location()


def test_sqlite_synchronises_all_commits_but_those_of_a_transaction_that_need_not_be_durable(tmp_path: Path) -> None:
    """Also after one that failed."""
    database = connect(str(tmp_path / "store.sqlite"))
    with database.transaction(durable=False):
        inside = database.run("PRAGMA synchronous")
    with pytest.raises(StoreError), database.transaction(durable=False):
        database.run("no statement")
    after = database.run("PRAGMA synchronous")
    database.close()

    assert inside == [(1,)]
    assert after == [(2,)]
