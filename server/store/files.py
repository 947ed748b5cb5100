"""Uploaded files and the results of batches, in chunks in the database."""

from __future__ import annotations

import time
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from server.store.adoption import adopt
from server.store.database import MEMORY, Database, Row, StoreError, Value
from server.store.worker import DatabaseWorker

# Of all files in a database, and in memory.
MAX_BYTES, MAX_MEMORY_BYTES = 10 * 2**30, 64 * 2**20
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
    "CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, created, id)",
)
COLUMNS = "id, owner, purpose, name, bytes, created, expires"
VISIBLE = "owner = ? AND complete = 1 AND (expires IS NULL OR expires > ?)"
SELECT = f"SELECT {COLUMNS} FROM files WHERE id = ? AND {VISIBLE}"
INSERT_CHUNK = "INSERT INTO file_chunks VALUES (?, ?, ?)"
ADD_BYTES = "UPDATE files SET bytes = bytes + ? WHERE id = ?"
COMPLETE = "UPDATE files SET complete = 1, purpose = ?, expires = ? WHERE id = ? RETURNING bytes"
SELECT_CHUNK = "SELECT content FROM file_chunks WHERE file = ? AND number = ?"
SUM_BYTES = "SELECT COALESCE(SUM(bytes), 0) FROM files"
DELETE_EXPIRED = "DELETE FROM files WHERE expires <= ? OR (complete = 0 AND created < ?)"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file without its content.

    owner             the only one to read it; "": servers without keys
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
    """A file does not fit next to the others.

    other_bytes  of all other files
    """

    def __init__(self, other_bytes: int) -> None:
        super().__init__(f"no space next to {other_bytes} bytes of files")
        self.other_bytes = other_bytes


