"""Ollama's routes that change models: created names, downloads from a hub on this machine, deletion, permission."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from huggingface_hub import constants

from engine.load.hub.hub_cache import cached_models
from server.app import create_app
from server.models.presets import MAX_PRESET_CHARACTERS, MAX_PRESETS
from server.ollama import pull
from tests.server.fakes import Answer, FakeEngine, ask, serve_in_thread, settings
from tests.server.terminal.test_pull import FOLDER, SlowHub

NAME = "someone/tiny"
# Of a busy machine.
PATIENCE_SECONDS = 120.0
CREATE = {"model": "mario", "from": "fake", "system": "You are Mario.", "stream": False}


def served(**changes: Any) -> tuple[Any, FakeEngine]:
    """An app and its engine."""
    engine = FakeEngine()
    return create_app(engine, settings(**changes)), engine  # type: ignore[arg-type]


def post(app: Any, path: str, **body: Any) -> Answer:
    return ask(app, "POST", f"/api/{path}", json_body=body)


def delete(app: Any, name: str) -> Answer:
    return ask(app, "DELETE", "/api/delete", json_body={"model": name})


def names(app: Any) -> list[str]:
    return [model["name"] for model in ask(app, "GET", "/api/tags").json["models"]]


def lines(answer: Answer) -> list[Any]:
    return [json.loads(line) for line in answer.body.splitlines()]


def test_a_created_model_has_its_system_prompt_and_parameters() -> None:
    """A request overrides both; the response has the created name."""
    app, engine = served()
    created = post(app, "create", **CREATE, parameters={"temperature": 0.25, "top_k": 3, "stop": ["a", "b"]})
    asked = [{"role": "user", "content": "hi"}]
    answer = post(app, "chat", model="mario:latest", messages=asked, options={"top_k": 5}, stream=False)
    post(app, "chat", model="mario", messages=[{"role": "system", "content": "x"}, *asked], stream=False)
    post(app, "generate", model="mario", prompt="hi", stream=False)
    post(app, "generate", model="mario", prompt="hi", raw=True, stream=False)

    assert {"status": "success"} == created.json
    assert "mario:latest" == answer.json["model"]
    assert (0.25, 5) == (engine.requests[0].sampling.temperature, engine.requests[0].sampling.top_k)
    prompts = [bytes(request.prompt) for request in engine.requests]
    assert [b"You are Mario.\nhi\n", b"x\nhi\n", b"You are Mario.\nhi\n", b"hi"] == prompts
    assert ["fake", "org/alias", "mario"] == names(app)


def test_a_created_model_is_shown() -> None:
    app, _ = served()
    more = {"parameters": {"stop": ["a", "b"]}, "messages": [{"role": "user", "content": "Hi"}], "license": "MIT"}
    post(app, "create", **CREATE, **more)
    card = post(app, "show", model="mario").json

    assert ("You are Mario.", "MIT", "fake") == (card["system"], card["license"], card["details"]["parent_model"])
    assert ["stop", '"a"', "stop", '"b"'] == card["parameters"].split()
    assert {"FROM fake", 'SYSTEM """You are Mario."""', 'MESSAGE user """Hi"""'} <= {*card["modelfile"].splitlines()}
    assert "FROM fake\n" == post(app, "show", model="fake").json["modelfile"]


def test_messages_of_a_created_model_come_first() -> None:
    app, engine = served()
    post(app, "create", **{**CREATE, "system": ""}, messages=[{"role": "user", "content": "Hi"}])
    post(app, "chat", model="mario", messages=[{"role": "user", "content": "you"}], stream=False)
    post(app, "generate", model="mario", prompt="you", stream=False)

    assert [b"Hi\nyou\n"] * 2 == [bytes(request.prompt) for request in engine.requests]


def test_copies_and_further_models_inherit() -> None:
    """Deletion of the source leaves them."""
    app, engine = served()
    post(app, "create", **CREATE)
    post(app, "create", model="brother", **{"from": "mario"}, parameters={"top_k": 9})
    copied = post(app, "copy", source="mario", destination="twin")
    removed = delete(app, "mario:latest")
    for name in ("brother", "twin"):
        post(app, "chat", model=name, messages=[{"role": "user", "content": "hi"}], stream=False)

    assert (200, 200, b"") == (copied.status, removed.status, removed.body)
    assert ["fake", "org/alias", "brother", "twin"] == names(app)
    assert [b"You are Mario.\nhi\n"] * 2 == [bytes(request.prompt) for request in engine.requests]
    assert [9, 0] == [request.sampling.top_k for request in engine.requests]
    assert 404 == post(app, "chat", model="mario", messages=[]).status


def test_created_models_belong_to_a_key() -> None:
    """Another key sees none of them."""
    app, _ = served(keys=("one", "two"))

    def answer(key: str, method: str, path: str, body: Any = None) -> Answer:
        return ask(app, method, path, json_body=body, headers={"authorization": f"Bearer {key}"})

    answer("one", "POST", "/api/create", CREATE)

    assert 200 == answer("one", "POST", "/api/show", {"model": "mario"}).status
    assert 404 == answer("two", "POST", "/api/show", {"model": "mario"}).status
    assert 404 == answer("two", "DELETE", "/api/delete", {"model": "mario"}).status


def test_created_models_are_limited() -> None:
    app, _ = served()
    statuses = [post(app, "create", **{**CREATE, "model": str(at)}).status for at in range(MAX_PRESETS + 1)]
    long = post(app, "create", **{**CREATE, "model": "0", "system": "x" * MAX_PRESET_CHARACTERS})

    assert [200] * MAX_PRESETS + [413] == statuses
    assert 200 == post(app, "create", **{**CREATE, "model": "0"}).status
    assert (400, "'system'" in long.json["error"]) == (long.status, True)


@pytest.mark.parametrize(
    ("changes", "status", "named"),
    [
        ({"files": {"test.gguf": "sha256:0"}}, 400, "'files'"),
        ({"adapters": {"lora": "sha256:0"}}, 400, "'adapters'"),
        ({"modelfile": "FROM fake"}, 400, "'modelfile'"),
        ({"quantize": "q4_K_M"}, 400, "--quantize"),
        ({"from": "/models/other"}, 404, "cellar serve"),
        ({"from": "other"}, 404, "'other'"),
        ({"from": None}, 400, "'from'"),
        ({"model": "fake"}, 400, "'model'"),
        ({"template": "{{ .Prompt }}"}, 400, "'template'"),
        ({"parameters": {"mirostat": 1}}, 400, "'parameters.mirostat'"),
        ({"what": 1}, 400, "'what'"),
    ],
    ids=str,
)
def test_what_cannot_be_created_is_named(changes: Any, status: int, named: str) -> None:
    app, _ = served()
    answer = post(app, "create", **{**CREATE, **changes})

    assert (status, True) == (answer.status, named in answer.json["error"]), answer.json
    assert ["fake", "org/alias"] == names(app)


def test_the_folder_of_the_served_model_is_a_source() -> None:
    app, _ = served()

    assert 200 == post(app, "create", **{**CREATE, "from": "/models/fake"}).status


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/api/push", 400),
        ("HEAD", "/api/blobs/sha256:00", 404),
        ("POST", "/api/blobs/sha256:00", 400),
    ],
)
def test_uploads_are_refused(method: str, path: str, status: int) -> None:
    app, _ = served()
    answer = ask(app, method, path, json_body={"model": "fake"})

    assert status == answer.status
    assert method == "HEAD" or answer.json["error"]


CHANGES = [
    ("POST", "/api/pull", {"model": "fake"}),
    ("POST", "/api/create", CREATE),
    ("POST", "/api/copy", {"source": "fake", "destination": "copy"}),
    ("DELETE", "/api/delete", {"model": "copy"}),
]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES, ids=lambda value: str(value)[:12])
def test_models_are_changed_by_local_clients_or_with_a_key(method: str, path: str, body: Any) -> None:
    """Neither by other machines, also behind a proxy on this one, nor by pages of other origins."""
    app, _ = served(allowed_hosts=("https://chat.example.org",))
    with_keys, _ = served(keys=("secret",))

    def status(some: Any, address: str = "127.0.0.1", **headers: str) -> int:
        async def remote(scope: Any, receive: Any, send: Any) -> None:
            await some({**scope, "client": (address, 1)}, receive, send)

        return ask(remote, method, path, json_body=body, headers=headers).status

    assert status(app) in (200, 404)
    assert status(app, "::1", origin="https://chat.example.org") in (200, 404)
    assert status(app, origin="http://localhost") in (200, 404)
    for address, headers in (
        ("192.0.2.1", {}),
        ("127.0.0.1", {"x-forwarded-for": "192.0.2.1"}),
        ("127.0.0.1", {"origin": "https://page.example.org"}),
        ("127.0.0.1", {"origin": "null"}),
    ):
        assert 403 == status(app, address, **headers)
    assert 401 == status(with_keys)
    assert status(with_keys, "192.0.2.1", authorization="Bearer secret") in (200, 404)


def test_a_body_to_delete_is_limited() -> None:
    app, _ = served(limits={"body_bytes": 100})

    assert 413 == delete(app, "x" * 200).status


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowHub]:
    """A hub with the bundled model as someone/tiny, and an empty cache."""
    slow_hub, listener = SlowHub(FOLDER), socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(slow_hub.app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield slow_hub
    slow_hub.slow = False
    server.should_exit = True
    thread.join()


def test_a_pulled_model_is_in_the_cache_until_it_is_deleted(hub: SlowHub) -> None:
    """Status lines have bytes; the last one is a success."""
    app, _ = served()
    [first, *_, last] = statuses = lines(post(app, "pull", model=f"hf.co/{NAME}"))
    [cached] = cached_models()
    again = post(app, "pull", name=NAME, stream=False)
    deleted = [delete(app, NAME).status for _ in range(2)]

    assert ("pulling manifest", "success") == (first["status"], last["status"])
    assert f"cellar serve {NAME}" in statuses[-2]["status"]
    progress = [line for line in statuses if "digest" in line]
    assert cached.size_bytes == progress[-1]["completed"] == progress[-1]["total"]
    assert NAME == cached.id
    assert {"status": "success"} == again.json
    assert ([200, 404], []) == (deleted, cached_models())


def test_a_model_in_use_is_not_deleted(hub: SlowHub) -> None:
    """Neither by its name on the hub nor by a served name."""
    app, engine = served()
    post(app, "pull", model=NAME, stream=False)
    engine.info_value = replace(engine.info_value, folder=str(cached_models()[0].folder))
    by_name, alias = delete(app, NAME), delete(app, "fake")

    assert [400, 400] == [by_name.status, alias.status]
    assert "in use" in by_name.json["error"]
    assert 1 == len(cached_models())


def test_unknown_models_are_errors(hub: SlowHub) -> None:
    """A line of the stream, or the response; a hub without the model is told apart from none."""
    app, _ = served()
    [*_, last] = lines(post(app, "pull", model="someone/other"))
    whole = post(app, "pull", model="someone/other", stream=False)

    assert "the hub has no model of this name" in last["error"]
    assert (404, last["error"]) == (whole.status, whole.json["error"])
    for name in ("llama3.2", "a/b/c"):
        refused = post(app, "pull", model=name)
        assert (404, True) == (refused.status, "organisation/model" in refused.json["error"])
    assert 400 == post(app, "pull", model=NAME, insecure=True).status


def test_a_hub_out_of_reach_is_unavailable(hub: SlowHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    answer = post(served()[0], "pull", model="someone/other", stream=False)

    assert (503, "30") == (answer.status, answer.headers["retry-after"])
    assert "the hub is unreachable" in answer.json["error"]


def test_a_full_cache_is_named(hub: SlowHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    answer = post(served()[0], "pull", model=NAME, stream=False)

    assert 507 == answer.status
    assert "the download failed" in answer.json["error"]


def test_a_served_model_is_not_downloaded(hub: SlowHub) -> None:
    app, _ = served()
    for name in ("fake:latest", "org/alias"):
        assert "success" == lines(post(app, "pull", model=name))[-1]["status"]
    assert [] == cached_models()


def test_any_served_name_needs_no_download() -> None:
    """With --served-model-name '*', but names on the hub are downloaded."""
    app, _ = served(served_names=("fake", "*"))
    created = post(app, "create", **{**CREATE, "from": "llama3.2"})

    assert "success" == lines(post(app, "pull", model="llama3.2"))[-1]["status"]
    assert 404 == post(app, "pull", model="a/b/c").status
    assert 200 == created.status
    assert 200 == post(app, "chat", model="mario", messages=[{"role": "user", "content": "hi"}]).status


def test_a_disconnect_ends_the_download(hub: SlowHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unfinished file is removed; two downloads run at once."""
    # A busy machine takes longer than END_SECONDS to end a download, which is then killed with its file unfinished.
    monkeypatch.setattr(pull, "END_SECONDS", PATIENCE_SECONDS)
    hub.slow = True
    with serve_in_thread(FakeEngine()) as port:
        with begun_download(port, b'"completed"'), begun_download(port, b"manifest"):
            assert (429, "30") == download(port)[:2]
            assert unfinished(tmp_path)
        wait_until(lambda: not unfinished(tmp_path))
        hub.slow = False
        # The server may notice a disconnect later than the other.
        wait_until(lambda: (answer := download(port))[0] == 200 and b'"success"' in answer[2])


def download(port: int) -> tuple[int, str | None, bytes]:
    """Status, retry-after and all lines of a download."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    with closing(connection):
        connection.request("POST", "/api/pull", json.dumps({"model": NAME}), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.headers["retry-after"], answer.read()


@contextmanager
def begun_download(port: int, line: bytes) -> Iterator[None]:
    """A download that has sent a line; its connection is closed behind the block."""
    content = json.dumps({"model": NAME}).encode()
    head = f"POST /api/pull HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(head.encode() + content)
        received = b""
        while line not in received:
            received += (data := connection.recv(4096))
            assert data, received
        yield


def unfinished(folder: Path) -> list[Path]:
    return list(folder.rglob("*.incomplete"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
