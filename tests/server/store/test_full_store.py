"""A full or locked disk: responses carry a warning, stored ones can be read, and freed space is used again."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.types.events import Delta, Event, Started
from engine.types.request import Request
from server.app import create_app
from server.responses.archive import NOT_STORED
from server.store import worker
from server.store.database import Database, connect
from tests.server.fakes import Answer, FakeEngine, Gate, call, finished, settings

PATH = "/v1/responses"
# Incompressible, so it fills pages of its own.
LONG = "".join(random.Random(7).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=30_000))


class Disk:
    """The database of one app; its file can be limited in size or made read-only."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self._opened = place, list[Database]()
        monkeypatch.setattr(worker, "connect", self._connect)

    def _connect(self, place: str) -> Database:
        self._opened.append(connect(place))
        return self._opened[-1]

    def fill(self) -> None:
        """Allow no further page."""
        for database in self._opened:
            ((pages,),) = database.run("PRAGMA page_count")
            database.run(f"PRAGMA max_page_count = {pages}")

    def drain(self) -> None:
        """Remove the limit of pages."""
        for database in self._opened:
            database.run("PRAGMA max_page_count = 1000000")

    def lock(self) -> None:
        """Make the database read-only."""
        self._opened[-1].run("PRAGMA query_only = ON")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path / "responses.sqlite", monkeypatch)


def generating(text: str, gate: Gate | None = None) -> FakeEngine:
    """An engine that generates a text behind a gate."""

    def script(request: Request) -> Iterator[Event | Gate]:
        yield Started(len(request.prompt), 0, 7)
        if gate is not None:
            yield gate
        yield Delta(text, (1,))
        yield finished(request)

    return FakeEngine(script)


def app_on(disk: Disk, engine: FakeEngine) -> Any:
    return create_app(engine, settings(store=str(disk.place)))  # type: ignore[arg-type]


async def post(app: Any, **body: Any) -> Answer:
    return await call(app, "POST", PATH, json_body={"input": "hi", **body})


async def get(app: Any, id: str) -> Answer:
    return await call(app, "GET", f"{PATH}/{id}")


def test_a_response_that_is_not_stored_has_a_warning(disk: Disk) -> None:
    """It is complete, with a warning and `store: false`; with free space again responses are stored."""

    async def story() -> tuple[Any, ...]:
        app = app_on(disk, generating(LONG))
        first = await post(app)
        disk.fill()
        full = await post(app)
        lost = await get(app, full.json["id"])
        kept = await get(app, first.json["id"])
        disk.drain()
        last = await post(app)
        return first.json, full, lost.status, kept.json, last.json, (await get(app, last.json["id"])).json

    first, full, lost, kept, last, read = asyncio.run(story())

    assert (200, "completed", False, [NOT_STORED]) == (
        full.status,
        *(full.json[n] for n in ("status", "store", "warnings")),
    )
    assert LONG == full.json["output"][0]["content"][0]["text"]
    assert 404 == lost
    assert (first, last) == (kept, read)
    assert "warnings" not in last


def test_a_stream_that_is_not_stored_ends_with_a_warning(disk: Disk) -> None:
    """The last event keeps its number and has the warning."""

    async def story() -> tuple[list[Any], list[Any]]:
        app = app_on(disk, generating(LONG))
        before = events(await post(app, stream=True))
        disk.fill()
        return before, events(await post(app, stream=True))

    before, full = asyncio.run(story())

    assert [event["type"] for event in before] == [event["type"] for event in full]
    assert list(range(len(full))) == [event["sequence_number"] for event in full]
    assert (False, [NOT_STORED]) == (full[-1]["response"]["store"], full[-1]["response"]["warnings"])


def events(answer: Answer) -> list[Any]:
    """The events of a stream with event names."""
    lines = answer.body.split(b"\n")
    return Answer(200, {}, b"\n\n".join(line for line in lines if line.startswith(b"data: "))).events


def test_a_background_response_needs_a_working_store(disk: Disk) -> None:
    """It could not be read later: 503 before the generation starts."""

    async def story() -> tuple[Answer, set[str]]:
        engine = generating("hi")
        app = app_on(disk, engine)
        await post(app)
        disk.lock()
        answer = await post(app, background=True)
        return answer, engine.running

    answer, running = asyncio.run(story())

    assert (503, "store_unavailable") == (answer.status, answer.json["error"]["code"])
    assert "10" == answer.headers["retry-after"]
    assert set() == running


