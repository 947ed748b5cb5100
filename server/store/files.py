"""Uploaded files and the results of batches, in chunks in the database."""

from __future__ import annotations

import time
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from server.store.database import Database, Row, StoreError, Value
from server.store.worker import DatabaseWorker

# Uncompressed bytes of a row.
CHUNK_BYTES = 2**20
# An upload that is not complete after this time has failed.
UPLOAD_SECONDS = 3600.0
SCHEMA = (
    """CREATE TABLE IF NOT EXISTS files (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        purpose TEXT NOT NULL,
        name TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        created BIGINT NOT NULL,
        expires BIGINT,
        complete INTEGER NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS file_chunks (
        file TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        content BLOB NOT NULL,
        PRIMARY KEY (file, number)
    )""",
)
COLUMNS = "id, owner, purpose, name, bytes, created, expires"
VISIBLE = "owner IN (?, '') AND complete = 1 AND (expires IS NULL OR expires > ?)"
SELECT = f"SELECT {COLUMNS} FROM files WHERE id = ? AND {VISIBLE}"
SELECT_ALL = f"SELECT {COLUMNS} FROM files WHERE {VISIBLE}"
INSERT_CHUNK = "INSERT INTO file_chunks VALUES (?, ?, ?)"
COMPLETE = "UPDATE files SET bytes = ?, complete = 1 WHERE id = ?"
SELECT_CHUNK = "SELECT content FROM file_chunks WHERE file = ? AND number = ?"
DELETE_EXPIRED = "DELETE FROM files WHERE expires <= ? OR (complete = 0 AND created < ?)"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file without its content.

    owner             the only one to read it; "": every owner
    created, expires  seconds since 1970; None: it does not expire
    """

    id: str
    owner: str
    purpose: str
    name: str
    created: int
    expires: int | None = None
    bytes: int = 0


class StorageFullError(Exception):
    """The files would exceed the limit of the store."""


@dataclass(slots=True)
class FileStore:
    """Files in a database. All methods may be called on the event loop; StoreError if the database fails.

    max_bytes  of all files
    """

    location: str
    max_bytes: int
    clock: Callable[[], float] = time.time
    _worker: DatabaseWorker = field(init=False)

    def __post_init__(self) -> None:
        self._worker = DatabaseWorker(self.location, SCHEMA)

    async def create(self, file: StoredFile, content: AsyncIterator[bytes]) -> StoredFile:
        """Store a file, in place of one with its id; StorageFullError leaves nothing."""
        used: int = await self._worker.run(lambda database: self._begin(database, file))
        number, size, complete = 0, 0, False
        try:
            async for chunk in content:
                size += len(chunk)
                if used + size > self.max_bytes:
                    raise StorageFullError
                await self._worker.query(INSERT_CHUNK, [file.id, number, zlib.compress(chunk, 1)])
                number += 1
            await self._worker.query(COMPLETE, [size, file.id])
            complete = True
        finally:
            if not complete:
                await self._remove(file.id)
        return replace(file, bytes=size)

    async def get(self, id: str, owner: str) -> StoredFile | None:
        """The file, if `owner` may read it and it has not expired."""
        rows = await self._worker.query(SELECT, [id, owner, self.clock()])
        return _file(rows[0]) if rows else None

    async def all(self, owner: str) -> list[StoredFile]:
        """The files of an owner, oldest first."""
        statement = f"{SELECT_ALL} ORDER BY created, id"
        rows = await self._worker.query(statement, [owner, self.clock()])
        return [_file(row) for row in rows]

    async def chunks(self, id: str) -> AsyncIterator[bytes]:
        """The content of a file, chunk by chunk."""
        number = 0
        while True:
            rows = await self._worker.query(SELECT_CHUNK, [id, number])
            if not rows:
                return
            yield zlib.decompress(rows[0][0])
            number += 1

    async def delete(self, id: str, owner: str) -> bool:
        """Delete a file; False: there is none."""
        statement = f"DELETE FROM files WHERE id = ? AND {VISIBLE} RETURNING id"
        return bool(await self._worker.query(statement, [id, owner, self.clock()]))

    def close(self) -> None:
        """Finish pending work and close the database."""
        self._worker.close()

    def _begin(self, database: Database, file: StoredFile) -> int:
        """Insert the row of an incomplete file; returns the bytes of all other files."""
        now = self.clock()
        row: list[Value] = [file.id, file.owner, file.purpose, file.name, 0, file.created, file.expires, 0]
        with database.transaction():
            database.run(DELETE_EXPIRED, [now, now - UPLOAD_SECONDS])
            database.run("DELETE FROM files WHERE id = ?", [file.id])
            ((used,),) = database.run("SELECT COALESCE(SUM(bytes), 0) FROM files")
            database.run("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        return int(used)

    async def _remove(self, id: str) -> None:
        try:
            await self._worker.query("DELETE FROM files WHERE id = ?", [id])
        except StoreError:
            # It stays incomplete, and is deleted after UPLOAD_SECONDS.
            return


def _file(row: Row) -> StoredFile:
    id, owner, purpose, name, size, created, expires = row
    return StoredFile(id, owner, purpose, name, created, expires, size)
