"""Where rows are kept: SQLite, in a file or in memory, or PostgreSQL. One statement, one answer, one thread at a time.

Statements are written once for both: `?` for values, BLOB for bytes, and nothing that only one of them knows.
"""

from __future__ import annotations

import importlib
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

MEMORY = ":memory:"
BUSY_SECONDS = 10.0

Value = str | int | float | bytes | None
Row = tuple[Any, ...]


class StoreError(Exception):
    """The database is out of reach, full or broken."""


class Database(Protocol):
    """One connection. Everything raises StoreError."""

    def run(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        """The rows that a statement answers with."""

    def transaction(self) -> AbstractContextManager[None]:
        """All statements of the block, or none if it raises."""

    def close(self) -> None:
        """End the connection."""


class SqliteDatabase:
    """A file, or memory that ends with the connection. Several processes may have the same file open."""

    def __init__(self, location: str) -> None:
        with _as_store_error(sqlite3.Error, OSError):
            if location != MEMORY:
                _make_private(Path(location))
            # Which thread it is does not matter, as long as they take turns.
            self._connection = sqlite3.connect(location, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        # Readers do not wait for writers. What a power cut loses is the latest, never the whole.
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
            self.run(f"PRAGMA {pragma}")

    def run(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        """The rows that a statement answers with."""
        with _as_store_error(sqlite3.Error), closing(self._connection.execute(statement, tuple(values))) as cursor:
            return cursor.fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements of the block, or none if it raises."""
        self.run("BEGIN IMMEDIATE")
        with _as_store_error(sqlite3.Error), self._connection:
            yield

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


class PostgresDatabase:
    """A database of PostgreSQL, by its URL. A connection that broke is made anew for the next statement."""

    def __init__(self, url: str) -> None:
        try:
            self._psycopg: Any = importlib.import_module("psycopg")
        except ImportError as error:
            raise StoreError("a PostgreSQL URL needs psycopg: pip install 'kvcellar[postgres]'") from error
        self._url = url
        self._current: Any = None

    def run(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        """The rows that a statement answers with."""
        statement = statement.replace("BLOB", "BYTEA").replace("?", "%s")
        with _as_store_error(self._psycopg.Error):
            cursor = self._connection.execute(statement, tuple(values) or None)
            rows: list[Row] = cursor.fetchall() if cursor.description else []
            return rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements of the block, or none if it raises."""
        with _as_store_error(self._psycopg.Error), self._connection.transaction():
            yield

    def close(self) -> None:
        """End the connection."""
        if self._current is not None:
            self._current.close()

    @property
    def _connection(self) -> Any:
        if self._current is None or self._current.closed:
            self._current = self._psycopg.connect(self._url, autocommit=True, connect_timeout=int(BUSY_SECONDS))
        return self._current


def connect(location: str) -> Database:
    """The database at a URL of PostgreSQL, in a file, or in memory; StoreError says why there is none."""
    return PostgresDatabase(location) if is_url(location) else SqliteDatabase(location)


def is_url(location: str) -> bool:
    """Whether it names a PostgreSQL database rather than a file."""
    return location.startswith(("postgresql://", "postgres://"))


def _make_private(path: Path) -> None:
    """The file holds what users wrote: it is nobody else's to read."""
    path.parent.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


@contextmanager
def _as_store_error(*faults: type[Exception]) -> Iterator[None]:
    try:
        yield
    except faults as error:
        raise StoreError(str(error)) from error
