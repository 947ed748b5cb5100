"""The store of responses: records read and written by one worker thread, limited in number, bytes and age.

The least recently read records are deleted first. The server that generates a response renews its lease; an expired
lease marks a response of a dead server. The content of a record is opaque bytes of server/responses.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from server.configuration.xdg import data_folder
from server.store.adoption import adopt
from server.store.database import MEMORY, MOST_AHEAD_SECONDS, Database, Row, StoreError, Value, connect, is_url
from server.store.worker import DatabaseWorker

LEASE_SECONDS = 30.0
MAX_MEMORY_BYTES = 64 * 2**20
# Longer conversations must be sent as input, so no request causes an unlimited number of reads.
MAX_HISTORY = 1000
# Values of the column `settled`. A response that another server cancelled has no output until its own server adds it.
OPEN, FINAL, CANCELLED = 0, 1, 2

SCHEMA = (
    """CREATE TABLE IF NOT EXISTS responses (
        id TEXT PRIMARY KEY,
        previous TEXT,
        settled INTEGER NOT NULL,
        lease DOUBLE PRECISION NOT NULL,
        created DOUBLE PRECISION NOT NULL,
        used DOUBLE PRECISION NOT NULL,
        bytes BIGINT NOT NULL,
        body BLOB NOT NULL,
        input BLOB NOT NULL,
        events BLOB NOT NULL,
        owner TEXT NOT NULL DEFAULT ''
    )""",
    "CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used, bytes)",
    "CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created)",
    """CREATE TABLE IF NOT EXISTS items (
        id TEXT NOT NULL,
        response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
        PRIMARY KEY (id, response)
    )""",
    "CREATE INDEX IF NOT EXISTS items_by_response ON items (response)",
)
# Databases of an earlier version lack the column.
SELECT_OWNER = "SELECT owner FROM responses LIMIT 1"
ADD_OWNER = "ALTER TABLE responses ADD COLUMN owner TEXT NOT NULL DEFAULT ''"
UPSERT = f"""INSERT INTO responses (id, previous, owner, settled, lease, created, used, bytes, body, input, events)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET settled = excluded.settled, lease = excluded.lease, used = excluded.used,
        bytes = excluded.bytes, body = excluded.body, input = excluded.input, events = excluded.events
    WHERE responses.settled = {OPEN} OR (responses.settled = {CANCELLED} AND excluded.settled = {CANCELLED})"""
VISIBLE = "id = ? AND owner = ?"
CANCEL = f"UPDATE responses SET settled = {CANCELLED}, body = ? WHERE {VISIBLE} AND settled = {OPEN}"
SELECT_AND_TOUCH = (
    f"UPDATE responses SET used = ? WHERE {VISIBLE} RETURNING id, previous, owner, settled, lease, body, input"
)
SELECT_ONLY = f"SELECT id, previous, owner, settled, lease, body, input FROM responses WHERE {VISIBLE}"
SELECT_HISTORY = """WITH RECURSIVE chain (id, previous, depth) AS (
        SELECT id, previous, 0 FROM responses WHERE id = ?
        UNION ALL
        SELECT older.id, older.previous, chain.depth + 1 FROM responses AS older
        JOIN chain ON older.id = chain.previous WHERE chain.depth < ?
    ) SELECT id FROM chain ORDER BY depth DESC"""
SELECT_BY_ITEM = "SELECT response FROM items WHERE id = ? ORDER BY response LIMIT 1"
EVICT = """DELETE FROM responses WHERE id IN (
        SELECT id FROM (
            SELECT id, ROW_NUMBER() OVER newest AS place, SUM(bytes) OVER newest AS total
            FROM responses WINDOW newest AS (ORDER BY used DESC, id)
        ) AS ranked WHERE place > ? OR (total > ? AND place > 1)
    )"""


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Limits of the number of records, their bytes, and their age in seconds."""

    rows: int = 100_000
    bytes: int = 2**30
    seconds: float = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Record:
    """One response.

    previous       id of the previous response
    final          its status will not change
    cancelled      final by a cancellation
    body, input    of server/responses
    items          ids of the items in the response's output, for `find_by_items`; only set for `put`
    lease_expired  not final, and its server stopped
    owner          the only one to read it; "": servers without keys
    """

    id: str
    previous: str | None
    final: bool
    body: bytes
    input: bytes
    items: tuple[str, ...] = ()
    lease_expired: bool = False
    owner: str = ""
    cancelled: bool = False


