"""Two servers with one store: cancellation and deletion of a response that the other one generates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.types.events import Delta, Started
from server.app import create_app
from server.responses import archive, response_service
from server.store import store
from server.store.store import Record, ResponseStore
from tests.server.fakes import FakeEngine, Gate, ask, call, finished, settings

PATH = "/v1/responses"
BACKGROUND = {"input": "hi", "background": True}
PATIENCE_SECONDS = 20


@pytest.fixture
def quick_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed every 20 ms."""
    monkeypatch.setattr(response_service, "LEASE_SECONDS", 0.06)


async def until(done: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await done():
            await asyncio.sleep(0.01)


async def started(folder: Path) -> tuple[Any, Any, FakeEngine, str]:
    """The generating server and another one with its store, the engine, and the id of a response with some text."""
    gate = Gate()
    engine = FakeEngine(lambda request: [Started(1, 0, 1), Delta("Hel", (1,)), gate, finished(request)])
    using = settings(store=str(folder / "store.sqlite"))
    here, there = create_app(engine, using), create_app(FakeEngine(), using)  # type: ignore[arg-type]
    id = (await call(here, "POST", PATH, json_body=BACKGROUND)).json["id"]
    await asyncio.to_thread(gate.reached.wait, PATIENCE_SECONDS)
    return here, there, engine, id


@pytest.mark.usefixtures("quick_renewal")
def test_another_server_cancels_a_response(tmp_path: Path) -> None:
    """The generation stops, and the text and the events so far are stored beside the cancellation."""

    async def work() -> None:
        _, there, engine, id = await started(tmp_path)
        for _ in range(2):
            cancelled = (await call(there, "POST", f"{PATH}/{id}/cancel")).json
            assert "cancelled" == cancelled["status"]

        async def has_output() -> bool:
            found = (await call(there, "GET", f"{PATH}/{id}")).json
            assert "cancelled" == found["status"]
            return bool(found["output"])

        await until(has_output)
        found = (await call(there, "GET", f"{PATH}/{id}")).json
        events = (await call(there, "GET", f"{PATH}/{id}", query="stream=true")).body
        assert "Hel" == found["output"][0]["content"][0]["text"]
        assert b"event: response.created" == events.split(b"\n")[0]
        assert events.count(b"response.output_text.delta") >= 1
        assert set() == engine.running

    asyncio.run(work())


@pytest.mark.usefixtures("quick_renewal")
def test_another_server_deletes_a_response(tmp_path: Path) -> None:
    """The generation stops, and its end does not store the response again."""

    async def work() -> None:
        here, there, engine, id = await started(tmp_path)
        assert 200 == (await call(there, "DELETE", f"{PATH}/{id}")).status

        async def stopped() -> bool:
            return not engine.running and (await call(here, "GET", f"{PATH}/{id}")).status == 404

        await until(stopped)
        assert 404 == (await call(there, "GET", f"{PATH}/{id}")).status

    asyncio.run(work())


def test_a_response_in_the_background_is_queued_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the engine is faster than the store; and so it is stored."""
    put, stored = ResponseStore.put, list[Record]()

    async def slow(self: ResponseStore, record: Record, events: bytes = b"", **options: Any) -> None:
        stored.append(record)
        await asyncio.sleep(0.1)
        await put(self, record, events, **options)

    monkeypatch.setattr(ResponseStore, "put", slow)

    async def work() -> None:
        app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]
        answer = (await call(app, "POST", PATH, json_body=BACKGROUND)).json
        assert ("queued", []) == (answer["status"], answer["output"])
        assert b'"status":"queued"' in stored[0].body

        async def completed() -> bool:
            return bool((await call(app, "GET", f"{PATH}/{answer['id']}")).json["status"] == "completed")

        await until(completed)

    asyncio.run(work())


def test_a_conversation_that_is_too_long_names_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of as many responses as are allowed is continued."""
    limit = 20
    for module in (archive, store):
        monkeypatch.setattr(module, "MAX_HISTORY", limit)
    place = str(tmp_path / "store.sqlite")

    async def fill() -> None:
        responses = ResponseStore(place)
        for number in range(limit + 2):
            previous = f"r{number - 1}" if number else None
            await responses.put(Record(f"r{number}", previous, True, b'{"output":[]}', b"[]"))
        responses.close()

    asyncio.run(fill())
    app = create_app(FakeEngine(), settings(store=place))  # type: ignore[arg-type]
    answers = [
        ask(app, "POST", PATH, json_body={"input": "hi", "previous_response_id": f"r{number}"})
        for number in (limit - 1, limit, limit + 1)
    ]

    assert [200, 400, 400] == [answer.status for answer in answers]
    for answer in answers[1:]:
        error = answer.json["error"]
        assert ("invalid_value", "previous_response_id") == (error["code"], error["param"])
        assert "more than 20 responses" in error["message"]
