"""Leases of the model: held while a request uses it, and released however the request ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from engine.errors import Overloaded
from engine.types.events import Event, Failed
from engine.types.request import Request
from server.app import create_app
from tests.server.fakes import FakeEngine, Gate, ask, call, settings, speak

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "fake", "messages": MESSAGES, "max_tokens": 5}
PROMPT = {"model": "fake", "prompt": "Hi", "max_tokens": 5}
GENERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", PROMPT),
    ("/v1/messages", CHAT),
    ("/v1/responses", {"model": "fake", "input": "Hi"}),
    ("/api/chat", {"model": "fake", "messages": MESSAGES}),
    ("/api/generate", {"model": "fake", "prompt": "Hi"}),
    ("/completion", {"prompt": "Hi", "n_predict": 5}),
]
ENGINE = FakeEngine()
BODIES = [(path, {**body, "stream": stream}) for path, body in GENERATIONS for stream in (False, True)]
OTHERS = [
    ("GET", "/v1/models", None),
    ("GET", "/v1/capabilities", None),
    ("GET", "/metrics", None),
    ("GET", "/api/tags", None),
    ("POST", "/tokenize", {"model": "fake", "prompt": "Hi"}),
    ("POST", "/api/create", {"model": "other", "from": "fake", "stream": False}),
]


@pytest.fixture(scope="module")
def app() -> Any:
    """One app for all tests: each sets the script of ENGINE."""
    return create_app(ENGINE, settings())


@pytest.fixture(autouse=True)
def _fresh_engine() -> None:
    ENGINE.script, ENGINE.refusal = speak, None


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_generation_holds_the_model_until_its_end(app: Any, path: str, body: dict[str, Any]) -> None:
    held = _observe_leases(app)

    assert 200 == ask(app, "POST", path, json_body=body).status
    assert min(held) > 0
    assert 0 == app.state.models.leases.held


@pytest.mark.parametrize(("method", "path", "body"), OTHERS)
def test_other_requests_release_the_model(app: Any, method: str, path: str, body: dict[str, Any] | None) -> None:
    assert 200 == ask(app, method, path, json_body=body).status
    assert 0 == app.state.models.leases.held


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_error_releases_the_model(app: Any, path: str, body: dict[str, Any]) -> None:
    """A failure amid the answer, a refusal of the engine, and a name that is not served."""
    ENGINE.script = _fail
    statuses = [ask(app, "POST", path, json_body=body).status]
    held = [app.state.models.leases.held]
    ENGINE.refusal = Overloaded(1, 1.0)
    statuses.append(ask(app, "POST", path, json_body=body).status)
    held.append(app.state.models.leases.held)
    ENGINE.refusal = None
    statuses.append(ask(app, "POST", path, json_body={**body, "model": "absent"}).status)
    held.append(app.state.models.leases.held)

    assert statuses == [200 if body["stream"] else 500, 429, 404]
    assert held == [0, 0, 0]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_disconnect_releases_the_model(app: Any, path: str, body: dict[str, Any]) -> None:
    gate = Gate()
    held = _observe_leases(app, gate)

    async def leaving(scope: Any, receive: Any, send: Any) -> None:
        asked = False

        async def receive_and_leave() -> Any:
            nonlocal asked
            if not asked:
                asked = True
                return await receive()
            while not gate.reached.is_set():
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        await app(scope, receive_and_leave, send)

    ask(leaving, "POST", path, json_body=body)

    assert min(held) > 0
    assert 0 == app.state.models.leases.held


def test_a_response_in_the_background_holds_the_model_after_its_request(app: Any) -> None:
    gate = Gate()
    _observe_leases(app, gate)
    leases = app.state.models.leases

    async def story() -> None:
        body = {"model": "fake", "input": "Hi", "background": True}
        assert 200 == (await call(app, "POST", "/v1/responses", json_body=body)).status
        assert 1 == leases.held
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        gate.open()
        while leases.held:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(story(), 10))
    assert 0 == leases.held


def _observe_leases(app: Any, gate: Gate | None = None) -> list[int]:
    """The number of leases at the begin of each generation, which stops at the gate."""
    held: list[int] = []

    def script(request: Request) -> Iterator[Event | Gate]:
        held.append(app.state.models.leases.held)
        if gate is not None:
            yield gate
        yield from speak(request)

    ENGINE.script = script
    return held


def _fail(request: Request) -> Iterator[Event]:
    first, *_ = speak(request)
    yield first
    yield Failed("broken")
