"""Two chat models and an embedding model in one server, in memory for one and a half of them."""

from __future__ import annotations

import json
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoTokenizer

from engine.engine import Engine
from server.configuration.settings import Settings
from server.models.instance import BACKOFF_SECONDS
from tests.e2e.serving import serving
from tests.engine.embedder.folders import lay_out, save_embedder, states
from tests.engine.kit.models import save_model
from tests.server.fakes import serve_in_thread

FAMILIES = {"red": "llama", "blue": "qwen3"}
QUESTIONS = ("why?", "the cat sat", "a thing in the end", "who is it", "tell me", "in the rain", "one two", "x")
REQUESTS, CLIENTS, STREAMS = 200, 12, 8
FLAGS = ["--drafter", "none", "--threads", "1", "--store", "memory"]
ALL = "2GiB"
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Alone:
    """What each model answers alone: texts by model and question, vectors by question."""

    folder: Path
    texts: dict[tuple[str, str], str]
    vectors: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("models")
    texts: dict[tuple[str, str], str] = {}
    for name, family in FAMILIES.items():
        save_model(family, folder / name)
        settings = Settings(model=str(folder / name), served_names=(name,), slots=1, threads=1, drafter="none")
        with serve_in_thread(Engine(settings.engine_config()), settings) as port:
            address = f"http://127.0.0.1:{port}"
            with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
                while client.get(f"{address}/ready").status_code != 200:
                    time.sleep(0.1)
            texts |= {(name, question): chat(address, name, question) for question in QUESTIONS}
    vectors = save_embedder("bert", folder / "vectors")
    lay_out(vectors, {"pooling_mode_mean_tokens": True}, "Normalize")
    tokenizer = AutoTokenizer.from_pretrained(vectors)
    rows = {text: normalize(states(vectors, tokenizer(text)["input_ids"]).mean(0), dim=0) for text in QUESTIONS}
    return Alone(folder, texts, rows)


@pytest.fixture(scope="module")
def one_and_a_half(alone: Alone) -> str:
    """Memory for one and a half of the largest model."""
    with several(alone, ALL) as (address, _):
        stream(address, "red", "why?"), stream(address, "blue", "why?"), embed(address, "why?")
        sizes = [model["size"] for model in httpx.get(f"{address}/api/ps").json()["models"]]
    print("grants in MiB:", [size >> 20 for size in sizes])
    assert len(sizes) == 3
    return f"{3 * max(sizes) // 2 >> 20}MiB"


@contextmanager
def several(alone: Alone, memory: str) -> Iterator[tuple[str, IO[str]]]:
    """The address of a server of all models, and its log."""
    flags = ["--models", str(alone.folder), "--memory", memory, *FLAGS]
    with tempfile.TemporaryFile("w+") as errors, serving(flags, errors) as address:
        yield address, errors


def chat(address: str, model: str, question: str, tokens: int = 24) -> str:
    """The text of a greedy answer."""
    answer = httpx.post(f"{address}/v1/chat/completions", json=_body(model, question, tokens), timeout=600)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def stream(address: str, model: str, question: str) -> str:
    """The text of a streamed answer; comments tell the phase of a load."""
    text = ""
    body = {**_body(model, question, 24), "stream": True}
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=600) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content") or ""
    return text


def embed(address: str, text: str) -> torch.Tensor:
    answer = httpx.post(f"{address}/v1/embeddings", json={"model": "vectors", "input": text}, timeout=600)
    assert answer.status_code == 200, answer.text
    return torch.tensor(answer.json()["data"][0]["embedding"])


def _body(model: str, question: str, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": tokens,
    }


