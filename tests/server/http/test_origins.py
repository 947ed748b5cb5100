"""CORS: only pages of allowed origins may call the server from a browser."""

from __future__ import annotations

from typing import Any

import pytest

from server.app import create_app
from server.configuration.settings import Settings
from tests.server.fakes import FakeEngine, ask, settings

PAGE = "https://chat.example.org"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def app() -> Any:
    using = settings(allowed_hosts=("https://Chat.Example.org",), keys=("secret",), limits={"body_bytes": 1000})
    return create_app(FakeEngine(), using)  # type: ignore[arg-type]


def asks(origin: str, method: str = "POST") -> dict[str, str]:
    """The headers of a preflight request."""
    wanted = "authorization,content-type,x-stainless-os"
    return {"origin": origin, "access-control-request-method": method, "access-control-request-headers": wanted}


def test_an_allowed_origin_may_send_a_key_and_json(app: Any) -> None:
    """A preflight request has no key; from a public page it also asks for private networks."""
    answer = ask(app, "OPTIONS", CHAT, headers={**asks(PAGE), "access-control-request-private-network": "true"})

    assert 200 == answer.status
    assert PAGE == answer.headers["access-control-allow-origin"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization,content-type,x-stainless-os" == answer.headers["access-control-allow-headers"]
    assert "true" == answer.headers["access-control-allow-private-network"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 200),
        ({"headers": {}}, 401),
        ({"json_body": {**BODY, "user": "x" * 1000}}, 413),
        ({"headers": {"content-type": "text/plain"}}, 415),
        ({"headers": {"host": "evil.example"}}, 421),
    ],
)
def test_an_allowed_origin_reads_every_response(app: Any, changes: dict[str, Any], status: int, stream: bool) -> None:
    """Errors included, with the exposed headers."""
    sent = {"json_body": BODY, "headers": {"authorization": "Bearer secret"}, **changes}

    answer = ask(
        app,
        "POST",
        CHAT,
        json_body={**sent["json_body"], "stream": stream},
        headers={**sent["headers"], "origin": PAGE},
    )

    assert (status, PAGE) == (answer.status, answer.headers["access-control-allow-origin"])
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "Origin" in answer.headers["vary"]


@pytest.mark.parametrize(
    ("origin", "method"),
    [
        ("https://evil.example", "POST"),
        ("null", "POST"),
        ("http://chat.example.org", "POST"),
        ("https://chat.example.org.evil.example", "POST"),
        ("https://chat.example.org:8443", "POST"),
        (PAGE, "PUT"),
    ],
)
def test_other_origins_are_rejected(app: Any, origin: str, method: str) -> None:
    """Simple requests are answered, but no browser lets the page read the response."""
    refused = ask(app, "OPTIONS", CHAT, headers=asks(origin, method))
    answer = ask(app, "GET", "/health", headers={"origin": origin})

    assert (403, "origin_not_allowed") == (refused.status, refused.json["error"]["code"])
    assert "access-control-allow-origin" not in refused.headers
    assert (origin == PAGE) == ("access-control-allow-origin" in answer.headers)


@pytest.mark.parametrize("hosts", [(), ("cellar.example",), ("*",)])
def test_no_origin_is_allowed_by_default(hosts: tuple[str, ...]) -> None:
    """An allowed host is no allowed origin."""
    app = create_app(FakeEngine(), settings(allowed_hosts=hosts))  # type: ignore[arg-type]

    assert 405 == ask(app, "OPTIONS", CHAT, headers=asks(PAGE)).status
    answer = ask(app, "POST", CHAT, json_body=BODY, headers={"origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin", ["https://*", "*://x", "https://x/", "https://x/chat", "://x", "https://", "a b://x"]
)
def test_an_origin_needs_scheme_and_host(origin: str) -> None:
    """Values that no browser sends are rejected at the start, and so is *."""
    with pytest.raises(ValueError, match="is no origin"):
        Settings(allowed_hosts=(origin,)).check()


def test_an_origin_is_not_an_allowed_host() -> None:
    """The scheme distinguishes them."""
    both = Settings(allowed_hosts=("x.example", "http://localhost:3000", "chrome-extension://abc"))

    assert ("localhost", "127.0.0.1", "[::1]", "127.0.0.1", "x.example") == both.hosts
    assert ("http://localhost:3000", "chrome-extension://abc") == both.origins
