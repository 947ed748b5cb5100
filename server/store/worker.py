"""A database used by one worker thread, so that no query blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.store.database import Database, Row, StoreError, StoreFullError, Value, connect, release_reserve

Result = TypeVar("Result")


class DatabaseWorker:
    """One connection, opened at its first use. Work on it may raise StoreError.

    schema   statements that create what is missing
    migrate  changes the tables of earlier versions
    """

    def __init__(self, location: str, schema: Sequence[str], migrate: Callable[[Database], None] | None = None) -> None:
        self._location, self._schema, self._migrate = location, schema, migrate
        self._database: Database | None = None
        # Whether the disk was full since the last work that freed space.
        self._full = False
        self._thread = ThreadPoolExecutor(1, "store")

    async def run(self, work: Callable[[Database], Result], *, frees: bool = False) -> Result:
        """The result of `work`, which the thread runs; on a full disk twice.

        frees  it frees space, so on a full disk it may use the reserve
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._run(work, frees))

    async def query(self, statement: str, values: Sequence[Value] = (), *, frees: bool = False) -> list[Row]:
        """The rows of one statement."""
        return await self.run(lambda database: database.run(statement, values), frees=frees)

    def close(self) -> None:
        """Finish pending work and close the connection."""
        self._thread.shutdown()
        if self._database is not None:
            self._database.close()

    def _run(self, work: Callable[[Database], Result], frees: bool) -> Result:
        database = self._connected()
        try:
            result = work(database)
        except StoreFullError:
            self._full = True
            if not database.reclaim(reserve=frees):
                raise
            result = work(database)
        if frees:
            if self._full:
                # The next write needs the log, too.
                database.reclaim(reserve=True)
                self._full = False
            database.reserve()
        return result

    def _connected(self) -> Database:
        if self._database is None:
            try:
                self._database = self._open()
            except StoreFullError:
                # Also to read and to delete, the files of the log are needed.
                release_reserve(self._location)
                self._database = self._open()
            self._database.reserve()
        return self._database

    def _open(self) -> Database:
        database = connect(self._location)
        try:
            with database.schema_lock():
                for statement in self._schema:
                    database.run(statement)
                if self._migrate is not None:
                    self._migrate(database)
        except StoreError:
            database.close()
            raise
        return database
