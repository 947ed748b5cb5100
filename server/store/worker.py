"""A database behind one worker thread, so that no query blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.store.database import Database, Row, Value, connect

Result = TypeVar("Result")


class DatabaseWorker:
    """One connection, opened at its first use. Work on it may raise StoreError.

    schema   statements that create what is missing
    migrate  changes the tables of earlier versions
    """

    def __init__(self, location: str, schema: Sequence[str], migrate: Callable[[Database], None] | None = None) -> None:
        self._location, self._schema, self._migrate = location, schema, migrate
        self._database: Database | None = None
        self._thread = ThreadPoolExecutor(1, "store")

    async def run(self, work: Callable[[Database], Result]) -> Result:
        """The result of `work`, which the thread runs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._connected()))

    async def query(self, statement: str, values: Sequence[Value] = ()) -> list[Row]:
        """The rows of one statement."""
        return await self.run(lambda database: database.run(statement, values))

    def close(self) -> None:
        """Finish pending work and close the connection."""
        self._thread.shutdown()
        if self._database is not None:
            self._database.close()

    def _connected(self) -> Database:
        if self._database is None:
            database = connect(self._location)
            with database.schema_lock():
                for statement in self._schema:
                    database.run(statement)
                if self._migrate is not None:
                    self._migrate(database)
            self._database = database
        return self._database
