"""Requests, tokens and refusals by API key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.errors import Overloaded
from server.app import create_app
from tests.server.fakes import FakeEngine, ask, serve_in_thread, settings
from tests.server.wire import connected, exchange, get, post, read_until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = """
[[key]]
key = "user"
organisation = "wines"
scopes = ["use"]
requests_per_minute = 2
[[key]]
key = "admin"
"""


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return str(path)


def counts(text: str) -> dict[str, float]:
    """The counters of keys, by name and labels."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if re.match(r"cellar_key_\w+_total", line)]
    return {name: float(value) for name, value in lines}


def scrape(app: Any, key: str) -> dict[str, float]:
    return counts(ask(app, "GET", "/metrics", headers={"x-api-key": key}).body.decode())


def test_what_a_key_uses_is_counted_and_shown_to_it_and_to_admins(key_file: str) -> None:
    app = create_app(FakeEngine(), settings(key_file=key_file))  # type: ignore[arg-type]
    headers = {"x-api-key": "user"}
    answers = [ask(app, "POST", "/v1/chat/completions", json_body=CHAT, headers=headers) for _ in range(3)]
    refused = ask(app, "POST", "/api/pull", json_body={}, headers=headers)
    other = ask(app, "POST", "/v1/chat/completions", json_body={**CHAT, "n": 2}, headers={"x-api-key": "admin"})

    assert [answer.status for answer in (*answers, refused, other)] == [200, 200, 429, 403, 200]
    usage, other_usage = answers[0].json["usage"], other.json["usage"]
    own_counts = {
        'cellar_key_requests_total{key="wines"}': 3,
        'cellar_key_prompt_tokens_total{key="wines"}': 2 * usage["prompt_tokens"],
        'cellar_key_generation_tokens_total{key="wines"}': 2 * usage["completion_tokens"],
        'cellar_key_refusals_total{key="wines",reason="key_limit_reached"}': 1,
        'cellar_key_refusals_total{key="wines",reason="scope_required"}': 1,
    }
    assert scrape(app, "user") == own_counts
    all_counts = scrape(app, "admin")
    assert own_counts.items() < all_counts.items()
    assert sorted(all_counts[name] for name in all_counts.keys() - own_counts.keys()) == sorted(
        [1, other_usage["prompt_tokens"], other_usage["completion_tokens"]]
    )


def test_refusals_of_a_full_queue_are_counted_before_the_app_and_by_it(key_file: str) -> None:
    with serve_in_thread(FakeEngine(refusal=Overloaded(9, 3.0)), settings(key_file=key_file)) as port:
        with connected(port) as client:
            for extra in ((), ("X-Twice: 1", "X-Twice: 2")):
                client.sendall(post("/v1/completions", CHAT, "X-Api-Key: admin", *extra))
                assert b" 429 " in read_until(client, b"}}")
        text = exchange(port, get("/metrics", "X-Api-Key: admin", "Connection: close")).decode()

    assert list(counts(text).values()) == [2, 2]


def test_without_keys_nothing_is_counted() -> None:
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]
    ask(app, "POST", "/v1/chat/completions", json_body=CHAT)

    assert counts(ask(app, "GET", "/metrics").body.decode()) == {}
