"""LoRA adapters as models of requests: names, listings, fingerprints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig
from engine.errors import AdapterLoaded, AdapterPathRefused, AdaptersFull, AdapterUnsupported, EngineError
from engine.types.status import AdapterInfo
from server.app import create_app
from server.lifecycle import banner
from tests.server.fakes import INFO, MEMORY, FakeEngine, ask, settings

LORA = ("sql=/adapters/sql", "org/support=/adapters/a=b")
ADAPTERS = (
    AdapterInfo("sql", "d1", 16, ("q_proj", "v_proj"), 4 << 20),
    AdapterInfo("org/support", "d2", 8, ("o_proj",), 1 << 20),
)
CHAT = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"max_tokens": 5, "messages": CHAT},
    "/api/chat": {"messages": CHAT, "stream": False},
    "/api/generate": {"prompt": "x", "stream": False},
    "/completion": {"prompt": "x"},
    "/v1/embeddings": {"input": "x"},
}


@pytest.fixture
def engine() -> FakeEngine:
    """An engine with two adapters."""
    return FakeEngine(info_value=replace(INFO, adapters=ADAPTERS))


@pytest.fixture
def app(engine: FakeEngine) -> Any:
    """A server with their names."""
    return create_app(engine, settings(lora=LORA))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", BODIES)
def test_the_model_of_a_request_chooses_the_adapter(path: str, app: Any, engine: FakeEngine) -> None:
    """In every API; the names of the model choose none."""
    for model, adapter in (("sql", "sql"), ("org/support", "org/support"), ("fake", ""), ("org/alias", "")):
        assert ask(app, "POST", path, json_body={"model": model, **BODIES[path]}).status == 200
        assert engine.requests[-1].adapter == adapter


def test_ollamas_default_tag_names_an_adapter_too(app: Any, engine: FakeEngine) -> None:
    """As Ollama's clients send it."""
    assert ask(app, "POST", "/api/chat", json_body={"model": "sql:latest", **BODIES["/api/chat"]}).status == 200
    assert engine.requests[-1].adapter == "sql"


def test_generations_are_counted_by_adapter(engine: FakeEngine) -> None:
    """Those that are not of the settings together, so that a label never comes from a request."""
    app = create_app(engine, settings(lora=LORA[:1]))  # type: ignore[arg-type]
    for model in ("sql", "sql", "org/support", "fake"):
        ask(app, "POST", "/v1/completions", json_body={"model": model, "prompt": "x"})
    lines = ask(app, "GET", "/metrics").body.decode().splitlines()

    counts = {line for line in lines if line.startswith("cellar_adapter_requests_total")}
    assert counts == {
        'cellar_adapter_requests_total{adapter="sql",model_name="fake"} 2.0',
        'cellar_adapter_requests_total{adapter="dynamic",model_name="fake"} 1.0',
    }


def test_unknown_names_are_refused_with_all_names(app: Any) -> None:
    """As without adapters."""
    answer = ask(app, "POST", "/v1/chat/completions", json_body={"model": "other", "messages": CHAT})

    assert answer.status == 404
    assert "'fake', 'org/alias', 'sql', 'org/support'" in answer.json["error"]["message"]


def test_adapters_are_listed_with_their_model(app: Any) -> None:
    """In /v1/models, /v1/capabilities and Ollama's list."""
    listed = {model["id"]: model for model in ask(app, "GET", "/v1/models").json["data"]}

    assert list(listed) == ["fake", "org/alias", "sql", "org/support"]
    assert (listed["sql"]["parent"], listed["sql"]["root"]) == ("fake", "fake")
    assert listed["sql"]["meta"]["adapter"] == {
        "rank": 16,
        "targets": ["q_proj", "v_proj"],
        "digest": "d1",
        "bytes": 4 << 20,
    }
    assert ask(app, "GET", "/v1/models/org/support").json == listed["org/support"]
    assert "parent" not in listed["fake"]
    assert ask(app, "GET", "/v1/capabilities").json["model"]["adapters"] == ["sql", "org/support"]
    tags = {model["name"]: model for model in ask(app, "GET", "/api/tags").json["models"]}
    assert (tags["sql"]["digest"], tags["sql"]["details"]["parent_model"]) == ("d1", "fake")


def test_the_fingerprint_has_the_digest(app: Any) -> None:
    """Each adapter has another one than the model."""
    answers = [
        ask(app, "POST", "/v1/chat/completions", json_body={"model": model, "messages": CHAT}).json
        for model in ("fake", "sql", "org/support", "org/alias")
    ]
    fingerprints = [answer["system_fingerprint"] for answer in answers]

    assert len(set(fingerprints)) == 3
    assert fingerprints[0] == fingerprints[3]
    assert [answer["model"] for answer in answers] == ["fake", "sql", "org/support", "org/alias"]


def test_the_banner_lists_adapters(engine: FakeEngine) -> None:
    """With rank, layers and memory."""
    text = banner(engine.info, MEMORY, engine.drafting, settings(lora=LORA), "http://127.0.0.1:1")

    assert "sql: rank 16, q_proj, v_proj, 4.0 MiB of the weights" in text


