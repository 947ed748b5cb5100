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


def test_a_method_that_pages_may_not_use_is_named(app: Any) -> None:
    message = ask(app, "OPTIONS", CHAT, headers=asks(PAGE, "PUT")).json["error"]["message"]

    assert "--allowed-host" not in message


@pytest.mark.parametrize("hosts", [(), ("cellar.example",), ("*",)])
@pytest.mark.parametrize(("method", "path"), [("OPTIONS", CHAT), ("POST", CHAT), ("POST", "/api/chat"), ("GET", "/")])
def test_other_pages_cannot_use_a_server_without_keys(hosts: tuple[str, ...], method: str, path: str) -> None:
    """An allowed host is no allowed origin; the error names the option that allows it."""
    app = create_app(FakeEngine(), settings(allowed_hosts=hosts))  # type: ignore[arg-type]
    preflight = asks(PAGE) if method == "OPTIONS" else {"origin": PAGE}
    refused = ask(app, method, path, json_body=BODY if method == "POST" else None, headers=preflight)

    assert "access-control-allow-origin" not in refused.headers
    assert refused.status == 403
    assert f"--allowed-host {PAGE} " in str(refused.json["error"])
    assert ask(app, "GET", "/health", headers={"origin": PAGE}).status == 200


@pytest.mark.parametrize("keys", [(), ("secret",)])
@pytest.mark.parametrize(
    "origin",
    ["http://localhost", "https://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:80", "http://0.0.0.0:8"]
    + ["app://obsidian.md", "tauri://localhost", "http://tauri.localhost", "file://", "vscode-webview://1a-2b"],
)
def test_pages_of_the_own_machine_are_allowed(origin: str, keys: tuple[str, ...]) -> None:
    """As in Ollama, whose clients in browsers and desktop applications need no option."""
    app = create_app(FakeEngine(), settings(keys=keys))  # type: ignore[arg-type]
    answer = ask(app, "POST", CHAT, json_body=BODY, headers={"origin": origin, "authorization": "Bearer secret"})

    assert (200, origin) == (answer.status, answer.headers["access-control-allow-origin"])
    assert ask(app, "OPTIONS", CHAT, headers=asks(origin)).status == 200


@pytest.mark.parametrize(
    "origin",
    ["null", "http://localhost.evil.example", "http://localhost:3000.evil.example", "http://127.0.0.1@evil.example"]
    + ["https://evil.example/app://", "http://10.0.0.1", "chrome-extension://abc", "http://x.tauri.localhost"],
)
def test_similar_origins_are_rejected(origin: str) -> None:
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]

    assert ask(app, "POST", CHAT, json_body=BODY, headers={"origin": origin}).status == 403
    assert ask(app, "OPTIONS", CHAT, headers=asks(origin)).status == 403


def test_the_own_page_is_allowed_under_each_name_of_the_server() -> None:
    """A page of the server may call it, also behind a proxy with TLS."""
    app = create_app(FakeEngine(), settings(allowed_hosts=("llm.example",)))  # type: ignore[arg-type]

    def status(origin: str) -> int:
        return ask(app, "POST", CHAT, json_body=BODY, headers={"host": "llm.example", "origin": origin}).status

    assert status("https://llm.example") == 200
    assert status("https://llm.example:1") == 403


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
