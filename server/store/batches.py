"""Batches and the results of their lines.

One server at a time runs a batch: it holds a lease, which it renews. Another server, or the same one after a restart,
claims the batch when the lease has expired and computes the lines without a result.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from server.store.adoption import adopt
from server.store.database import MEMORY, MOST_AHEAD_SECONDS, Database, Row, Value
from server.store.worker import DatabaseWorker

LEASE_SECONDS = 30.0
KEPT_SECONDS = 30 * 86400.0
# Of an owner: beyond it, the oldest final ones are deleted.
MAX_BATCHES = 10_000
# Results in one read of the database, and batches deleted by one creation.
PAGE_ROWS = 100
SCHEMA = (
    """CREATE TABLE IF NOT EXISTS batches (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        created DOUBLE PRECISION NOT NULL,
        final INTEGER NOT NULL,
        holder TEXT NOT NULL,
        lease DOUBLE PRECISION NOT NULL,
        cancelling BIGINT,
        body BLOB NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS batch_results (
        batch TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
        line INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        content BLOB NOT NULL,
        PRIMARY KEY (batch, line)
    )""",
    "CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, created, id, final)",
)
COLUMNS = "id, owner, final, cancelling, body"
VISIBLE = "owner = ?"
CLAIM = f"UPDATE batches SET holder = ?, lease = ? WHERE final = 0 AND (lease < ? OR lease > ?) RETURNING {COLUMNS}"
RENEW = f"UPDATE batches SET lease = ? WHERE id = ? AND holder = ? AND final = 0 RETURNING {COLUMNS}"
SAVE = "UPDATE batches SET body = ?, final = ? WHERE id = ? AND holder = ? AND final = 0 RETURNING id"
CANCEL = f"""UPDATE batches SET cancelling = COALESCE(cancelling, ?)
    WHERE id = ? AND {VISIBLE} AND final = 0 RETURNING {COLUMNS}"""
ADD_RESULT = "INSERT INTO batch_results VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
SELECT_RESULTS = """SELECT line, content FROM batch_results
    WHERE batch = ? AND failed = ? AND line > ? ORDER BY line LIMIT ?"""
EVICT = f"""DELETE FROM batches WHERE id IN (
        SELECT id FROM batches WHERE {VISIBLE} AND final = 1
        ORDER BY created DESC, id DESC LIMIT {PAGE_ROWS} OFFSET ?
    )"""
COUNT_RESULTS = "SELECT failed, COUNT(*) FROM batch_results WHERE batch = ? GROUP BY failed"


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch; `body` is of server/batches.

    cancelling  time of the request to cancel it
    """

    id: str
    owner: str
    final: bool
    cancelling: int | None
    body: bytes


@dataclass(slots=True)
class BatchStore:
    """Batches in a database. All methods may be called on the event loop; StoreError if the database fails.

    holder       the name of this server in leases
    first_owner  gets the batches without an owner when the database is opened; "": they stay as they are
    """

    holder: str
    location: str = MEMORY
    clock: Callable[[], float] = time.time
    first_owner: str = ""
    _worker: DatabaseWorker = field(init=False)

    def __post_init__(self) -> None:
        self._worker = DatabaseWorker(
            self.location, SCHEMA, lambda database: adopt(database, "batches", self.first_owner)
        )

    async def create(self, id: str, owner: str, body: bytes) -> None:
        """Add a batch that no server has claimed; delete final ones older than KEPT_SECONDS, or beyond MAX_BATCHES."""
        now = self.clock()

        def write(database: Database) -> None:
            with database.transaction():
                database.run("DELETE FROM batches WHERE final = 1 AND created < ?", [now - KEPT_SECONDS])
                row: list[Value] = [id, owner, now, 0, "", 0.0, None, zlib.compress(body)]
                database.run("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
                database.run(EVICT, [owner, MAX_BATCHES - 1])

        await self._worker.run(write)

    async def get(self, id: str, owner: str) -> StoredBatch | None:
        """The batch, if `owner` may read it."""
        statement = f"SELECT {COLUMNS} FROM batches WHERE id = ? AND {VISIBLE}"
        rows = await self._worker.query(statement, [id, owner])
        return _batch(rows[0]) if rows else None

    async def page(self, owner: str, limit: int, after: str | None = None) -> list[StoredBatch] | None:
        """At most `limit` batches of an owner, latest first, after the one with the id `after`; None: no such batch."""

        def read(database: Database) -> list[StoredBatch] | None:
            where, values = VISIBLE, [owner]
            if after is not None:
                bounds = database.run(f"SELECT created, id FROM batches WHERE id = ? AND {VISIBLE}", [after, owner])
                if not bounds:
                    return None
                where, values = f"{VISIBLE} AND (created, id) < (?, ?)", [owner, *bounds[0]]
            statement = f"SELECT {COLUMNS} FROM batches WHERE {where} ORDER BY created DESC, id DESC LIMIT ?"
            return [_batch(row) for row in database.run(statement, [*values, limit])]

        return await self._worker.run(read)

    async def open(self, owner: str) -> list[StoredBatch]:
        """The batches of an owner that are not final."""
        statement = f"SELECT {COLUMNS} FROM batches WHERE {VISIBLE} AND final = 0"
        return [_batch(row) for row in await self._worker.query(statement, [owner])]

    async def count_open(self, owner: str) -> int:
        """The number of an owner's batches that are not final."""
        ((count,),) = await self._worker.query("SELECT COUNT(*) FROM batches WHERE owner = ? AND final = 0", [owner])
        return int(count)

    async def cancel(self, id: str, owner: str) -> StoredBatch | None:
        """Request the end of a batch, so that its files can be deleted; None: there is none that runs."""
        rows = await self._worker.query(CANCEL, [int(self.clock()), id, owner], frees=True)
        return _batch(rows[0]) if rows else None

    async def claim(self) -> list[StoredBatch]:
        """All batches that no server runs; from now on this one does."""
        now = self.clock()
        values: list[Value] = [self.holder, now + LEASE_SECONDS, now, now + MOST_AHEAD_SECONDS]
        return [_batch(row) for row in await self._worker.query(CLAIM, values)]

    async def renew(self, id: str) -> StoredBatch | None:
        """Renew the lease; None: another server has the batch now."""
        rows = await self._worker.query(RENEW, [self.clock() + LEASE_SECONDS, id, self.holder])
        return _batch(rows[0]) if rows else None

    async def release(self, id: str) -> None:
        """End the lease, so that the next server claims the batch at once."""
        await self._worker.query(RENEW, [0.0, id, self.holder])

    async def save(self, id: str, body: bytes, *, final: bool) -> bool:
        """Replace the body; False: another server has the batch now. A final batch loses its results."""

        def write(database: Database) -> bool:
            with database.transaction():
                saved = bool(database.run(SAVE, [zlib.compress(body), int(final), id, self.holder]))
                if saved and final:
                    database.run("DELETE FROM batch_results WHERE batch = ?", [id])
            return saved

        return await self._worker.run(write, frees=final)

    async def add_result(self, id: str, line: int, content: bytes, *, failed: bool) -> None:
        """Keep the result of a line, unless it has one."""
        await self._worker.run(
            lambda database: database.run(ADD_RESULT, [id, line, int(failed), zlib.compress(content)])
        )

    async def finished_lines(self, id: str) -> set[int]:
        """The lines with a result."""
        statement = "SELECT line FROM batch_results WHERE batch = ?"
        return {row[0] for row in await self._worker.query(statement, [id])}

    async def count(self, id: str) -> tuple[int, int]:
        """The number of lines with a response, and of failed ones."""
        counts: dict[int, int] = dict(await self._worker.query(COUNT_RESULTS, [id]))
        return counts.get(0, 0), counts.get(1, 0)

    async def results(self, id: str, *, failed: bool) -> AsyncIterator[bytes]:
        """The results in the order of the lines."""
        last = -1
        while True:
            rows = await self._worker.query(SELECT_RESULTS, [id, int(failed), last, PAGE_ROWS])
            for line, content in rows:
                last = line
                yield zlib.decompress(content)
            if len(rows) < PAGE_ROWS:
                return

    def close(self) -> None:
        """Finish pending work and close the database."""
        self._worker.close()


def _batch(row: Row) -> StoredBatch:
    id, owner, final, cancelling, body = row
    return StoredBatch(id, owner, bool(final), cancelling, zlib.decompress(body))