def _log(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()


def test_mixed_requests_get_the_answers_of_each_model_alone(alone: Alone, one_and_a_half: str) -> None:
    assert alone.texts["red", "why?"] != alone.texts["blue", "why?"]
    draw = random.Random(0)
    jobs = [(draw.choice(("red", "blue", "vectors")), draw.choice(QUESTIONS), draw.random()) for _ in range(REQUESTS)]

    with several(alone, one_and_a_half) as (address, errors):

        def work(job: tuple[str, str, float]) -> bool:
            model, question, chance = job
            if model == "vectors":
                return torch.allclose(alone.vectors[question], embed(address, question), rtol=0, atol=1e-5)
            ask = stream if chance < 0.5 else chat
            return ask(address, model, question) == alone.texts[model, question]

        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as clients:
            rights = list(clients.map(work, jobs))
        seconds = time.monotonic() - began
        metrics = httpx.get(f"{address}/metrics").text
        unloads = Counter(re.findall(r"model (\w+): unloaded \(memory\)", _log(errors)))

    loads = sum(float(count) for count in re.findall(r'cellar_model_loads_total\{.*"ready".*\} (\S+)', metrics))
    spent = sum(float(value) for value in re.findall(r"cellar_model_load_seconds_sum\S* (\S+)", metrics))
    print(f"{REQUESTS} requests in {seconds:.0f} s, {loads:.0f} loads in {spent:.0f} s, unloads {dict(unloads)}")
    assert all(rights)
    assert loads >= 4
    assert 'outcome="failed"' not in re.sub(r'.*outcome="failed".* 0\.0', "", metrics)


def test_clients_of_ollama_load_and_unload(alone: Alone, one_and_a_half: str) -> None:
    ollama = pytest.importorskip("ollama")
    with several(alone, one_and_a_half) as (address, _), ollama.Client(address) as client:

        def loaded() -> list[str | None]:
            return [model.model for model in client.ps().models]

        assert {model.model for model in client.list().models} >= {"red", "blue", "vectors"}
        assert loaded() == []
        for name in ("red", "blue"):
            assert client.generate(name, "").done_reason == "load"
            assert loaded() == [name]
        [running] = client.ps().models
        assert running.size is not None
        assert running.size > 2**20
        assert client.generate("blue", "", keep_alive=0).done_reason == "unload"
        ended = time.monotonic() + 30
        while loaded() and time.monotonic() < ended:
            time.sleep(0.2)
        assert loaded() == []
        answer = client.chat(
            "red", [{"role": "user", "content": "why?"}], options={"temperature": 0, "num_predict": 24}
        )
        assert answer.message.content == alone.texts["red", "why?"]


@pytest.mark.timeout(600)
def test_the_ends_of_a_process_leave_the_other_model_and_no_process(alone: Alone) -> None:
    """After three ends the model waits for a minute, and it answers again before and after that."""
    with several(alone, ALL) as (address, errors), ThreadPoolExecutor(STREAMS) as clients:
        stream(address, "blue", "why?")
        is_over = threading.Event()
        streams = [clients.submit(_stream_until, address, is_over) for _ in range(STREAMS)]
        try:
            for _ in range(3):
                _check_and_kill(alone, address, errors)
                time.sleep(5)
            _check_refusal(address)
            time.sleep(BACKOFF_SECONDS)
            _check_and_kill(alone, address, errors)
            time.sleep(5)
            _check_refusal(address)
        finally:
            is_over.set()
        for answers in (future.result() for future in streams):
            assert answers
            assert all(text == alone.texts["blue", question] for question, text in answers)


def _check_and_kill(alone: Alone, address: str, errors: IO[str]) -> None:
    """The model answers as alone; then its process is killed, and its helpers end."""
    assert chat(address, "red", "why?") == alone.texts["red", "why?"]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    body = {**_body("red", "why?", 4), "response_format": schema}
    assert httpx.post(f"{address}/v1/chat/completions", json=body, timeout=600).status_code == 200
    worker = psutil.Process(int(re.findall(r"model red: process (\d+)", _log(errors))[-1]))
    helpers = worker.children(recursive=True)
    assert helpers
    worker.kill()
    _, running = psutil.wait_procs(helpers, timeout=20)
    assert not running


def _check_refusal(address: str) -> None:
    """The model is not loaded again now; the error says why."""
    refused = httpx.post(f"{address}/v1/chat/completions", json=_body("red", "why?", 4), timeout=60)
    assert refused.status_code == 503
    assert "SIGKILL" in refused.json()["error"]["message"]
    assert 0 < int(refused.headers["retry-after"]) <= 600


def _stream_until(address: str, is_over: threading.Event) -> list[tuple[str, str]]:
    answers = []
    while not is_over.is_set():
        for question in QUESTIONS:
            answers.append((question, stream(address, "blue", question)))
    return answers