def test_a_full_disk_has_its_own_status(disk: Disk) -> None:
    """507, which is not retried; what is stored can be deleted, which makes space."""

    # More than a page.
    metadata = {f"{start}": LONG[start : start + 500] for start in range(0, 8000, 500)}

    async def story() -> tuple[Answer, Answer, Answer]:
        app = app_on(disk, generating(LONG))
        first = await post(app)
        disk.fill()
        full = await post(app, background=True, metadata=metadata)
        deleted = await call(app, "DELETE", f"{PATH}/{first.json['id']}")
        return full, deleted, await post(app, background=True, metadata=metadata)

    full, deleted, again = asyncio.run(story())

    assert (507, "disk_full") == (full.status, full.json["error"]["code"])
    assert "false" == full.headers["x-should-retry"]
    assert [200, 200] == [deleted.status, again.status]


def test_a_full_disk_refuses_files_and_batches(disk: Disk) -> None:
    """With 507; what is stored can be read, and with free space again both are accepted."""
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "hi"}})

    async def story() -> tuple[list[Answer], Answer, list[Answer]]:
        app = app_on(disk, generating("hi"))
        first = await upload(app, line)
        request = {"input_file_id": first.json["id"], "endpoint": "/v1/responses", "completion_window": "24h"}
        metadata = {f"{start}": LONG[start : start + 500] for start in range(0, 8000, 500)}

        async def both() -> list[Answer]:
            batch = await call(app, "POST", "/v1/batches", json_body={**request, "metadata": metadata})
            return [await upload(app, LONG), batch]

        assert 200 == (await call(app, "GET", "/v1/batches")).status
        disk.fill()
        full = await both()
        kept = await call(app, "GET", f"/v1/files/{first.json['id']}/content")
        disk.drain()
        return full, kept, await both()

    full, kept, again = asyncio.run(story())

    assert [(507, "disk_full")] * 2 == [(answer.status, answer.json["error"]["code"]) for answer in full]
    assert (200, line.encode()) == (kept.status, kept.body)
    assert [200, 200] == [answer.status for answer in again], again


async def upload(app: Any, content: str) -> Answer:
    """The answer to the upload of a file for a batch."""
    disposition = "--B\r\nContent-Disposition: form-data; name="
    form = (
        f'{disposition}"purpose"\r\n\r\nbatch\r\n{disposition}"file"; filename="a.jsonl"\r\n\r\n{content}\r\n--B--\r\n'
    )
    headers = {"content-type": "multipart/form-data; boundary=B", "content-length": f"{len(form)}"}
    return await call(app, "POST", "/v1/files", body=form.encode(), headers=headers)


def test_a_background_response_not_stored_has_failed(disk: Disk) -> None:
    """Its start was stored, its end was not: reading it returns a failed response at once."""

    async def story() -> Any:
        gate = Gate()
        app = app_on(disk, generating(LONG, gate))
        id = (await post(app, background=True)).json["id"]
        await asyncio.to_thread(gate.reached.wait, 20)
        disk.fill()
        gate.open()
        for _ in range(1000):
            # It is complete until the store rejects it.
            if (answer := await get(app, id)).json["status"] == "failed":
                break
            await asyncio.sleep(0.01)
        return answer

    answer = asyncio.run(story())

    assert (200, "failed", NOT_STORED) == (answer.status, answer.json["status"], answer.json["error"]["message"])


def test_a_full_disk_can_still_be_read(disk: Disk) -> None:
    """Without the update of the time of last use, responses and conversations are still read."""

    async def story() -> tuple[Any, Any, Answer]:
        app = app_on(disk, generating("hi"))
        first = (await post(app)).json
        disk.lock()
        read = (await get(app, first["id"])).json
        return first, read, await post(app, previous_response_id=first["id"])

    first, read, followed = asyncio.run(story())

    assert first == read
    assert (200, [NOT_STORED]) == (followed.status, followed.json["warnings"])
