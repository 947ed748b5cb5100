"""Scopes of API keys: which requests need the scope `admin`."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from server.app import create_app, create_app_of_several
from server.configuration.key_file import read_key_file
from server.configuration.settings import Settings
from server.http.scopes import ADMIN_ROUTES
from server.models.entry import ModelEntry
from server.models.loader import LoaderLimits
from tests.server.fakes import FakeEngine, ask, settings
from tests.server.models.test_several import Launcher

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = """
[[key]]
key = "user"
organisation = "wines"
scopes = ["use"]
[[key]]
key = "admin"
scopes = ["admin"]
[[key]]
key = "both"
"""
# Routes that change nothing but what belongs to the owner of the key.
USE_PATHS = {
    "/api/blobs/{digest}",
    "/api/chat",
    "/api/embed",
    "/api/embeddings",
    "/api/generate",
    "/api/show",
    "/apply-template",
    "/completion",
    "/detokenize",
    "/infill",
    "/rerank",
    "/score",
    "/tokenize",
    "/v1/apply-template",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/batches",
    "/v1/batches/{batch_id}/cancel",
    "/v1/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/decisions",
    "/v1/detokenize",
    "/v1/embeddings",
    "/v1/files",
    "/v1/files/{file_id}",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/responses",
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/score",
    "/v1/tokenize",
    "/v2/rerank",
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return create_app(FakeEngine(), scoped(tmp_path_factory.mktemp("keys")))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def app_of_several(tmp_path_factory: pytest.TempPathFactory) -> Any:
    models = [ModelEntry("a", settings(served_names=("a",)))]
    return create_app_of_several(models, Launcher(), LoaderLimits(8), scoped(tmp_path_factory.mktemp("several")))  # type: ignore[arg-type]


def scoped(folder: Path) -> Settings:
    path = folder / "keys.toml"
    path.write_text(KEYS)
    return settings(key_file=str(path))


def status(app: Any, key: str, method: str, path: str, body: object = None) -> int:
    return ask(app, method, path, json_body=body or {}, headers={"authorization": f"Bearer {key}"}).status


def test_every_route_that_is_no_reading_is_classified(app_of_several: Any) -> None:
    """A new route is for `use` or for `admin`: whoever adds it decides."""
    changing = {
        (method, route.path)
        for route in app_of_several.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"GET", "HEAD", "OPTIONS"}
    }

    assert changing >= ADMIN_ROUTES
    assert {path for _, path in changing - ADMIN_ROUTES} == USE_PATHS


@pytest.mark.parametrize(("method", "path"), sorted(ADMIN_ROUTES))
def test_routes_that_change_the_server_need_the_scope_admin(app_of_several: Any, method: str, path: str) -> None:
    """Also with a slash at the end, and without /v1."""
    for variant in (path, f"{path}/", path.removeprefix("/v1")):
        assert status(app_of_several, "user", method, variant) == 403
        assert status(app_of_several, "admin", method, variant) != 403
        assert status(app_of_several, "both", method, variant) != 403


def test_a_generation_needs_the_scope_use(app: Any) -> None:
    """And every key reads."""
    assert [status(app, key, "POST", "/v1/chat/completions", CHAT) for key in ("user", "admin", "both")] == [
        200,
        403,
        200,
    ]
    assert [status(app, key, "GET", "/v1/models") for key in ("user", "admin", "both")] == [200, 200, 200]


def test_the_403_names_the_scope_in_the_format_of_each_api(app: Any) -> None:
    message = "This request needs an API key with the scope 'use'."
    headers = {"x-api-key": "admin"}

    openai, anthropic, ollama = (
        ask(app, "POST", path, json_body=CHAT, headers=headers).json
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat")
    )

    assert openai["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "scope_required",
    }
    assert anthropic == {"type": "error", "error": {"type": "permission_error", "message": message}}
    assert ollama == {"error": message}


def test_the_entry_with_organisation_has_the_same_scopes(app: Any) -> None:
    assert status(app, "wines:user", "POST", "/api/pull") == 403


def test_a_key_of_the_option_is_narrowed_by_the_file(tmp_path: Path) -> None:
    app = create_app(FakeEngine(), settings(keys=("wines:user", "other"), key_file=scoped(tmp_path).key_file))  # type: ignore[arg-type]

    assert status(app, "user", "POST", "/api/pull") == 403
    assert status(app, "other", "POST", "/api/pull") == 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid at key"),
        ("key = []", "invalid at key"),
        ('[[key]]\nkey = "secret one"', "invalid at key.0.key"),
        ('[[key]]\nkey = "secret"\nscope = ["use"]', "invalid at key.0.scope"),
        ('[[key]]\nkey = "secret"\nscopes = []', "invalid at key.0.scopes"),
        ('[[key]]\nkey = "secret"\nscopes = ["root"]', "invalid at key.0.scopes"),
        ('[[key]]\nkey = "secret"\n[[key]]\nkey = "secret"\nscopes = ["use"]', "a key twice"),
        ('[[key]]\nkey = "secret"\nsha256 = "' + "0" * 64 + '"', "either 'key' or 'sha256'"),
        ('[[key]]\nscopes = ["use"]', "either 'key' or 'sha256'"),
        ('[[key]]\nsha256 = "secret"', "invalid at key.0.sha256"),
        ('[[key]]\nkey = "a"\n[[key]]\nsha256 = "' + sha256(b"a").hexdigest() + '"', "a key twice"),
        ('[[key]\nkey = "secret"', "is no TOML"),
    ],
)
def test_an_invalid_file_is_refused_without_its_keys(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)

    with pytest.raises(ValueError, match=message) as raised:
        read_key_file(path)

    assert "secret" not in str(raised.value)
