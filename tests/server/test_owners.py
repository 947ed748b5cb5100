"""Owners: on every route the request of the engine has the owner of its key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.app import create_app
from server.configuration.settings import Settings
from tests.server.fakes import FakeEngine, Gate, ask, call, settings

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "fake", "messages": MESSAGES, "max_tokens": 4},
    "/api/chat": {"model": "fake", "messages": MESSAGES, "stream": False},
    "/api/generate": {"model": "fake", "prompt": "hi", "stream": False},
    "/v1/embeddings": {"input": "hi"},
}
KEYS = ("wines:a", "wines:b", "c")


def salts(path: str, keys: tuple[str, ...]) -> list[bytes]:
    """The salts of the same request with each key."""
    engine = FakeEngine()
    app = create_app(engine, settings(keys=keys))  # type: ignore[arg-type]
    for key in keys:
        secret = key.rpartition(":")[2]
        ask(app, "POST", path, json_body=BODIES[path], headers={"authorization": f"Bearer {secret}"})
    assert len(keys) == len(engine.requests)
    return [request.salt for request in engine.requests]


@pytest.mark.parametrize("path", BODIES)
def test_every_route_separates_owners(path: str) -> None:
    """Keys of one organisation have one salt, another key has another; none is empty."""
    one, same, other = salts(path, KEYS)

    assert one == same != other
    assert b"" not in (one, other)


@pytest.mark.parametrize("path", BODIES)
def test_a_key_keeps_its_salt(path: str) -> None:
    """With and without a second key: its prefixes on disk are found again."""
    assert salts(path, ("a",)) == salts(path, ("a", "b"))[:1] != [b""]


@pytest.mark.parametrize("path", BODIES)
def test_ids_of_owners_do_not_collide(path: str) -> None:
    """Request ids of two owners differ."""
    engine = FakeEngine()
    app = create_app(engine, settings(keys=("a", "b")))  # type: ignore[arg-type]
    for key in ("a", "b"):
        ask(app, "POST", path, json_body=BODIES[path], headers={"authorization": f"Bearer {key}"})
    owners = [request.id.partition("/")[0] for request in engine.requests]

    assert 2 == len({*owners})


@pytest.mark.parametrize("key", ["wines:a", "a"])
def test_a_whole_entry_with_a_colon_is_a_key(key: str) -> None:
    """A key that has a colon in it keeps its meaning."""
    app = create_app(FakeEngine(), settings(keys=KEYS))  # type: ignore[arg-type]

    assert 200 == ask(app, "GET", "/v1/models", headers={"authorization": f"Bearer {key}"}).status


@pytest.mark.parametrize("key", ["wines", "wines:", ":a", "wines:c"])
def test_the_name_of_an_organisation_is_no_key(key: str) -> None:
    """Neither alone nor with a key that is not its own."""
    app = create_app(FakeEngine(), settings(keys=KEYS))  # type: ignore[arg-type]

    assert 401 == ask(app, "GET", "/v1/models", headers={"authorization": f"Bearer {key}"}).status


def test_a_key_belongs_to_one_organisation() -> None:
    """A key in two organisations is refused."""
    with pytest.raises(ValueError, match="a key of beers and wines twice"):
        Settings(keys=("wines:a", "beers:a")).check()


def test_the_background_is_shared_evenly_by_owners() -> None:
    """Where one has all the responses in the background that there may be, another gets its share all the same."""
    gate = Gate()
    app = create_app(FakeEngine(lambda request: [gate]), settings(keys=("a", "b"), max_waiting=8))  # type: ignore[arg-type]

    async def story() -> list[int]:
        counts = []
        for key in ("a", "b", "a"):
            headers = {"authorization": f"Bearer {key}"}
            body = {"input": "hi", "background": True}
            statuses = [
                (await call(app, "POST", "/v1/responses", json_body=body, headers=headers)).status for _ in range(6)
            ]
            assert {*statuses} <= {200, 429}
            counts.append(statuses.count(200))
        gate.open()
        return counts

    assert [4, 2, 0] == asyncio.run(story())
