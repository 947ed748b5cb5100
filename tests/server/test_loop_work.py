"""What a small request makes the event loop do: counted, not timed."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable
from typing import Any

import anyio.to_thread
import fastapi.routing
import pytest

from server import service
from server.app import create_app
from server.http import version
from tests.server.fakes import FakeEngine, ask, call, settings

REQUESTS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": "hi", "max_tokens": 1}, 1),
    ("/v1/completions", {"prompt": [1, 2], "max_tokens": 1}, 0),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, 1),
    ("/v1/messages", {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, 1),
    ("/api/chat", {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": False}, 1),
]


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(), settings())  # type: ignore[arg-type]


def counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """The calls of a function from now on."""
    plain: Callable[..., Any] = getattr(owner, name)
    calls: list[Any] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return plain(*args, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_the_version_is_read_once(monkeypatch: pytest.MonkeyPatch, app: Any) -> None:
    """It parses the metadata of the distribution, which took a quarter of the loop's time of a short request."""
    version.version.cache_clear()
    service._fingerprint.cache_clear()
    calls = counting(monkeypatch, importlib.metadata, "version")
    for path, body, _ in REQUESTS:
        assert 200 == ask(app, "POST", path, json_body=body).status

    assert 1 == len(calls)


@pytest.mark.parametrize(("path", "body", "hops"), REQUESTS)
def test_a_small_body_takes_one_worker_thread_at_most(
    monkeypatch: pytest.MonkeyPatch, app: Any, path: str, body: dict[str, Any], hops: int
) -> None:
    """For its prompt; it is parsed, validated and translated where it comes."""
    calls = counting(monkeypatch, anyio.to_thread, "run_sync")

    assert 200 == ask(app, "POST", path, json_body=body).status
    assert hops == len(calls)


@pytest.mark.parametrize(("path", "body"), [request[:2] for request in REQUESTS])
def test_no_parameters_are_solved_for_a_body(
    monkeypatch: pytest.MonkeyPatch, app: Any, path: str, body: dict[str, Any]
) -> None:
    """An endpoint of a body alone is called with it; parameters of paths and queries are FastAPI's."""
    calls = counting(monkeypatch, fastapi.routing, "solve_dependencies")

    assert 200 == ask(app, "POST", path, json_body=body).status
    assert [] == calls
    assert 404 == ask(app, "GET", "/v1/responses/resp_none").status
    assert 1 == len(calls)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_disconnect_detection_takes_one_task(monkeypatch: pytest.MonkeyPatch, app: Any, path: str) -> None:
    """The work itself runs in the task of the request."""
    body = next(body for name, body, _ in REQUESTS if name == path)

    async def counted() -> int:
        calls = counting(monkeypatch, asyncio, "create_task")
        assert 200 == (await call(app, "POST", path, json_body=body)).status
        return len(calls)

    assert 1 == asyncio.run(counted())
