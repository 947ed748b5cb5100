"""The databases of the response store: SQLite in a file or in memory, and PostgreSQL. One thread at a time.

Statements use the common subset of both, with `?` for values and BLOB for bytes.
"""

from __future__ import annotations

import errno
import importlib
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

MEMORY = ":memory:"
BUSY_SECONDS = 10.0
# On a full disk SQLite deletes with this space: for its log (0.3 MiB for a file of 200 MiB), and to write the log to
# the database, usually 4 MiB, so that later writes overwrite it.
RESERVE_BYTES = 8 * 2**20
# A full disk: SQLite's codes (the second one: it cannot open), PostgreSQL's SQLSTATE, the system's error numbers.
SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
POSTGRES_FULL = "53100"
SYSTEM_FULL = (errno.ENOSPC, errno.EDQUOT)
# The key of the advisory lock in PostgreSQL.
SCHEMA_LOCK = 0x63656C6C6172

# A lease that ends later than this was taken before the clock went back: its server may be gone. Clocks of servers that
# share a database differ less.
MOST_AHEAD_SECONDS = 86400.0

Value = str | int | float | bytes | None
Row = tuple[Any, ...]


class StoreError(Exception):
    """The database is unreachable, full or broken."""


class StoreFullError(StoreError):
    """The disk of the database is full."""


class Database(Protocol):
    """One connection. All methods raise StoreError."""

    def run(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        """The result rows of a statement."""

    def transaction(self, *, durable: bool = True) -> AbstractContextManager[None]:
        """Commit all statements of the block, or none if it raises.

        durable  it survives a power cut; if not, it does once a later durable one is committed
        """

    def schema_lock(self) -> AbstractContextManager[None]:
        """Exclude other processes while the block creates the schema."""

    def reserve(self) -> None:
        """Keep space on the disk for deletions, if there is some."""

    def reclaim(self, *, reserve: bool) -> bool:
        """On a full disk: release what may be needed to write, and the reserve if asked; False: there is nothing."""

    def close(self) -> None:
        """Close the connection."""


class SqliteDatabase:
    """A file that several processes may share, or memory that ends with the connection."""

    def __init__(self, location: str) -> None:
        self._location = location
        with _as_store_error(sqlite3.Error, OSError):
            if location != MEMORY:
                _make_private(Path(location))
            # Any thread may use the connection, one at a time.
            self._connection = sqlite3.connect(location, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        # Readers do not wait for writers. Each commit synchronises the log, so that no power cut loses it.
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            self.run(f"PRAGMA {pragma}")

    def run(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        """The result rows of a statement."""
        with _as_store_error(sqlite3.Error), closing(self._connection.execute(statement, tuple(values))) as cursor:
            return cursor.fetchall()

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[None]:
        """Commit all statements of the block, or none if it raises."""
        if not durable:
            self.run("PRAGMA synchronous = NORMAL")
        try:
            self.run("BEGIN IMMEDIATE")
            with _as_store_error(sqlite3.Error), self._connection:
                yield
        finally:
            if not durable:
                self.run("PRAGMA synchronous = FULL")

    def schema_lock(self) -> AbstractContextManager[None]:
        """Nothing: each statement locks the file, and none is needed where the schema exists."""
        return nullcontext()

    def reserve(self) -> None:
        """Keep a file of RESERVE_BYTES next to the database."""
        path = _reserve_path(self._location)
        if self._location == MEMORY or path.exists():
            return
        with suppress(OSError):
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    # A file system cannot compress random bytes.
                    file.write(os.urandom(RESERVE_BYTES))
            except OSError:
                path.unlink()

    def reclaim(self, *, reserve: bool) -> bool:
        """Write the log to the database, so that it is overwritten from its start; delete the reserve if asked."""
        if reserve:
            release_reserve(self._location)
        # Debian's SQLite overwrites deleted pages with zeros: as many bytes of the log.
        for pragma in ("secure_delete = FAST", "wal_checkpoint(PASSIVE)"):
            with suppress(StoreError):
                self.run(f"PRAGMA {pragma}")
        return True

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class PostgresDatabase:
    """A PostgreSQL database, by its URL. A broken connection is replaced at the next statement."""

    def __init__(self, url: str) -> None:
        try:
            self._psycopg: Any = importlib.import_module("psycopg")
        except ImportError as error:
            raise StoreError(
                "a PostgreSQL URL needs psycopg; in a checkout of Cellar: pip install '.[postgres]'"
            ) from error
        self._url = url
        self._current: Any = None

    def run(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        """The result rows of a statement."""
        statement = statement.replace("BLOB", "BYTEA").replace("?", "%s")
        with _as_store_error(self._psycopg.Error):
            cursor = self._connection.execute(statement, tuple(values) or None)
            rows: list[Row] = cursor.fetchall() if cursor.description else []
            return rows

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[None]:
        """Commit all statements of the block, or none if it raises; how durable they are is a setting of the server."""
        with _as_store_error(self._psycopg.Error), self._connection.transaction():
            yield

    @contextmanager
    def schema_lock(self) -> Iterator[None]:
        """Exclude other processes: of two CREATE IF NOT EXISTS at the same time one fails."""
        self.run("SELECT pg_advisory_lock(?)", [SCHEMA_LOCK])
        try:
            yield
        finally:
            self.run("SELECT pg_advisory_unlock(?)", [SCHEMA_LOCK])

    def reserve(self) -> None:
        """Nothing: the disk is the server's."""

    def reclaim(self, *, reserve: bool) -> bool:
        """Nothing: the disk is the server's."""
        return False

    def close(self) -> None:
        """Close the connection."""
        if self._current is not None:
            self._current.close()

    @property
    def _connection(self) -> Any:
        if self._current is None or self._current.closed:
            self._current = self._psycopg.connect(self._url, autocommit=True, connect_timeout=int(BUSY_SECONDS))
        return self._current


def connect(location: str) -> Database:
    """The database of a PostgreSQL URL, a file or MEMORY; StoreError if it cannot be opened."""
    return PostgresDatabase(location) if is_url(location) else SqliteDatabase(location)


def release_reserve(location: str) -> None:
    """Delete the reserve of the database."""
    with suppress(OSError):
        _reserve_path(location).unlink()


def is_url(location: str) -> bool:
    """Whether the location is a PostgreSQL URL, not a file."""
    return location.startswith(("postgresql://", "postgres://"))


def _reserve_path(location: str) -> Path:
    return Path(f"{location}-reserve")


def _make_private(path: Path) -> None:
    """Create the file readable for its user only: it contains text of users."""
    path.parent.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


@contextmanager
def _as_store_error(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise (StoreFullError if _is_full(error) else StoreError)(str(error)) from error


def _is_full(error: Exception) -> bool:
    return (
        getattr(error, "sqlite_errorcode", None) in SQLITE_FULL
        or getattr(error, "sqlstate", None) == POSTGRES_FULL
        or getattr(error, "errno", None) in SYSTEM_FULL
    )