@pytest.mark.parametrize(
    ("lora", "text"),
    [
        (("sql",), "must be name=FOLDER, not sql"),
        (("=x",), "must be name=FOLDER"),
        (("sql=",), "must be name=FOLDER"),
        ((" sql=x",), "must be name=FOLDER"),
        (("s\nql=x",), "must be name=FOLDER"),
        (("sql=x", "sql=y"), "has a name twice"),
    ],
)
def test_wrong_options_are_refused(lora: tuple[str, ...], text: str) -> None:
    """At the start."""
    with pytest.raises(ConfigError, match=text):
        EngineConfig(lora=lora)
    with pytest.raises(ValueError, match=f"--lora {text}"):
        settings(lora=lora).check()


def test_ranks_and_names_of_models_are_refused() -> None:
    """Adapters are for one process; a name is of one model."""
    with pytest.raises(ConfigError, match="--tensor-parallel"):
        EngineConfig(lora=LORA, tensor_parallel=2)
    with pytest.raises(ValueError, match="--lora fake has the name of a model"):
        settings(lora=("fake=/adapters/x",)).check()
    assert EngineConfig(lora=LORA).adapters == {"sql": "/adapters/sql", "org/support": "/adapters/a=b"}
    assert EngineConfig(lora=LORA).for_draft("x", context=8, slots=1, cells=8).lora == ()


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NEW = {"lora_name": "new", "lora_path": "new-v1"}


def test_adapters_are_loaded_and_unloaded(app: Any, engine: FakeEngine) -> None:
    """With vLLM's bodies and texts; requests may name them at once, and not after."""
    body = {"model": "new", "messages": CHAT}
    assert ask(app, "POST", "/v1/chat/completions", json_body=body).status == 404
    loaded = ask(app, "POST", LOAD, json_body=NEW)

    assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'new' added successfully.")
    assert ask(app, "POST", "/v1/chat/completions", json_body=body).status == 200
    assert engine.requests[-1].adapter == "new"
    assert "new" in [model["id"] for model in ask(app, "GET", "/v1/models").json["data"]]
    unloaded = ask(app, "POST", UNLOAD, json_body={"lora_name": "new", "lora_int_id": None})
    assert (unloaded.status, unloaded.body) == (200, b"Success: LoRA adapter 'new' removed successfully.")
    assert ask(app, "POST", "/v1/chat/completions", json_body=body).status == 404


@pytest.mark.parametrize(
    ("error", "status", "code", "text"),
    [
        (AdapterLoaded("new"), 400, "invalid_value", "The lora adapter 'new' has already been loaded"),
        (AdapterUnsupported("new", "rank 0"), 400, "invalid_value", "Cannot load the adapter 'new': rank 0."),
        (AdapterPathRefused(), 403, "adapter_path_not_allowed", "below the folder of --lora-dir"),
        (AdaptersFull(2**20, 2**29, 2**29, 3, 8), 507, "adapters_full", "needs 1.0 MiB; 3 of 8 adapters"),
    ],
)
def test_refused_loads_have_the_reason(
    error: EngineError, status: int, code: str, text: str, app: Any, engine: FakeEngine
) -> None:
    """In the format of OpenAI's errors."""
    engine.adapter_error = error
    refused = ask(app, "POST", LOAD, json_body=NEW)

    assert (refused.status, refused.json["error"]["code"]) == (status, code)
    assert text in refused.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (UNLOAD, {"lora_name": "other"}, 404),
        (UNLOAD, {"lora_name": "fake"}, 404),
        (UNLOAD, {}, 400),
        (LOAD, {"lora_name": "x"}, 400),
        (LOAD, {**NEW, "lora_name": "fake"}, 400),
        (LOAD, {**NEW, "lora_name": "fake:latest"}, 400),
        (LOAD, {**NEW, "lora_name": "a\nb"}, 400),
        (LOAD, {**NEW, "lora_name": ""}, 400),
        (LOAD, {**NEW, "lora_path": 7}, 400),
        (LOAD, {**NEW, "other": 7}, 400),
        ("/lora-adapters", [{"id": 0, "scale": 0.5}], 400),
    ],
)
def test_wrong_calls_are_refused(path: str, body: Any, status: int, app: Any, engine: FakeEngine) -> None:
    """Nothing changes."""
    assert ask(app, "POST", path, json_body=body).status == status
    assert engine.info.adapters == ADAPTERS


def test_a_load_needs_a_key_or_a_local_client(engine: FakeEngine) -> None:
    """As Ollama's calls that change the models do."""
    proxied = {"x-forwarded-for": "10.0.0.1"}
    for path, body in ((LOAD, NEW), (UNLOAD, {"lora_name": "sql"})):
        app = create_app(engine, settings(lora=LORA))  # type: ignore[arg-type]
        assert ask(app, "POST", path, json_body=body, headers=proxied).status == 403
        app = create_app(engine, settings(lora=LORA, keys=("secret",)))  # type: ignore[arg-type]
        assert ask(app, "POST", path, json_body=body).status == 401
        keyed = {**proxied, "authorization": "Bearer secret"}
        assert ask(app, "POST", path, json_body=body, headers=keyed).status == 200


def test_llama_cpp_s_list_has_no_scales(app: Any) -> None:
    """Requests choose an adapter by its name."""
    assert ask(app, "GET", "/lora-adapters").json == [
        {"id": 0, "path": "sql", "scale": 0.0},
        {"id": 1, "path": "org/support", "scale": 0.0},
    ]
