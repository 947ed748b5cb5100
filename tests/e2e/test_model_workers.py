"""Embedding models, rankers and batches in processes of their own, and the memory after unloads."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.serving import ROOT, serving
from tests.engine.embedder.folders import TEXTS, lay_out, save_embedder, states
from tests.engine.kit.models import save_model

FLAGS = ["--drafter", "none", "--threads", "1", "--store", "memory", "--memory", "2GiB"]
ROUNDS, WARM_ROUNDS = 20, 2
MIB = 2**20
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that generate, an embedding model and a ranker."""
    folder = tmp_path_factory.mktemp("models")
    save_model("llama", folder / "red")
    save_model("qwen3", folder / "blue")
    vectors = save_embedder("bert", folder / "vectors")
    lay_out(vectors, {"pooling_mode_mean_tokens": True}, "Normalize")
    save_embedder("ranker", folder / "ranker")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with tempfile.TemporaryFile("w+") as errors, serving(["--models", str(folder), *FLAGS], errors) as address:
        yield address


def post(address: str, path: str, **body: Any) -> Any:
    """The content of an answer."""
    answer = httpx.post(f"{address}{path}", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_vectors_are_those_of_transformers(folder: Path, address: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "vectors")
    expected = [normalize(states(folder / "vectors", tokenizer(text)["input_ids"]).mean(0), dim=0) for text in TEXTS]
    answer = post(address, "/v1/embeddings", model="vectors", input=TEXTS)

    vectors = torch.tensor([row["embedding"] for row in answer["data"]])
    assert torch.allclose(vectors, torch.stack(expected), rtol=0, atol=1e-5)
    assert answer["model"] == "vectors"


def test_scores_are_those_of_transformers(folder: Path, address: str) -> None:
    """By both routes; documents are ranked."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "ranker")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "ranker").eval()
    with torch.inference_mode():
        logits = [float(model(**tokenizer("why?", text, return_tensors="pt")).logits[0, 0]) for text in TEXTS]
    expected = torch.tensor(logits).sigmoid()
    scored = post(address, "/v1/score", model="ranker", text_1="why?", text_2=TEXTS)
    ranked = post(address, "/v1/rerank", model="ranker", query="why?", documents=TEXTS)

    assert torch.allclose(torch.tensor([row["score"] for row in scored["data"]]), expected, rtol=0, atol=1e-5)
    assert [row["index"] for row in ranked["results"]] == expected.argsort(descending=True).tolist()
    assert {row["index"]: row["relevance_score"] for row in ranked["results"]} == pytest.approx(
        dict(enumerate(expected.tolist())), abs=1e-5
    )


def test_a_model_of_another_kind_is_a_client_error(address: str) -> None:
    """It names the endpoint's kind of model."""
    body = {"messages": [{"role": "user", "content": "a"}]}
    for name in ("vectors", "ranker"):
        answer = httpx.post(f"{address}/v1/chat/completions", json={"model": name, **body}, timeout=600)
        assert answer.status_code == 404, answer.text


def test_a_batch_names_several_models(address: str) -> None:
    """Each line has the text that its model gives online."""
    lines = {
        f"{name} {number}": {
            "model": name,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 16,
        }
        for number, text in enumerate(TEXTS[:3])
        for name in ("red", "blue")
    }
    requests = [
        {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body} for id, body in lines.items()
    ]
    content = "\n".join(map(json.dumps, requests)).encode()
    expected = {id: post(address, "/v1/chat/completions", **body)["choices"] for id, body in lines.items()}

    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        give_up = time.monotonic() + 240
        while batch.status != "completed":
            assert time.monotonic() < give_up, batch
            time.sleep(0.2)
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    texts = {result["custom_id"]: result["response"]["body"]["choices"] for result in results}
    assert texts == expected
    assert len({json.dumps(choices) for choices in texts.values()}) > 3


@pytest.mark.timeout(900)
def test_unloads_give_the_memory_back() -> None:
    """Of the bundled model: the proportional memory of all processes after 20 rounds is that after the first ones."""
    model = str(ROOT / "models" / "target")
    with (
        tempfile.TemporaryFile("w+") as errors,
        serving([model, model.replace("target", "draft"), *FLAGS], errors) as address,
    ):
        servers = psutil.Process().children()
        used: list[int] = []
        for _ in range(WARM_ROUNDS + ROUNDS):
            post(address, "/api/generate", model="target", prompt="why?", options={"num_predict": 8}, stream=False)
            post(address, "/api/generate", model="target", keep_alive=0, stream=False)
            ended = time.monotonic() + 60
            while httpx.get(f"{address}/api/ps").json()["models"]:
                assert time.monotonic() < ended
                time.sleep(0.05)
            used.append(sum(map(_proportional_bytes, servers)))
    print("MiB of all processes:", [round(count / MIB, 1) for count in used])
    assert used[-1] - used[WARM_ROUNDS - 1] < 20 * MIB


def _proportional_bytes(server: psutil.Process) -> int:
    """The memory of a process and its children, shared pages divided among their processes."""
    total = 0
    for process in (server, *server.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            # It ended meanwhile.
            continue
    return total
