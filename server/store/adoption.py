"""Rows without an owner: those of a server without keys, and of earlier versions with a single key."""

from __future__ import annotations

import logging

from server.store.database import Database, StoreError

logger = logging.getLogger("cellar.store")


def adopt(database: Database, table: str, owner: str) -> None:
    """Give the rows of a table that have no owner to `owner`; "": they stay as they are."""
    if not owner:
        return
    try:
        # Without it each start reads the whole table: `owner` may be stored after long columns.
        database.run(f"CREATE INDEX IF NOT EXISTS {table}_without_owner ON {table} (id) WHERE owner = ''")
        rows = database.run(f"UPDATE {table} SET owner = ? WHERE owner = '' RETURNING id", [owner])
    except StoreError as error:
        # A full or read-only disk is still read. No key reads such a row until a later start adopts it.
        logger.warning("rows of '%s' without an owner could not be given to the first key: %s", table, error)
        return
    if rows:
        logger.info("%d rows of '%s', stored without a key, belong to the first key now", len(rows), table)