@dataclass(slots=True)
class FileStore:
    """Files in a database. All methods may be called on the event loop; StoreError if the database fails.

    max_bytes    of all files
    first_owner  gets the files without an owner when the database is opened; "": they stay as they are
    """

    location: str
    max_bytes: int
    clock: Callable[[], float] = time.time
    first_owner: str = ""
    _worker: DatabaseWorker = field(init=False)

    def __post_init__(self) -> None:
        self._worker = DatabaseWorker(
            self.location, SCHEMA, lambda database: adopt(database, "files", self.first_owner)
        )

    async def create(
        self, file: StoredFile, content: AsyncIterator[bytes], final: Callable[[], tuple[str, int | None]] | None = None
    ) -> StoredFile:
        """Store a file, in place of one with its id; an error, such as StorageFullError, leaves nothing.

        final  called after the content: purpose and expiry, in place of `file`'s
        """
        await self._worker.run(partial(self._begin, file))
        number, complete = 0, False
        try:
            async for chunk in content:
                await self._worker.run(partial(self._add_chunk, file.id, number, chunk))
                number += 1
            if final is not None:
                purpose, expires = final()
                file = replace(file, purpose=purpose, expires=expires)
            rows = await self._worker.query(COMPLETE, [file.purpose, file.expires, file.id])
            if not rows:
                raise StoreError("the file was deleted during its upload")
            complete = True
        finally:
            if not complete:
                await self._remove(file.id)
        return replace(file, bytes=rows[0][0])

    async def get(self, id: str, owner: str) -> StoredFile | None:
        """The file, if `owner` may read it and it has not expired."""
        rows = await self._worker.query(SELECT, [id, owner, self.clock()])
        return _file(rows[0]) if rows else None

    async def page(
        self, owner: str, limit: int, after: str | None = None, *, purpose: str | None = None, ascending: bool = True
    ) -> list[StoredFile] | None:
        """At most `limit` files of an owner, by time, after the one with the id `after`; None: no such file."""
        where = VISIBLE if purpose is None else f"{VISIBLE} AND purpose = ?"
        visible: list[Value] = [owner, self.clock(), *([] if purpose is None else [purpose])]
        sign, order = (">", "ASC") if ascending else ("<", "DESC")

        def read(database: Database) -> list[StoredFile] | None:
            after_anchor, bound = "", list[Value]()
            if after is not None:
                anchors = database.run(f"SELECT created, id FROM files WHERE id = ? AND {where}", [after, *visible])
                if not anchors:
                    return None
                after_anchor, bound = f" AND (created, id) {sign} (?, ?)", [*anchors[0]]
            statement = (
                f"SELECT {COLUMNS} FROM files WHERE {where}{after_anchor} ORDER BY created {order}, id {order} LIMIT ?"
            )
            return [_file(row) for row in database.run(statement, [*visible, *bound, limit])]

        return await self._worker.run(read)

    async def count(self, owner: str) -> int:
        """The number of an owner's files, also of incomplete ones."""
        statement = "SELECT COUNT(*) FROM files WHERE owner = ? AND (expires IS NULL OR expires > ?)"
        ((count,),) = await self._worker.query(statement, [owner, self.clock()])
        return int(count)

    async def chunks(self, id: str) -> AsyncIterator[bytes]:
        """The content of a file, chunk by chunk."""
        number = 0
        while (chunk := await self._worker.run(partial(_read_chunk, id, number))) is not None:
            yield chunk
            number += 1

    async def used_bytes(self) -> int:
        """The bytes of all files that have not expired."""
        statement = f"{SUM_BYTES} WHERE expires IS NULL OR expires > ?"
        ((used,),) = await self._worker.query(statement, [self.clock()])
        return int(used)

    async def delete(self, id: str, owner: str) -> bool:
        """Delete a file; False: there is none."""
        statement = f"DELETE FROM files WHERE id = ? AND {VISIBLE} RETURNING id"
        return bool(await self._worker.query(statement, [id, owner, self.clock()], frees=True))

    def close(self) -> None:
        """Finish pending work and close the database."""
        self._worker.close()

    def _begin(self, file: StoredFile, database: Database) -> None:
        """Insert the row of an incomplete file. Only its completion has to be durable."""
        now = self.clock()
        row: list[Value] = [file.id, file.owner, file.purpose, file.name, 0, file.created, file.expires, 0]
        with database.transaction(durable=False):
            database.run(DELETE_EXPIRED, [now, now - UPLOAD_SECONDS])
            database.run("DELETE FROM files WHERE id = ?", [file.id])
            database.run("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def _add_chunk(self, id: str, number: int, chunk: bytes, database: Database) -> None:
        """Uploads at the same time share the limit: the bytes of each are counted as they arrive."""
        compressed = zlib.compress(chunk, 1)
        with database.transaction(durable=False):
            database.run(INSERT_CHUNK, [id, number, compressed])
            database.run(ADD_BYTES, [len(chunk), id])
            ((used,),) = database.run(SUM_BYTES)
            if used > self.max_bytes:
                ((file_bytes,),) = database.run("SELECT bytes FROM files WHERE id = ?", [id])
                raise StorageFullError(used - file_bytes)

    async def _remove(self, id: str) -> None:
        try:
            await self._worker.query("DELETE FROM files WHERE id = ?", [id], frees=True)
        except StoreError:
            # It stays incomplete, and is deleted after UPLOAD_SECONDS.
            return


def open_files(location: str | None, first_owner: str = "") -> FileStore | None:
    """The files in the database of a location; None without one."""
    if location is None:
        return None
    return FileStore(location, MAX_MEMORY_BYTES if location == MEMORY else MAX_BYTES, first_owner=first_owner)


def _read_chunk(id: str, number: int, database: Database) -> bytes | None:
    rows = database.run(SELECT_CHUNK, [id, number])
    return zlib.decompress(rows[0][0]) if rows else None


def _file(row: Row) -> StoredFile:
    id, owner, purpose, name, size, created, expires = row
    return StoredFile(id, owner, purpose, name, created, expires, size)
