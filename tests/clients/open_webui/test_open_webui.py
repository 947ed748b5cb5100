"""Open WebUI itself: its server, with Cellar as its OpenAI and its Ollama backend, driven as its page does.

Its models for speech, for embeddings and for documents are not installed: the embeddings are Cellar's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from subject import Server

START_SECONDS = 300.0
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
RUNNING = ("pending", "processing")
TASKS = ("title", "tags", "follow_up", "emoji", "queries", "image_prompt")


@pytest.fixture(scope="module")
def page(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of Open WebUI with a user's token."""
    folder = tmp_path_factory.mktemp("open-webui")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "DATA_DIR": str(folder),
        "OPENAI_API_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key,
        "OLLAMA_BASE_URL": server.url,
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": server.model,
        "RAG_OPENAI_API_BASE_URL": f"{server.url}/v1",
        "RAG_OPENAI_API_KEY": server.key,
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "secret",
        "OFFLINE_MODE": "true",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [str(Path(sys.prefix) / "bin" / "open-webui"), "serve", "--host", "127.0.0.1", "--port", f"{port}"]
    with (folder / "log").open("w") as log:
        program = subprocess.Popen(command, cwd=folder, env={**os.environ, **variables}, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=100, trust_env=False) as client:
            _wait(client, program, folder / "log")
            user = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).raise_for_status().json()
            client.headers["Authorization"] = f"Bearer {user['token']}"
            keys = {"ENABLE_OLLAMA_API": True, "OLLAMA_BASE_URLS": [server.url]}
            keys["OLLAMA_API_CONFIGS"] = {"0": {"enable": True, "key": server.key, "prefix_id": "ollama"}}
            client.post("/ollama/config/update", json=keys).raise_for_status()
            client.get("/api/models").raise_for_status()
            yield client
    finally:
        program.terminate()
        program.wait(60)


def _wait(client: httpx.Client, program: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_SECONDS
    while True:
        assert time.monotonic() < give_up, log.read_text()[-2000:]
        assert program.poll() is None, log.read_text()[-2000:]
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)


def post(page: httpx.Client, path: str, **body: Any) -> Any:
    answer = page.post(path, json=body)

    assert 200 == answer.status_code, answer.text
    return answer.json()


def chat(server: Server, question: str, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": [{"role": "user", "content": question}], "stream": False, **fields}


@pytest.mark.timeout(400)
def test_card(page: httpx.Client, server: Server) -> None:
    """Both backends list the model, and their settings are verified."""
    assert server.model in [model["id"] for model in page.get("/api/models").json()["data"]]
    assert post(page, "/openai/verify", url=f"{server.url}/v1", key=server.key)["data"]
    assert post(page, "/ollama/verify", url=server.url, key=server.key)["version"]
    assert page.get("/ollama/api/tags/0").json()["models"]
    assert page.get("/ollama/api/ps").json()["models"]


def test_chat(page: httpx.Client, server: Server) -> None:
    """With the parameters of its settings, and by the API of each backend."""
    params = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "max_tokens": 20, "seed": 1, "stop": ["xx"]}
    params |= {"frequency_penalty": 0.1, "presence_penalty": 0.1, "repeat_penalty": 1.1, "logit_bias": "5:1"}

    assert post(page, "/api/chat/completions", **chat(server, server.question))["choices"][0]["message"]["content"]
    assert post(page, "/api/chat/completions", **chat(server, server.question, params=params))["choices"]
    of_ollama = {"model": f"ollama.{server.model}"}
    assert post(page, "/api/chat/completions", **chat(server, server.question) | of_ollama)["choices"]
    assert post(page, "/ollama/api/chat/0", **chat(server, server.question) | of_ollama)["message"]["content"]
    assert post(page, "/ollama/api/generate/0", **of_ollama, prompt="Hello", stream=False)["response"]
    assert post(page, "/api/v1/messages", **chat(server, server.question, max_tokens=10))["content"]


def test_stream(page: httpx.Client, server: Server) -> None:
    """Events to their end."""
    with page.stream("POST", "/api/chat/completions", json=chat(server, server.question, stream=True)) as answer:
        lines = [line for line in answer.iter_lines() if line]

    assert len(lines) > 3
    assert "data: [DONE]" == lines[-1]
    assert not any('"error"' in line for line in lines)


def test_tools(page: httpx.Client, server: Server) -> None:
    """A call."""
    answer = post(page, "/api/chat/completions", **chat(server, server.weather, tools=[TOOL]))

    assert "get_weather" == answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"]


@pytest.mark.parametrize("task", TASKS)
def test_tasks(page: httpx.Client, server: Server, task: str) -> None:
    """Its prompts for titles, tags and others of a conversation."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    body = {"model": server.model, "messages": messages, "chat_id": "1", "prompt": "Hello", "type": "web_search"}

    assert post(page, f"/api/v1/tasks/{task}/completions", **body, stream=False)["choices"]


def test_embeddings(page: httpx.Client, server: Server) -> None:
    """By its API, and for a document, in which a chat finds its source."""
    assert 2 == len(post(page, "/api/embeddings", model=server.model, input=["a", "b"])["data"])
    notes = b"Cellar is a server. A slot is a place in its cache. " * 30
    file = page.post("/api/v1/files/", files={"file": ("notes.txt", notes)}).raise_for_status().json()
    give_up = time.monotonic() + 60
    while (status := page.get(f"/api/v1/files/{file['id']}/process/status").json()["status"]) in RUNNING:
        assert time.monotonic() < give_up, status
        time.sleep(0.2)
    answer = post(
        page, "/api/chat/completions", **chat(server, "What is a slot?", files=[{"type": "file", "id": file["id"]}])
    )

    assert "completed" == status
    assert "slot" in answer["sources"][0]["document"][0]


def test_count(page: httpx.Client, server: Server) -> None:
    """Of a message request."""
    assert post(page, "/api/v1/messages/count_tokens", **chat(server, "Hello", max_tokens=10))["input_tokens"] > 0


def test_errors(page: httpx.Client, server: Server) -> None:
    """A refusal reaches the page with its text."""
    answer = page.post("/api/chat/completions", json=chat(server, "Hello", max_tokens=-5))

    assert 400 == answer.status_code
    assert "max_tokens" in answer.text
