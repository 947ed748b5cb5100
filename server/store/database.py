"""The databases of the response store: SQLite in a file or in memory, and PostgreSQL. One thread at a time.

Statements use the common subset of both, with `?` for values and BLOB for bytes.
"""

from __future__ import annotations

import importlib
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

MEMORY = ":memory:"
BUSY_SECONDS = 10.0
# The key of the advisory lock in PostgreSQL.
SCHEMA_LOCK = 0x63656C6C6172

Value = str | int | float | bytes | None
Row = tuple[Any, ...]


class StoreError(Exception):
    """The database is unreachable, full or broken."""


class Database(Protocol):
    """One connection. All methods raise StoreError."""

    def run(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        """The result rows of a statement."""

    def transaction(self) -> AbstractContextManager[None]:
        """Commit all statements of the block, or none if it raises."""

    def schema_lock(self) -> AbstractContextManager[None]:
        """Exclude other processes while the block creates the schema."""

    def close(self) -> None:
        """Close the connection."""


class SqliteDatabase:
    """A file that several processes may share, or memory that ends with the connection."""

    def __init__(self, location: str) -> None:
        with _as_store_error(sqlite3.Error, OSError):
            if location != MEMORY:
                _make_private(Path(location))
            # Any thread may use the connection, one at a time.
            self._connection = sqlite3.connect(location, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        # Readers do not wait for writers. A power cut loses the latest transactions only.
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
            self.run(f"PRAGMA {pragma}")

    def run(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        """The result rows of a statement."""
        with _as_store_error(sqlite3.Error), closing(self._connection.execute(statement, tuple(values))) as cursor:
            return cursor.fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all statements of the block, or none if it raises."""
        self.run("BEGIN IMMEDIATE")
        with _as_store_error(sqlite3.Error), self._connection:
            yield

    def schema_lock(self) -> AbstractContextManager[None]:
        """Nothing: each statement locks the file, and none is needed where the schema exists."""
        return nullcontext()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class PostgresDatabase:
    """A PostgreSQL database, by its URL. A broken connection is replaced at the next statement."""

    def __init__(self, url: str) -> None:
        try:
            self._psycopg: Any = importlib.import_module("psycopg")
        except ImportError as error:
            raise StoreError("a PostgreSQL URL needs psycopg: pip install 'kvcellar[postgres]'") from error
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
    def transaction(self) -> Iterator[None]:
        """Commit all statements of the block, or none if it raises."""
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


def is_url(location: str) -> bool:
    """Whether the location is a PostgreSQL URL, not a file."""
    return location.startswith(("postgresql://", "postgres://"))


def _make_private(path: Path) -> None:
    """Create the file readable for its user only: it contains text of users."""
    path.parent.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


@contextmanager
def _as_store_error(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise StoreError(str(error)) from error
