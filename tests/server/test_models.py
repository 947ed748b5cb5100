"""GET /v1/models, /health, /ready and /openapi.json."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from server.app import create_app
from server.configuration.settings import Settings
from server.http.errors import ANTHROPIC_PREFIX, OLLAMA_PREFIX
from server.http.parsing import StrictRoute
from server.schemas.models import Model, ModelList
from tests.server.fakes import FakeEngine, ask, settings


def app(**fields: Any) -> Any:
    return create_app(FakeEngine(**fields), settings())  # type: ignore[arg-type]


def test_all_names_are_listed() -> None:
    """OpenAI's fields, with the context and what the model is."""
    answer = ask(app(), "GET", "/v1/models").json

    assert "list" == answer["object"]
    assert ["fake", "org/alias"] == [model["id"] for model in answer["data"]]
    assert {
        "id": "fake",
        "object": "model",
        "created": answer["data"][0]["created"],
        "owned_by": "cellar",
        "root": "fake",
        "max_model_len": 64,
        "input_modalities": ["text"],
        "meta": {
            "n_params": 1234,
            "n_vocab": 256,
            "n_ctx": 64,
            "n_slots": 4,
            "architecture": "FakeForCausalLM",
            "dtype": "float32",
        },
    } == answer["data"][0]
    TypeAdapter(ModelList).validate_python(answer, strict=True, extra="forbid")


@pytest.mark.parametrize("name", ["fake", "org/alias"])
def test_each_name_can_be_retrieved(name: str) -> None:
    """Also one with a slash, as the hub has them."""
    answer = ask(app(), "GET", f"/v1/models/{name}").json

    assert name == answer["id"]
    TypeAdapter(Model).validate_python(answer, strict=True, extra="forbid")


def test_another_name_is_a_404() -> None:
    """With the code of OpenAI."""
    answer = ask(app(), "GET", "/v1/models/other")

    assert (404, "model_not_found", "model") == (
        answer.status,
        answer.json["error"]["code"],
        answer.json["error"]["param"],
    )


@pytest.mark.parametrize(
    ("phase", "alive", "health", "ready", "code"),
    [
        ("resolve", True, 200, 503, "model_loading"),
        ("weights", True, 200, 503, "model_loading"),
        ("ready", True, 200, 200, None),
        ("draining", True, 200, 503, "server_draining"),
        ("dead: out of luck", False, 503, 503, "engine_dead"),
        ("ready", False, 503, 503, "engine_dead"),
    ],
)
def test_health_and_ready_differ_while_loading(
    phase: str, alive: bool, health: int, ready: int, code: str | None
) -> None:
    """/health fails only when a restart would help; /ready says why it is not."""
    served = app(phase=phase, alive=alive)

    assert health == ask(served, "GET", "/health").status
    answer = ask(served, "GET", "/ready")
    assert ready == answer.status
    if code is not None:
        assert code == answer.json["error"]["code"]
        assert int(answer.headers["retry-after"]) >= 1


def test_models_are_not_listed_before_loading() -> None:
    """503 while the model loads, as every other route that needs it."""
    assert "model_loading" == ask(app(phase="weights"), "GET", "/v1/models").json["error"]["code"]


def test_the_default_names(tmp_path: Path) -> None:
    """The bundled model, a folder's name, a hub id; or the names of the option."""
    folder = tmp_path / "my-model"
    folder.mkdir()

    assert ("cellar-tiny",) == Settings().model_names
    assert ("my-model",) == Settings(model=str(folder)).model_names
    assert ("Qwen/Qwen3-0.6B",) == Settings(model="Qwen/Qwen3-0.6B").model_names
    assert ("a", "b") == Settings(model=str(folder), served_names=("a", "b")).model_names


def test_the_document_types_requests_answers_and_errors() -> None:
    """Every reference in /openapi.json resolves; streams have a media type; none is FastAPI's validation error."""
    document = ask(app(), "GET", "/openapi.json").json

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            here = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return here.union(*(references(item) for item in value.values()))
        return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()

    defined = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= defined
    content = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert {"application/json", "text/event-stream"} == content.keys()
    assert "choices" in document["components"]["schemas"]["ChatCompletion"]["properties"]
    assert not [name for name in defined if "HTTPValidationError" in name]


def test_the_document_is_built_once_and_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes most of a second, in which no stream may stand still."""
    built, describe = [], StrictRoute.create_response_fields

    def watched(route: StrictRoute) -> None:
        built.append(threading.get_ident())
        describe(route)

    monkeypatch.setattr(StrictRoute, "create_response_fields", watched)
    served = app()

    first, second = (ask(served, "GET", "/openapi.json") for _ in range(2))

    assert first.body == second.body
    assert threading.get_ident() not in built
    assert len(built) == sum(isinstance(route, StrictRoute) for route in served.routes)


def test_the_document_has_the_errors_of_each_api() -> None:
    """Every operation declares refusals and faults, in the shape that its clients read."""
    document = ask(app(), "GET", "/openapi.json").json
    shapes = {ANTHROPIC_PREFIX: "AnthropicErrorBody", OLLAMA_PREFIX: "OllamaErrorBody"}

    for path, operations in document["paths"].items():
        shape = next((shape for begin, shape in shapes.items() if path.startswith(begin)), "ErrorBody")
        wanted = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
        for operation in operations.values():
            assert [wanted] * 2 == [operation["responses"][status]["content"] for status in ("4XX", "5XX")], path


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "stream": False}),
    ],
)
def test_any_name_is_served(path: str, body: dict[str, Any]) -> None:
    """With `*` among the names a client keeps the name of its own model; the list has the real names."""
    app = create_app(FakeEngine(), settings(served_names=("fake", "*")))  # type: ignore[arg-type]
    answer = ask(app, "POST", path, json_body={"model": "claude-sonnet-4-5", **body})

    assert 200 == answer.status, answer.body
    assert "claude-sonnet-4-5" == answer.json["model"]
    assert ["fake"] == [model["id"] for model in ask(app, "GET", "/v1/models").json["data"]]
    assert 200 == ask(app, "GET", "/v1/models/claude-sonnet-4-5").status


def test_without_names_any_name_joins_the_models_own() -> None:
    assert Settings(served_names=("*",)).model_names == Settings().model_names
