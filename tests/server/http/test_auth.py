"""Authentication: every route but the probes and the page needs a key."""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from server.app import create_app
from server.configuration.converters import split_keys
from server.configuration.settings import Settings, is_loopback, read_key_list
from server.http.auth import OPEN_PATHS, ApiKeys
from tests.server.fakes import FakeEngine, ask, settings

KEYS = ("first-key", "second-key")
FORM = {"content-type": "multipart/form-data; boundary=x"}
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(), settings(keys=KEYS, allowed_hosts=("*",)))  # type: ignore[arg-type]


def routes(app: Any) -> list[tuple[str, str]]:
    return [
        (method, route.path.replace("{model:path}", "fake"))
        for route in app.routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
    ]


def test_every_route_but_probes_and_page_needs_a_key(app: Any) -> None:
    """The list is read from the app, so a new route is closed by default."""
    bodies: tuple[dict[str, Any], ...] = ({"json_body": BODY}, {"body": b"", "headers": FORM})
    refused = {path for method, path in routes(app) for body in bodies if ask(app, method, path, **body).status == 401}
    known = {path for _, path in routes(app)}

    assert {"/", "/health", "/ready"} == known - refused
    assert {"/health", "/ready"} == OPEN_PATHS


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/index.html",
        "/page/../v1/models",
        "/v1/engine",
        "/engine",
        "/v1",
        "/v1/models/",
        "//v1/models",
        "/v1/../health",
        "/health/../v1/models",
        "/Health",
        "/health;x",
        "/health%2e",
        "/ready?x=/v1",
        "http://x/health",
        "*",
        "/health\n",
        "/v1/models?/health",
    ],
)
def test_variants_of_open_paths_need_a_key(app: Any, path: str) -> None:
    """The exemption is by the exact path of the scope."""
    assert 401 == ask(app, "GET", path).status


@pytest.mark.parametrize("host", ["x/health", "x?", "x#", "a@b", "x\\y", "x y", "localhost/health", "", "éx"])
def test_the_host_header_cannot_bypass_authentication(app: Any, host: str) -> None:
    """No decision uses a URL built from the Host header (CVE-2026-48710)."""
    assert 401 == ask(app, "GET", "/v1/models", headers={"host": host}).status


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-key"},
        {"Authorization": "bearer second-key"},
        {"x-api-key": "first-key"},
        {"Authorization": "Bearer  first-key "},
        {"Authorization": "Bearer first-key", "x-api-key": "first-key"},
    ],
)
def test_every_key_is_valid_in_either_header(app: Any, headers: dict[str, str]) -> None:
    """OpenAI's clients send Authorization, Anthropic's x-api-key, Continue sends both."""
    assert 200 == ask(app, "POST", "/v1/chat/completions", json_body=BODY, headers=headers).status


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-keyy"},
        {"Authorization": "Bearer FIRST-KEY"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer first-key,second-key"},
        {"x-api-key": ""},
        {"x-api-key": "nein"},
        {"Authorization": "Bearer first-key", "x-api-key": "second-key"},
        {"Authorization": "Bearer " + "k" * 10_000},
        {"X-Forwarded-For": "127.0.0.1", "X-Original-URL": "/health"},
    ],
    ids=str,
)
def test_other_credentials_are_rejected(app: Any, headers: dict[str, str]) -> None:
    """A wrong key, a wrong scheme, or two credentials at once."""
    assert 401 == ask(app, "POST", "/v1/chat/completions", json_body=BODY, headers=headers).status


def test_the_401_has_the_format_of_openai(app: Any) -> None:
    """The envelope, the code, and the scheme to use."""
    answer = ask(app, "GET", "/v1/models", headers={"Authorization": "Bearer wrong"})

    assert "Bearer" == answer.headers["www-authenticate"]
    assert {
        "error": {
            "message": "Incorrect API key provided.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    } == answer.json
    assert "You didn't provide an API key." == ask(app, "GET", "/v1/models").json["error"]["message"]


@pytest.mark.parametrize("keys", [(), ("first-key",), KEYS])
def test_the_route_is_in_log_and_metrics_with_and_without_keys(
    keys: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Inner layers pass on the scope itself, from which the outermost layer reads the route."""
    served = create_app(FakeEngine(), settings(keys=keys))  # type: ignore[arg-type]
    headers = {"Authorization": "Bearer first-key"}

    with caplog.at_level(logging.INFO, "cellar.http"):
        assert 200 == ask(served, "POST", "/v1/chat/completions", json_body=BODY, headers=headers).status

    assert [True] == [" POST /v1/chat/completions 200 " in line for line in caplog.messages]
    reply = ask(served, "GET", "/metrics", headers=headers).body.decode()
    counted = 'cellar_http_responses_total{model_name="fake",route="/v1/chat/completions",status="200"} 1.0'
    assert counted in reply


def test_without_keys_everything_is_open() -> None:
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]

    assert 200 == ask(app, "GET", "/v1/models").status


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request compares digests of equal length with all keys, also after a match."""
    compared: list[tuple[int, int]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)

    assert ApiKeys(KEYS).owner([(b"x-api-key", b"first-key")])
    assert [(hashlib.sha256().digest_size,) * 2] * 2 == compared


def test_keys_are_split_at_commas_and_lines(tmp_path: Path) -> None:
    """A file of keys may hold one a line; spaces and empty pieces do not count."""
    path = tmp_path / "keys"
    path.write_text("a, b\n\nc\n")

    assert ("a", "b", "c") == read_key_list(path)
    assert () == split_keys(" , ")


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    """An empty mounted secret must not open the server."""
    path = tmp_path / "keys"
    path.write_text("\n")

    with pytest.raises(ValueError, match="no API key in"):
        read_key_list(path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "127.0.0.1.example.org"])
def test_a_reachable_address_needs_a_key(host: str) -> None:
    """A key, or the option for an open server."""
    with pytest.raises(ValueError, match="--api-key"):
        Settings(host=host).check()

    Settings(host=host, keys=("k",)).check()
    Settings(host=host, insecure_no_auth=True).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert is_loopback(host)
    Settings(host=host).check()
