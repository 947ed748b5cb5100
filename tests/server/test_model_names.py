"""Names that no model has are 4xx, in the format of each API, on every route that takes a model's name."""

from __future__ import annotations

from typing import Any

import pytest

from server.app import create_app
from tests.server.fakes import Answer, FakeEngine, ask, settings

# Names for the requests that need one of a served model.
SERVED = "fake"
NAMES = {
    "empty": "",
    "nul": "org/\0x",
    "nul of a tag": "org/x:\0",
    "nul of a revision": "org/x@\0",
    "surrogate": "org/\ud800x",
    "surrogate of a tag": "org/x:\ud800",
    "line": "org/x\ny",
    "last line": "org/x\n",
    "tab": "o\tg/x",
    "direction": "org/\u202ex",
    "too long": f"org/{'x' * 600}",
    "long": f"org/{'x' * 400}",
    "parent": "org/..",
    "parents": "../../x",
    "absolute": "/etc",
    "drive": "C:\\models\\x",
    "backslash": "org\\x",
    "backslashes": "org/a\\b",
    "device": "NUL/x\\..",
    "end": "org/x.",
    "space": "org/a b",
    "no model": "org/",
    "slash": "/",
    "git": "org/x.git",
    "path of a tag": "org/x:../../y",
}
# Names of a model of a server with --served-model-name '*': any printable text of limited length.
UNPRINTABLE = ("nul", "surrogate", "line", "tab", "direction", "too long")
CHAT = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pull": ("POST", "/api/pull", {"model": None, "stream": False}),
    "pull, streamed": ("POST", "/api/pull", {"name": None}),
    "show": ("POST", "/api/show", {"model": None}),
    "delete": ("DELETE", "/api/delete", {"model": None}),
    "copy from": ("POST", "/api/copy", {"source": None, "destination": "copy"}),
    "copy to": ("POST", "/api/copy", {"source": SERVED, "destination": None}),
    "create": ("POST", "/api/create", {"model": None, "from": SERVED, "stream": False}),
    "create, old name": ("POST", "/api/create", {"name": None, "from": SERVED}),
    "create from": ("POST", "/api/create", {"model": "new", "from": None}),
    "ollama chat": ("POST", "/api/chat", {"model": None, "messages": CHAT}),
    "ollama generate": ("POST", "/api/generate", {"model": None, "prompt": "x"}),
    "ollama embed": ("POST", "/api/embed", {"model": None, "input": "x"}),
    "ollama embeddings": ("POST", "/api/embeddings", {"model": None, "prompt": "x"}),
    "chat": ("POST", "/v1/chat/completions", {"model": None, "messages": CHAT}),
    "completions": ("POST", "/v1/completions", {"model": None, "prompt": "x"}),
    "llama completion": ("POST", "/completion", {"model": None, "prompt": "x"}),
    "infill": ("POST", "/infill", {"model": None, "prompt": "x"}),
    "embeddings": ("POST", "/v1/embeddings", {"model": None, "input": "x"}),
    "responses": ("POST", "/v1/responses", {"model": None, "input": "x"}),
    "input tokens": ("POST", "/v1/responses/input_tokens", {"model": None, "input": "x"}),
    "compact": ("POST", "/v1/responses/compact", {"model": None, "input": "x"}),
    "messages": ("POST", "/v1/messages", {"model": None, "max_tokens": 5, "messages": CHAT}),
    "count tokens": ("POST", "/v1/messages/count_tokens", {"model": None, "messages": CHAT}),
    "tokenize": ("POST", "/tokenize", {"model": None, "content": "x"}),
    "rerank": ("POST", "/v1/rerank", {"model": None, "query": "x", "documents": ["y"]}),
    "score": ("POST", "/v1/score", {"model": None, "text_1": "x", "text_2": "y"}),
    "decisions": ("POST", "/v1/decisions", {"model": None, "input": "x", "questions": []}),
    "models": ("GET", "/v1/models/", {}),
}
MANAGEMENT = ("pull", "pull, streamed", "show", "delete", "copy from", "copy to", "create", "create from")
CREATIONS = ("copy to", "create", "create, old name")


def answer(app: Any, route: str, name: str) -> Answer:
    method, path, body = ROUTES[route]
    if method == "GET":
        # Servers decode a path with replacement characters.
        return ask(app, method, path + name.replace("\ud800", "\ufffd"))
    return ask(app, method, path, json_body={key: name if value is None else value for key, value in body.items()})


def message(given: Answer, path: str) -> str:
    error = given.json["error"]
    return error if path.startswith("/api/") else error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_invalid_names_are_client_errors(route: str) -> None:
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]
    # A repository may not be named so, but a created model may.
    names = {kind: name for kind, name in NAMES.items() if kind != "git" or route not in CREATIONS}
    # Without a name the main model is served.
    names = {kind: name for kind, name in names.items() if name or route in MANAGEMENT}
    answers = {kind: answer(app, route, name) for kind, name in names.items()}

    assert {} == {kind: each.body for kind, each in answers.items() if each.status not in (400, 404)}
    assert all(message(each, ROUTES[route][1]) for each in answers.values())


@pytest.mark.parametrize("route", ["show", "create from", "ollama chat", "chat", "completions", "messages", "models"])
def test_an_address_of_the_hub_names_the_served_model(route: str) -> None:
    """hf.co/organisation/model as Ollama writes it, or the address of the page."""
    app = create_app(FakeEngine(), settings(served_names=(), model="someone/tiny"))  # type: ignore[arg-type]

    assert 200 == answer(app, route, "hf.co/someone/tiny").status
    assert 200 == answer(app, route, "https://huggingface.co/someone/tiny").status
    assert 404 == answer(app, route, "hf.co/someone/other").status


# The other routes need more of a server than a name.
@pytest.mark.parametrize("route", ["show", "create from", "ollama chat", "chat", "completions", "messages", "models"])
def test_a_server_of_any_name_serves_printable_names(route: str) -> None:
    app = create_app(FakeEngine(), settings(served_names=("fake", "*")))  # type: ignore[arg-type]
    kinds = [kind for kind in UNPRINTABLE if (route, kind) != ("models", "surrogate")]
    statuses = {kind: answer(app, route, NAMES[kind]).status for kind in kinds}

    assert {} == {kind: status for kind, status in statuses.items() if status not in (400, 404)}
    assert 200 == answer(app, route, "claude-x[1m]").status
