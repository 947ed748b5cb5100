"""Restarts over one store with other API keys: who sees which response, file, batch and prefix (docs/keys.md)."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from server.app import create_app
from server.http.auth import first_owner
from server.store.batches import BatchStore
from server.store.files import FileStore, StoredFile
from server.store.store import ResponseStore
from tests.server.fakes import Answer, FakeEngine, call, settings
from tests.server.store.test_batches import content
from tests.server.store.test_store import record

# Keys of a start, the key that stores something ("": without a key), and what each key sees: numbers of starts.
Start = tuple[tuple[str, ...], str, dict[str, set[int]]]
STORIES: dict[str, list[Start]] = {
    "none, one, two and back": [
        ((), "", {"": {0}}),
        (("a",), "a", {"a": {0, 1}}),
        (("a", "b"), "b", {"a": {0, 1}, "b": {2}}),
        (("a",), "a", {"a": {0, 1, 3}}),
        (("b",), "b", {"b": {2, 4}}),
        ((), "", {"": {5}}),
    ],
    "the only key is replaced": [
        (("a",), "a", {"a": {0}}),
        (("b",), "b", {"b": {1}}),
        (("b", "a"), "a", {"b": {1}, "a": {0, 2}}),
    ],
    "none, two": [((), "", {"": {0}}), (("b", "a"), "a", {"b": {0}, "a": {1}})],
    "none, an organisation": [
        ((), "", {"": {0}}),
        (("wines:a", "wines:b", "c"), "b", {"a": {0, 1}, "b": {0, 1}, "c": set()}),
    ],
    "a key moves into an organisation": [(("a",), "a", {"a": {0}}), (("wines:a",), "a", {"a": {1}})],
}
UPLOAD = b"""--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r
--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n--b--\r\n"""
BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


class Server:
    """An app over a store, with requests of any key."""

    def __init__(self, place: Path, keys: tuple[str, ...]) -> None:
        self.engine = FakeEngine()
        self._app = create_app(self.engine, settings(store=str(place), keys=keys))  # type: ignore[arg-type]

    async def call(self, key: str, method: str, path: str, **options: Any) -> Answer:
        """One request."""
        headers = {**options.pop("headers", {}), **({"authorization": f"Bearer {key}"} if key else {})}
        return await call(self._app, method, path, headers=headers, **options)

    async def store(self, key: str) -> dict[str, str]:
        """The ids of a new response, file and batch, by path."""
        response = await self.call(key, "POST", "/v1/responses", json_body={"input": "hi"})
        form = {"content-type": "multipart/form-data; boundary=b"}
        file = await self.call(key, "POST", "/v1/files", body=UPLOAD, headers=form)
        batch = await self.call(key, "POST", "/v1/batches", json_body={**BATCH, "input_file_id": file.json["id"]})
        made = {"/v1/responses": response, "/v1/files": file, "/v1/batches": batch}
        return {path: answer.json["id"] for path, answer in made.items()}

    async def visible(self, key: str, ids: list[dict[str, str]]) -> dict[str, set[int]]:
        """The numbers of the starts whose things a key reads, by kind and path."""
        found: dict[str, set[int]] = {}
        for path in ("/v1/responses", "/v1/files", "/v1/batches"):
            answers = [await self.call(key, "GET", f"{path}/{one[path]}") for one in ids]
            found[path] = {number for number, answer in enumerate(answers) if answer.status == 200}
        for path in ("/v1/files", "/v1/batches"):
            listed = {one["id"] for one in (await self.call(key, "GET", path)).json["data"]}
            found[f"list of {path}"] = {number for number, one in enumerate(ids) if one[path] in listed}
        downloads = [await self.call(key, "GET", f"/v1/files/{one['/v1/files']}/content") for one in ids]
        found["downloads"] = {number for number, answer in enumerate(downloads) if answer.status == 200}
        continued = [
            await self.call(
                key, "POST", "/v1/responses", json_body={"input": "x", "previous_response_id": one["/v1/responses"]}
            )
            for one in ids
        ]
        found["conversations"] = {number for number, answer in enumerate(continued) if answer.status == 200}
        return found


@pytest.mark.parametrize("story", STORIES)
def test_a_restart_with_other_keys(story: str, tmp_path: Path) -> None:
    """Each key sees its own; the first key also what was stored without a key. Only the same key has the same salt."""

    async def work() -> None:
        ids: list[dict[str, str]] = []
        salts: dict[str, set[bytes]] = {}
        for keys, storing, expected in STORIES[story]:
            server = Server(tmp_path / "store.sqlite", keys)
            ids.append(await server.store(storing))
            for key, numbers in expected.items():
                seen = await server.visible(key, ids)
                assert dict.fromkeys(seen, numbers) == seen, (keys, key)
                for one in (one for number, one in enumerate(ids) if number not in numbers):
                    for path, id in one.items():
                        assert 404 == (await server.call(key, "DELETE", f"{path}/{id}")).status or "batches" in path
                        assert 404 == (await server.call(key, "POST", f"{path}/{id}/cancel")).status
            entry = next((entry for entry in keys if entry.endswith(storing)), "")
            salts.setdefault(entry, set()).add(server.engine.requests[0].salt)
        assert all(len(found) == 1 for found in salts.values())
        assert len(salts) == len(set[bytes]().union(*salts.values()))

    asyncio.run(work())


def test_rows_without_an_owner_are_adopted(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """By the first owner when the database is opened, with a line in the log; in SQLite and PostgreSQL."""
    if place == ":memory:":
        pytest.skip("memory is empty at each start")
    me = first_owner(["mine", "yours"])

    async def work() -> None:
        for owner in ("", me):
            responses = ResponseStore(place, first_owner=owner)
            files, batches = FileStore(place, 1000, first_owner=owner), BatchStore("x", place, first_owner=owner)
            if not owner:
                await responses.put(record("r"))
                await files.create(StoredFile("f", "", "batch", "name", 1), content(b"x"))
                await batches.create("b", "", b"{}")
            found = [await responses.get("r", me), await files.get("f", me), await batches.get("b", me)]
            assert [bool(owner)] * 3 == [one is not None for one in found]
            for store in (responses, files, batches):
                store.close()

    with caplog.at_level("INFO", "cellar.store"):
        asyncio.run(work())
    assert ["batches", "files", "responses"] == sorted(str(line.args[1]) for line in caplog.records if line.args)  # type: ignore[index]


def test_a_read_only_store_is_read_without_adoption(tmp_path: Path) -> None:
    """Rows without an owner stay hidden until a later start can change them."""
    place = tmp_path / "store.sqlite"

    async def read(first: str, id: str) -> bool:
        store = ResponseStore(str(place), first_owner=first)
        found = await store.get(id, "me")
        store.close()
        return found is not None

    async def work() -> None:
        store = ResponseStore(str(place))
        await store.put(record("old"))
        await store.put(record("mine", owner="me"))
        store.close()
        with closing(sqlite3.connect(place)) as other:
            other.execute("CREATE TRIGGER fixed BEFORE UPDATE ON responses BEGIN SELECT RAISE(ABORT, 'full'); END")
        assert [False, True] == [await read("me", "old"), await read("me", "mine")]
        with closing(sqlite3.connect(place)) as other:
            other.execute("DROP TRIGGER fixed")
        assert await read("me", "old")

    asyncio.run(work())
