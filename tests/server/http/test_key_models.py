"""API keys that may use some of the models: others do not exist for them, on every route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.types.status import AdapterInfo
from server.app import create_app, create_app_of_several
from server.configuration.key_file import read_key_file
from server.models.entry import ModelEntry
from server.models.loader import LoaderLimits
from tests.server.fakes import INFO, FakeEngine, ask, call, settings
from tests.server.models.test_several import Launcher
from tests.server.test_embedding_model import MODEL

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
KEYS = """
[[key]]
key = "limited"
organisation = "wines"
models = ["a"]
[[key]]
key = "all"
organisation = "wines"
"""
GENERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 5}),
    ("/v1/messages", CHAT),
    ("/v1/responses", {"input": "Hi"}),
    ("/api/chat", {"messages": CHAT["messages"]}),
    ("/api/generate", {"prompt": "Hi"}),
    ("/completion", {"prompt": "Hi", "n_predict": 5}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "Hi"}),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/api/embed", {"input": "Hi"}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/messages/count_tokens", CHAT),
    ("/api/show", {}),
    ("/models/load", {}),
]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def key_file(folder: Path, text: str = KEYS) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


def run(folder: Path, scenario: Callable[[Any, Launcher], Awaitable[None]]) -> None:
    async def work() -> None:
        launcher = Launcher()
        models = [ModelEntry(name, settings(served_names=(name,)), aliases=(f"{name}-alias",)) for name in "ab"]
        server = settings(key_file=key_file(folder))
        app = create_app_of_several(models, launcher, LoaderLimits(8), server)
        app.state.loader.start()
        await scenario(app, launcher)
        await app.state.loader.close()

    asyncio.run(work())


def test_other_models_do_not_exist_and_are_not_loaded(tmp_path: Path) -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        for path, body in [*GENERATIONS, *OTHERS]:
            for name in ("b", "b-alias", "b:latest", "a-alias"):
                answer = await call(app, "POST", path, json_body={"model": name, **body}, headers=bearer("limited"))
                assert answer.status == 404, (path, name, answer.body)
        assert launcher.engines == {}
        for path, body in GENERATIONS:
            for key, name in (("limited", "a"), ("limited", "a:latest"), ("all", "b"), ("all", "b-alias")):
                answer = await call(app, "POST", path, json_body={"model": name, **body}, headers=bearer(key))
                assert answer.status == 200, (path, key, name, answer.body)

    run(tmp_path, scenario)


def test_the_404_has_the_format_of_each_api_and_names_no_other_model(tmp_path: Path) -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        message = "The model 'b' does not exist here, or this API key may not use it. The key may use 'a'."
        openai, anthropic, ollama = [
            (await call(app, "POST", path, json_body={"model": "b", **body}, headers=bearer("limited"))).json
            for path, body in GENERATIONS
            if path in ("/v1/chat/completions", "/v1/messages", "/api/chat")
        ]

        assert openai["error"] == {
            "message": message,
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        assert anthropic == {"type": "error", "error": {"type": "not_found_error", "message": message}}
        assert ollama == {"error": message}

    run(tmp_path, scenario)


def test_lists_have_the_models_of_the_key(tmp_path: Path) -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        for name in "ab":
            body = {"model": name, **CHAT}
            assert (
                await call(app, "POST", "/v1/chat/completions", json_body=body, headers=bearer("all"))
            ).status == 200

        async def get(path: str, key: str) -> Any:
            return (await call(app, "GET", path, headers=bearer(key))).json

        for key, names, loaded in (("limited", ["a"], ["a"]), ("all", ["a", "a-alias", "b", "b-alias"], ["a", "b"])):
            assert [model["id"] for model in (await get("/v1/models", key))["data"]] == names
            assert [model["name"] for model in (await get("/api/tags", key))["models"]] == names
            assert [model["name"] for model in (await get("/api/ps", key))["models"]] == loaded
            assert (await get("/health", key))["models"] == names
        assert (await call(app, "GET", "/v1/models/a", headers=bearer("limited"))).status == 200
        assert (await call(app, "GET", "/v1/models/b", headers=bearer("limited"))).status == 404
        # A preset of another key of the organisation gives no access to its model.
        preset = {"model": "sommelier", "from": "b", "system": "Short."}
        assert (await call(app, "POST", "/api/create", json_body=preset, headers=bearer("all"))).status == 200
        bodies = {"/api/chat": {"messages": CHAT["messages"]}, "/api/show": {}}
        statuses = [
            (await call(app, "POST", path, json_body={"model": "sommelier", **body}, headers=bearer(key))).status
            for path, body in bodies.items()
            for key in ("limited", "all")
        ]
        assert statuses == [404, 200, 404, 200]
        assert len((await get("/api/tags", "limited"))["models"]) == 1
        assert len((await get("/api/tags", "all"))["models"]) == 5

    run(tmp_path, scenario)


def test_lines_of_a_batch_have_the_models_of_the_key_that_created_it(tmp_path: Path) -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        lines = [
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"model": name, **CHAT}}
            for name in "ab"
        ]
        async with app.router.lifespan_context(app):
            results = {}
            for key in ("limited", "all"):
                file = await upload(app, key, "\n".join(map(json.dumps, lines)))
                body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
                batch = (await call(app, "POST", "/v1/batches", json_body=body, headers=bearer(key))).json
                while batch["status"] not in ("completed", "failed"):
                    await asyncio.sleep(0.01)
                    batch = (await call(app, "GET", f"/v1/batches/{batch['id']}", headers=bearer(key))).json
                results[key] = (batch["request_counts"], batch.get("allowed_models"))
        assert results == {
            "limited": ({"total": 2, "completed": 1, "failed": 1}, ["a"]),
            "all": ({"total": 2, "completed": 2, "failed": 0}, None),
        }

    run(tmp_path, scenario)


async def upload(app: Any, key: str, content: str) -> str:
    form = (
        '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{content}\r\n--x--\r\n'
    )
    headers = {**bearer(key), "content-type": "multipart/form-data; boundary=x"}
    answer = await call(app, "POST", "/v1/files", body=form.encode(), headers=headers)
    return str(answer.json["id"])


ONE_MODEL = """
[[key]]
key = "base"
models = ["fake"]
[[key]]
key = "tuned"
models = ["tuned"]
[[key]]
key = "vectors"
models = ["vectors"]
"""


@pytest.fixture
def app(tmp_path: Path) -> Any:
    """A server of one model with an adapter and an embedding model."""
    tuned = AdapterInfo("tuned", rank=8, targets=("q_proj",), digest="0a" * 16, bytes=1 << 20)
    engine = FakeEngine(info_value=replace(INFO, adapters=(tuned,)), embedding=MODEL)
    server = settings(
        served_names=("fake",),
        lora=("tuned=/adapters/tuned",),
        embedding_model="vectors",
        key_file=key_file(tmp_path, ONE_MODEL),
    )
    return create_app(engine, server)


def test_a_key_has_a_model_its_adapter_or_the_embedding_model(app: Any) -> None:
    def statuses(path: str, body: dict[str, Any]) -> list[int]:
        return [
            ask(app, "POST", path, json_body=body, headers=bearer(key)).status for key in ("base", "tuned", "vectors")
        ]

    # Without a name the main model is meant.
    assert statuses("/v1/chat/completions", CHAT) == [200, 404, 404]
    assert statuses("/v1/chat/completions", {"model": "fake", **CHAT}) == [200, 404, 404]
    assert statuses("/v1/chat/completions", {"model": "tuned", **CHAT}) == [404, 200, 404]
    assert statuses("/api/chat", {"model": "tuned:latest", "messages": CHAT["messages"]}) == [404, 200, 404]
    assert statuses("/v1/embeddings", {"model": "vectors", "input": "Hi"}) == [404, 404, 200]
    for key in ("tuned", "vectors"):
        for path, field in (("/v1/models", "data"), ("/api/tags", "models"), ("/api/ps", "models")):
            listed = ask(app, "GET", path, headers=bearer(key)).json[field]
            assert [model.get("id", model.get("name")) for model in listed] == [key]
        described = ask(app, "GET", "/v1/capabilities", headers=bearer(key)).json
        assert described["model"]["adapters"] == [key] * (key == "tuned")
        assert ("embedding_model" in described) == (key == "vectors")


@pytest.mark.parametrize("models", ["[]", '[""]', '"a"', "[1]"])
def test_invalid_models_of_a_key_are_refused(tmp_path: Path, models: str) -> None:
    path = key_file(tmp_path, f'[[key]]\nkey = "secret"\nmodels = {models}\n')

    with pytest.raises(ValueError, match=r"invalid at key\.0\.models"):
        read_key_file(Path(path))
