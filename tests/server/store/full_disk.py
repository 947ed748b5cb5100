"""Stores on a small disk that another program fills; run by test_full_disk.py. Prints what happens."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from random import Random

from server.store.batches import BatchStore
from server.store.database import StoreFullError
from server.store.files import FileStore, StoredFile
from server.store.store import Record, ResponseStore

# Incompressible.
CHUNK = Random(7).randbytes(2**20)


async def chunks(count: int) -> AsyncIterator[bytes]:
    """The content of an upload."""
    for _ in range(count):
        yield CHUNK


def fill(folder: Path) -> None:
    """Leave no byte on the disk."""
    with open(folder / "other", "ab", 0) as file:
        try:
            while file.write(CHUNK[:512]):
                pass
        except OSError:
            return


async def attempt(work: Awaitable[object]) -> object:
    """The result, or "full"."""
    try:
        return await work
    except StoreFullError:
        return "full"


async def main(folder: Path) -> dict[str, object]:
    place, found = str(folder / "store.sqlite"), dict[str, object]()
    responses, files, batches = ResponseStore(place), FileStore(place, 10**9), BatchStore("me", place)

    def upload(id: str, count: int) -> Awaitable[object]:
        return attempt(files.create(StoredFile(id, "", "batch", "name", 1), chunks(count)))

    record = Record("r", None, True, CHUNK[:200_000], b"[]")
    await responses.put(record)
    await batches.create("b", "", b"{}")
    for id in ("a", "b", "c"):
        await upload(id, 5)
    fill(folder)
    found["upload"] = await upload("d", 5)
    fill(folder)
    found["cancel"] = await attempt(batches.cancel("b", "")) not in (None, "full")
    found["deleted"] = [await attempt(files.delete(id, "")) for id in ("a", "b")]
    found["put"] = await attempt(responses.put(Record("s", None, True, CHUNK[:600_000], b"[]")))
    fill(folder)
    found["deleted then"] = [await attempt(files.delete("c", "")), await attempt(responses.delete("r"))]
    for store in (responses, files, batches):
        store.close()

    (folder / "other").unlink()
    responses = ResponseStore(place)
    await responses.open()
    responses.close()
    fill(folder)
    # Not even the files of the log have space.
    responses, files = ResponseStore(place), FileStore(place, 10**9)
    found["restarted"] = [(await responses.get("s")) is not None, await attempt(responses.delete("s"))]
    found["upload after all"] = await upload("e", 3) != "full"
    for opened in (responses, files):
        opened.close()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
