"""Routes with several models: the model of a request is loaded on demand, in virtual engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelUnsupported
from server.app import create_app_of_several
from server.http import parsing
from server.http.parsing import LARGE_BODY_BYTES
from server.models import folder_scan, load_middleware
from server.models.configured import configured_entries
from server.models.entry import ModelEntry
from server.models.loader import LoaderLimits
from server.models.several import DuplicateName, names_of
from tests.server.fakes import FakeEngine, call, settings
from tests.server.models.gguf_header import write_gguf
from tests.server.test_loop_work import counting

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
SERVER = settings(limits={"ping_seconds": 0.05})


class SlowEngine(FakeEngine):
    """Loads until `loaded` is set."""

    async def wait_ready(self) -> None:
        self.loaded = asyncio.Event()
        await self.loaded.wait()
        await super().wait_ready()
        self.phase = "ready"


class Launcher:
    """Engines of 4 bytes each; those of `slow` load until a test ends it."""

    def __init__(self, slow: str = "") -> None:
        self.slow, self.engines = slow, dict[str, Any]()

    async def needed_bytes(self, entry: ModelEntry) -> int:
        return 4

    def start(self, entry: ModelEntry, memory_bytes: int) -> Any:
        kind = SlowEngine if entry.name in self.slow else FakeEngine
        engine = self.engines[entry.name] = kind(phase="loading weights" if kind is SlowEngine else "ready")
        return engine

    async def stop(self, engine: Any) -> None:
        pass


def _run(
    scenario: Callable[[Any, Launcher], Awaitable[None]],
    launcher: Launcher | None = None,
    pinned: str = "",
    **limits: Any,
) -> None:
    async def work() -> None:
        fake = launcher or Launcher()
        models = [
            ModelEntry(name, settings(served_names=(name,)), aliases=(f"{name}-alias",), pinned=name in pinned)
            for name in "abc"
        ]
        app = create_app_of_several(models, fake, LoaderLimits(8, **limits), SERVER)
        app.state.loader.start()
        await scenario(app, fake)
        await app.state.loader.close()

    asyncio.run(work())


def test_the_model_of_a_request_is_loaded_and_answers() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        for path, body in [
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "Hi", "max_tokens": 5}),
            ("/v1/messages", CHAT),
            ("/v1/responses", {"input": "Hi"}),
            ("/api/chat", {**CHAT, "max_tokens": None}),
            ("/completion", {"prompt": "Hi", "n_predict": 5}),
            ("/tokenize", {"prompt": "Hi"}),
            ("/v1/embeddings", {"input": "Hi"}),
        ]:
            sent = {key: value for key, value in body.items() if value is not None}
            for name in ("a", "b-alias"):
                answer = await call(app, "POST", path, json_body={"model": name, **sent})
                assert answer.status in (200, 400), (path, answer.body)
                assert answer.status == 200 or path == "/v1/embeddings"
        assert set(launcher.engines) == {"a", "b"}
        assert app.state.loader.status("a").leases == 0
        answer = await call(app, "POST", "/v1/chat/completions", json_body={"model": "a", **CHAT})
        assert answer.json["model"] == "a"

    _run(scenario)


def test_requests_of_a_model_share_its_limits_of_threads() -> None:
    """Each request has a service of its own."""

    async def scenario(app: Any, launcher: Launcher) -> None:
        for name in "ab":
            assert (await call(app, "POST", "/v1/chat/completions", json_body={"model": name, **CHAT})).status == 200
        models = app.state.models
        first, again, other = (
            models.service(models.entry_of(name), name, launcher.engines[name]) for name in ("a", "a", "b")
        )

        assert first.threads.media is again.threads.media is not other.threads.media
        assert first.threads.grammar is again.threads.grammar is not other.threads.grammar

    _run(scenario)


def test_a_stream_shows_the_phase_of_the_load() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        body = {"model": "a", "stream": True, **CHAT}
        request = asyncio.create_task(call(app, "POST", "/v1/chat/completions", json_body=body))
        await asyncio.sleep(0.3)
        launcher.engines["a"].loaded.set()
        answer = await request
        assert answer.status == 200
        assert answer.body.startswith(b": loading weights\n\n: loading weights\n\n")
        assert answer.events[-1] == "[DONE]"

    _run(scenario, Launcher(slow="a"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_load_is_an_error(stream: bool) -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        body = {"model": "a", "stream": stream, **CHAT}
        request = asyncio.create_task(call(app, "POST", "/v1/chat/completions", json_body=body))
        await asyncio.sleep(0.2)
        launcher.engines["a"].failure = ModelUnsupported("a", "wrong outputs")
        launcher.engines["a"].loaded.set()
        answer = await request
        error = answer.events[-1] if stream else answer.json
        assert answer.status == (200 if stream else 503)
        assert error["error"]["code"] == "model_failed"
        assert "wrong outputs" in error["error"]["message"]
        listed = (await call(app, "GET", "/v1/models/a")).json
        assert listed["status"]["value"] == "failed"
        assert "wrong outputs" in listed["status"]["reason"]

    _run(scenario, Launcher(slow="a"))


def test_a_request_may_refuse_to_wait() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        body = {"model": "a", **CHAT}
        answer = await call(app, "POST", "/v1/chat/completions", json_body=body, headers={"X-Load": "never"})
        assert (answer.status, answer.json["error"]["code"]) == (503, "model_loading")
        assert launcher.engines == {}

    _run(scenario)


def test_a_load_that_takes_too_long_is_a_504() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        answer = await call(app, "POST", "/v1/chat/completions", json_body={"model": "a", **CHAT})
        assert (answer.status, answer.json["error"]["code"]) == (504, "load_timeout")

    _run(scenario, Launcher(slow="a"), load_timeout=0.1)


def test_unknown_and_missing_names_are_errors_and_load_nothing() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        for name in ("other", "../a", "/tmp/a"):
            answer = await call(app, "POST", "/v1/completions", json_body={"model": name, "prompt": "Hi"})
            assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
        answer = await call(app, "GET", "/v1/capabilities")
        assert (answer.status, answer.json["error"]["param"]) == (400, "model")
        assert launcher.engines == {}
        assert (await call(app, "GET", "/v1/capabilities", query="model=a")).status == 200
        assert (await call(app, "GET", "/v1/engine", query="model=b")).status == 200

    _run(scenario)


def test_the_list_has_all_models_with_their_states() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        await call(app, "POST", "/tokenize", json_body={"model": "a", "prompt": "Hi"})
        listed = (await call(app, "GET", "/v1/models")).json["data"]
        states = {model["id"]: model["status"]["value"] for model in listed}
        assert states == {
            "a": "loaded",
            "a-alias": "loaded",
            "b": "unloaded",
            "b-alias": "unloaded",
            "c": "unloaded",
            "c-alias": "unloaded",
        }
        assert "meta" in listed[0]
        assert "meta" not in listed[2]
        health = (await call(app, "GET", "/health")).json
        assert health == {"status": "ok", "phase": "ready", "models": ["a", "a-alias"]}
        assert (await call(app, "GET", "/ready")).status == 200

    _run(scenario)


def test_a_websocket_loads_the_model_of_each_response() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        scope = {"type": "websocket", "path": "/v1/responses", "raw_path": b"/v1/responses", "query_string": b""}
        scope |= {"headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        serving = asyncio.create_task(app({**scope, "scheme": "ws", "subprotocols": []}, received.get, sent.put))
        await received.put({"type": "websocket.connect"})
        assert (await sent.get())["type"] == "websocket.accept"
        for name, last in (("a", "response.completed"), ("b", "response.completed"), ("nope", "error")):
            body = {"type": "response.create", "store": False, "input": "Hi", "model": name}
            await received.put({"type": "websocket.receive", "text": json.dumps(body)})
            while (event := json.loads((await sent.get())["text"]))["type"] != last:
                assert event["type"] != "error", event
        assert event["error"]["code"] == "model_not_found"
        assert set(launcher.engines) == {"a", "b"}
        await received.put({"type": "websocket.disconnect", "code": 1000})
        await serving
        assert {app.state.loader.status(name).leases for name in "ab"} == {0}

    _run(scenario)


def test_a_response_in_the_background_keeps_its_model() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        body = {"model": "a", "input": "Hi", "background": True}
        answer = await call(app, "POST", "/v1/responses", json_body=body)
        assert (answer.status, answer.json["status"]) == (200, "queued")
        while (final := await call(app, "GET", f"/v1/responses/{answer.json['id']}")).json["status"] != "completed":
            assert final.json["status"] in ("queued", "in_progress")
            await asyncio.sleep(0.02)
        assert app.state.loader.status("a").leases == 0

    _run(scenario)


def test_metrics_have_one_family_of_all_models() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        for name in "aba":
            await call(app, "POST", "/v1/completions", json_body={"model": name, "prompt": "Hi"})
        text = (await call(app, "GET", "/metrics")).body.decode()
        helps = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(helps) == len(set(helps))
        assert 'cellar_model_loads_total{model_name="a",outcome="ready"} 1.0' in text
        assert 'cellar_model_state{model_name="c",state="unloaded"} 1.0' in text
        assert 'cellar_models_memory_bytes{model_name="b"} 4.0' in text
        assert 'cellar_requests_total{endpoint="completions",finish_reason="stop",model_name="a"} 2.0' in text

    _run(scenario)


def test_a_name_twice_is_an_error_with_both_sources() -> None:
    entries = [ModelEntry("a", settings(model="/x/a")), ModelEntry("b", settings(model="/y/a"), aliases=("a",))]
    with pytest.raises(DuplicateName, match=r"name a: /x/a and /y/a"):
        names_of(entries)


def test_ollama_loads_lists_and_unloads() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        answer = await call(app, "POST", "/api/generate", json_body={"model": "a", "keep_alive": "5m"})
        assert answer.json["done_reason"] == "load"
        [running] = (await call(app, "GET", "/api/ps")).json["models"]
        assert (running["name"], running["size"]) == ("a", 4)
        assert running["expires_at"] < "9999"
        names = [model["name"] for model in (await call(app, "GET", "/api/tags")).json["models"]]
        assert names == ["a", "a-alias", "b", "b-alias", "c", "c-alias"]
        answer = await call(app, "POST", "/api/chat", json_body={"model": "a:latest", "messages": [], "keep_alive": 0})
        assert answer.json["done_reason"] == "unload"
        await asyncio.sleep(0.05)
        assert (await call(app, "GET", "/api/ps")).json["models"] == []

    _run(scenario)


def test_unloaded_models_are_described_by_their_files(tmp_path: Path) -> None:
    """And never loaded; a changed file is read again."""
    configs: dict[str, dict[str, Any]] = {
        "chat": {"model_type": "llama", "max_position_embeddings": 2048},
        "vision": {"model_type": "llava", "text_config": {"max_position_embeddings": 99}, "vision_config": {"a": 1}},
        "ranker": {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
        "vectors": {"model_type": "bert", "max_position_embeddings": 512},
        "wrong": {"architectures": 3},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "vectors" / "modules.json").write_text("[]")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ tools }}")
    write_gguf(tmp_path / "file.gguf", {"llama.context_length": 77})
    server = replace(SERVER, served_names=(), models_dir=str(tmp_path))
    launcher = Launcher()
    app = create_app_of_several(configured_entries(server, (), {}), launcher, LoaderLimits(8), server)

    async def scenario() -> None:
        described = {model["id"]: model for model in (await call(app, "GET", "/v1/models")).json["data"]}
        kinds = {name: (model.get("kind"), model.get("meta")) for name, model in described.items()}
        assert kinds == {
            "chat": ("chat", {"n_ctx_train": 2048}),
            "file": ("chat", {"n_ctx_train": 77}),
            "ranker": ("rerank", None),
            "vectors": ("embedding", {"n_ctx_train": 512}),
            "vision": ("chat", {"n_ctx_train": 99}),
            "wrong": (None, None),
        }
        assert described["vision"]["input_modalities"] == ["text", "image"]
        listed = {model["name"]: model for model in (await call(app, "GET", "/api/tags")).json["models"]}
        assert (listed["file"]["details"]["format"], listed["chat"]["details"]["family"]) == ("gguf", "llama")

        async def shown(name: str) -> Any:
            return (await call(app, "POST", "/api/show", json_body={"model": name})).json

        assert (await shown("chat"))["capabilities"] == ["completion", "tools"]
        assert (await shown("chat"))["model_info"]["llama.context_length"] == 2048
        assert (await shown("vectors"))["capabilities"] == ["embedding"]
        assert (await shown("vision:latest"))["capabilities"] == ["completion", "vision"]
        assert (await shown("wrong"))["model_info"] == {}
        (tmp_path / "chat" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 4096000}')
        assert (await call(app, "GET", "/v1/models/chat")).json["meta"] == {"n_ctx_train": 4096000}

    asyncio.run(scenario())
    assert launcher.engines == {}


def test_an_embedding_model_generates_no_text() -> None:
    """Whatever the route."""
    entries = [ModelEntry("a", settings(served_names=("a",))), ModelEntry("vectors", SERVER, kind="embedding")]
    app = create_app_of_several(entries, Launcher(), LoaderLimits(8), SERVER)

    async def scenario() -> None:
        for path, body in [
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/messages", CHAT),
            ("/v1/responses", {"input": "Hi", "store": False}),
            ("/api/chat", {"messages": CHAT["messages"]}),
            ("/v1/tokenize", {"prompt": "Hi"}),
        ]:
            answer = await call(app, "POST", path, json_body={**body, "model": "vectors"})
            assert answer.status == 404, path
            assert "embedding model and does not support" in answer.body.decode(), path
        await app.state.loader.close()

    asyncio.run(scenario())


def test_ollama_creates_shows_and_deletes() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        async def answer_of(path: str, method: str = "POST", **body: Any) -> Any:
            return await call(app, method, f"/api/{path}", json_body=body)

        created: dict[str, Any] = {
            "model": "short",
            "from": "b",
            "system": "Be brief.",
            "template": "other",
            "stream": False,
        }
        assert (await answer_of("create", **created)).json["error"].endswith("its own chat template is used.")
        assert (await answer_of("create", **{**created, "template": None})).status == 200
        assert (await answer_of("create", model="other", **{"from": "nope"})).status == 404
        assert (await answer_of("create", model="a", **{"from": "b"})).status == 400
        chatted = await answer_of("chat", model="short", messages=CHAT["messages"], stream=False)
        assert (chatted.status, chatted.json["model"]) == (200, "short")
        assert set(launcher.engines) == {"b"}
        for name in ("short", "a:latest"):
            assert "model_info" in (await answer_of("show", model=name)).json
        # Models are described without a load.
        assert set(launcher.engines) == {"b"}
        assert (await answer_of("show", model="nope")).status == 404
        assert (await answer_of("delete", "DELETE", model="a")).status == 400
        assert (await answer_of("delete", "DELETE", model="organisation/nope")).status == 404
        assert (await answer_of("delete", "DELETE", model="short")).status == 200
        assert (await answer_of("chat", model="short", messages=CHAT["messages"], stream=False)).status == 404
        chatted = await answer_of("chat", model="b:latest", messages=CHAT["messages"], stream=False)
        assert chatted.status == 200

    _run(scenario)


def test_llama_loads_and_unloads() -> None:
    async def scenario(app: Any, launcher: Launcher) -> None:
        for action, state in (("load", "loaded"), ("unload", "unloaded")):
            answer = await call(app, "POST", f"/models/{action}", json_body={"model": "b"})
            assert (answer.status, answer.json) == (200, {"success": True})
            await asyncio.sleep(0.05)
            assert (await call(app, "GET", "/v1/models/b")).json["status"]["value"] == state
            assert (await call(app, "POST", f"/models/{action}", json_body={"model": "x"})).status == 404

    _run(scenario)


def test_models_of_the_folder_come_and_go_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_scan, "SCAN_SECONDS", 0.0)
    launcher = Launcher()
    (tmp_path / "first.gguf").touch()
    server = replace(SERVER, models_dir=str(tmp_path), served_names=())

    async def work() -> None:
        app = create_app_of_several(configured_entries(server, (), {}), launcher, LoaderLimits(8), server)

        async def names() -> list[str]:
            return [model["id"] for model in (await call(app, "GET", "/v1/models")).json["data"]]

        async def complete(name: str) -> int:
            return (await call(app, "POST", "/v1/completions", json_body={"model": name, "prompt": "Hi"})).status

        assert await names() == ["first"]
        assert await complete("second") == 404
        (tmp_path / "second.gguf").touch()
        assert await complete("second") == 200
        assert await names() == ["first", "second"]
        lease = await app.state.loader.acquire("second")
        (tmp_path / "second.gguf").unlink()
        assert await names() == ["first"]
        assert await complete("second") == 404
        assert app.state.loader.status("second").state == "draining"
        text = (await call(app, "GET", "/metrics")).body.decode()
        assert 'cellar_requests_total{endpoint="completions",finish_reason="stop",model_name="second"} 1.0' in text
        lease.release()
        await asyncio.sleep(0.05)
        assert app.state.loader.names == ("first",)
        (tmp_path / "first.gguf").unlink()
        assert await names() == []
        assert (await call(app, "GET", "/metrics")).status == 200
        (tmp_path / "second.gguf").touch()
        assert await names() == ["second"]
        assert await complete("second") == 200
        await app.state.loader.close()

    asyncio.run(work())


def test_a_new_model_with_the_name_of_another_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_scan, "SCAN_SECONDS", 0.0)
    (tmp_path / "a.gguf").touch()
    server = replace(SERVER, models_dir=str(tmp_path), served_names=())

    async def work() -> None:
        app = create_app_of_several([ModelEntry("a", SERVER)], Launcher(), LoaderLimits(8), server)
        for _ in range(2):
            assert [model["id"] for model in (await call(app, "GET", "/v1/models")).json["data"]] == ["a"]

    asyncio.run(work())
    assert [record.message for record in caplog.records if "two models" in record.message] == [
        f"two models have the name a: a and {tmp_path / 'a.gguf'}; give one of them another name"
    ]


def test_the_folder_is_read_once_in_a_while(tmp_path: Path) -> None:
    async def work() -> None:
        scan = folder_scan.FolderScan(replace(SERVER, models_dir=str(tmp_path)))
        results = await asyncio.gather(*(scan.read() for _ in range(3)))
        assert results == [(), None, None]

    asyncio.run(work())


def test_a_body_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the middleware, which needs its model; the route parses an invalid body again for its error."""
    middleware, route = counting(monkeypatch, load_middleware, "loads"), counting(monkeypatch, parsing, "loads")

    async def scenario(app: Any, launcher: Launcher) -> None:
        for padding in (0, LARGE_BODY_BYTES):
            body = b'{"model": "a", "prompt": "Hi"}' + b" " * padding
            assert (await call(app, "POST", "/v1/completions", body=body)).status == 200
        assert (len(middleware), len(route)) == (2, 0)
        answer = await call(app, "POST", "/v1/completions", body=b'{"model": "a", "prompt": 1, "prompt": 2}')
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json")

    _run(scenario)