@dataclass(slots=True)
class ResponseStore:
    """Records in a database that is opened at its first use. All methods may be called on the event loop.

    first_owner  gets the records without an owner when the database is opened; "": they stay as they are
    """

    location: str = MEMORY
    limits: RetentionLimits = field(default_factory=RetentionLimits)
    clock: Callable[[], float] = time.time
    first_owner: str = ""
    _worker: DatabaseWorker = field(init=False)

    def __post_init__(self) -> None:
        self._worker = DatabaseWorker(self.location, SCHEMA, self._migrate)

    async def put(self, record: Record, events: bytes = b"", *, new: bool = True) -> None:
        """Store a record, in place of one with its id that is not final, and enforce the limits.

        A cancelled record replaces a cancelled one: its output follows the cancellation by another server.

        new  also store it if there is no record with its id
        """
        await self._worker.run(lambda database: self._put(database, record, events, new=new))

    async def cancel(self, id: str, owner: str, body: bytes) -> None:
        """Mark a record as cancelled and replace its body, unless it is final."""
        await self._worker.query(CANCEL, [zlib.compress(body), id, owner])

    async def get(self, id: str, owner: str = "") -> Record | None:
        """The record, if `owner` may read it; updates its time of last use."""
        records = await self._worker.run(lambda database: self._get(database, [id], owner))
        return records[0] if records else None

    async def events(self, id: str, owner: str = "") -> bytes:
        """The bytes stored with the record."""
        statement = f"SELECT events FROM responses WHERE {VISIBLE}"
        rows = await self._worker.query(statement, [id, owner])
        return zlib.decompress(rows[0][0]) if rows else b""

    async def history(self, id: str, owner: str = "") -> list[Record]:
        """The record and its previous ones up to a missing one, oldest first; empty: there is no such record."""

        def read(database: Database) -> list[Record]:
            ids = [row[0] for row in database.run(SELECT_HISTORY, [id, MAX_HISTORY])]
            return self._get(database, ids, owner)

        return await self._worker.run(read)

    async def find_by_items(self, items: Sequence[str], owner: str = "") -> list[Record]:
        """The records with these items."""

        def read(database: Database) -> list[Record]:
            ids = {row[0] for item in items for row in database.run(SELECT_BY_ITEM, [item])}
            return self._get(database, sorted(ids), owner)

        return await self._worker.run(read)

    async def delete(self, id: str, owner: str = "") -> bool:
        """Delete a record; False: there was none."""
        statement = f"DELETE FROM responses WHERE {VISIBLE} RETURNING id"
        return bool(await self._worker.query(statement, [id, owner], frees=True))

    async def renew_leases(self, ids: Sequence[str]) -> set[str]:
        """Renew leases; returns the ids of records that still exist and are not final."""
        statement = "UPDATE responses SET lease = ? WHERE id = ? AND settled = 0 RETURNING id"

        def write(database: Database) -> set[str]:
            lease = self.clock() + LEASE_SECONDS
            with database.transaction(durable=False):
                return {row[0] for id in ids for row in database.run(statement, [lease, id])}

        return await self._worker.run(write)

    async def open(self) -> None:
        """Open the database now. All methods raise StoreError if that fails."""
        await self._worker.run(lambda database: None)

    def close(self) -> None:
        """Finish pending work and close the connection."""
        self._worker.close()

    def _migrate(self, database: Database) -> None:
        try:
            database.run(SELECT_OWNER)
        except StoreError:
            database.run(ADD_OWNER)
        adopt(database, "responses", self.first_owner)

    def _put(self, database: Database, record: Record, events: bytes, *, new: bool) -> None:
        parts = [zlib.compress(part) for part in (record.body, record.input, events)]
        now, size = self.clock(), sum(len(part) for part in parts)
        settled = CANCELLED if record.cancelled else FINAL if record.final else OPEN
        state: list[Value] = [settled, now + LEASE_SECONDS, now, now, size]
        with database.transaction():
            if not new and not database.run("SELECT id FROM responses WHERE id = ?", [record.id]):
                return
            database.run(UPSERT, [record.id, record.previous, record.owner, *state, *parts])
            for item in record.items:
                database.run("INSERT INTO items VALUES (?, ?) ON CONFLICT DO NOTHING", [item, record.id])
            database.run("DELETE FROM responses WHERE created < ?", [now - self.limits.seconds])
            ((rows, total),) = database.run("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM responses")
            if rows > self.limits.rows or total > self.limits.bytes:
                database.run(EVICT, [self.limits.rows, self.limits.bytes])

    def _get(self, database: Database, ids: Sequence[str], owner: str) -> list[Record]:
        """The records of these ids that `owner` may read; updates their times of last use."""
        try:
            with database.transaction(durable=False):
                rows = [row for id in ids for row in database.run(SELECT_AND_TOUCH, [self.clock(), id, owner])]
        except StoreError:
            # A full or read-only disk can still be read, without the update of the time.
            rows = [row for id in ids for row in database.run(SELECT_ONLY, [id, owner])]
        return [self._record(row) for row in rows]

    def _record(self, row: Row) -> Record:
        id, previous, owner, settled, lease, body, input = row
        now = self.clock()
        return Record(
            id=id,
            previous=previous,
            owner=owner,
            final=bool(settled),
            body=zlib.decompress(body),
            input=zlib.decompress(input),
            lease_expired=not settled and not now <= lease <= now + MOST_AHEAD_SECONDS,
        )


def open_store(setting: str | None, first_owner: str = "") -> ResponseStore | None:
    """The store of the option --store: a file, a PostgreSQL URL, "memory" or "none"; None is the default file.

    Nothing is opened yet. Memory replaces a default file that cannot be written, as in a read-only image.
    """
    if setting == "none":
        return None
    location = default_location() if not setting else MEMORY if setting == "memory" else setting
    if location == MEMORY:
        return ResponseStore(MEMORY, RetentionLimits(bytes=MAX_MEMORY_BYTES))
    place = location if is_url(location) else str(Path(location).expanduser())
    return ResponseStore(place, first_owner=first_owner)


def check_store(setting: str | None) -> None:
    """Raise StoreError if a location set by the user cannot be opened. The default file is created at its first use."""
    store = open_store(setting)
    if not setting or store is None:
        return
    try:
        database = connect(store.location)
        database.run("SELECT 1")
    except StoreError as error:
        raise StoreError(f"--store: responses cannot be stored {describe_location(setting)}: {error}") from error
    database.close()


def describe_location(setting: str | None) -> str:
    """The location of responses for the start-up screen, without a password."""
    store = open_store(setting)
    if store is None:
        return "not kept"
    return {MEMORY: "in memory"}.get(
        store.location, "in PostgreSQL" if is_url(store.location) else f"in {store.location}"
    )


def default_location() -> str:
    """A file in the user's data folder (XDG), or MEMORY if it cannot be written."""
    try:
        folder = data_folder()
    except RuntimeError:  # no home folder
        return MEMORY
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return str(folder / "responses.sqlite") if os.access(there, os.W_OK | os.X_OK) else MEMORY
