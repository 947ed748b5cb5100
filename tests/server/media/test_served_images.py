"""Images over HTTP together with shifts, batches, stored responses and continuations, on a server with one slot."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from tests.engine.kit.content_models import save_content_model
from tests.engine.media.processors import png
from tests.server.fakes import serve_in_thread
from tests.server.media.requests import data_url

pytestmark = pytest.mark.filterwarnings("ignore")

CHAT = "/v1/chat/completions"
CONTEXT = 96
GREEDY = {"model": "fake", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("model")
    save_content_model("llava", folder)
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", context=CONTEXT, slots=1, overflow="shift"))
    with serve_in_thread(engine) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while client.get("/ready").status_code != 200:
            time.sleep(0.05)
        yield client


def image(seed: int) -> str:
    return data_url(png(40, 30, seed))


def chat(*seeds: int, **fields: Any) -> dict[str, Any]:
    """A request with images before a text."""
    parts = [{"type": "image_url", "image_url": {"url": image(seed)}} for seed in seeds]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "hi"}]}]
    return {**GREEDY, "messages": messages, "max_tokens": 8, "return_token_ids": True, **fields}


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def tokens(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_a_shift_keeps_or_drops_whole_images(http: httpx.Client) -> None:
    """An answer longer than the context; its tokens are the same after a prefix hit, and in a stream."""
    short = post(http, CHAT, chat(1, 2))
    shifted = post(http, CHAT, chat(1, 2, max_tokens=CONTEXT - 4))
    again = post(http, CHAT, chat(1, 2, max_tokens=CONTEXT - 4))

    assert shifted["usage"]["completion_tokens"] == CONTEXT - 4
    assert shifted["usage"]["context_shifts"] > 0
    assert tokens(shifted)[:8] == tokens(short)
    assert tokens(again) == tokens(shifted)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_requests_of_one_slot_keep_their_images(http: httpx.Client) -> None:
    """Other images give other texts, alone and together."""
    asked = [chat(seed, max_tokens=6) for seed in range(4)]
    alone = [tokens(post(http, CHAT, body)) for body in asked]
    with ThreadPoolExecutor(4) as threads:
        together = [tokens(answer) for answer in threads.map(lambda body: post(http, CHAT, body), asked)]

    assert together == alone
    assert len({tuple(text) for text in alone}) > 1


def test_a_line_of_a_batch_has_an_image(http: httpx.Client) -> None:
    body = chat(5)
    line = json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": body})
    file = http.post("/v1/files", files={"file": ("lines.jsonl", line)}, data={"purpose": "batch"}).json()
    created = post(http, "/v1/batches", {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"})
    limit = time.monotonic() + 60
    while (batch := http.get(f"/v1/batches/{created['id']}").json())["status"] != "completed":
        assert time.monotonic() < limit, batch
        time.sleep(0.05)

    result = json.loads(http.get(f"/v1/files/{batch['output_file_id']}/content").text)
    online = post(http, CHAT, body)
    assert result["response"]["status_code"] == 200
    assert tokens(result["response"]["body"]) == tokens(online)
    assert result["response"]["body"]["usage"]["prompt_tokens"] == online["usage"]["prompt_tokens"]


def test_a_response_continues_after_an_image(http: httpx.Client) -> None:
    """The stored image is in the prompt: the answer is that to the whole conversation."""
    content = [{"type": "input_image", "image_url": image(6)}, {"type": "input_text", "text": "hi"}]
    first_input, second_input = {"role": "user", "content": content}, {"role": "user", "content": "and"}
    options = {"model": "fake", "temperature": 0, "max_output_tokens": 6}
    first = post(http, "/v1/responses", {**options, "input": [first_input]})
    second = post(http, "/v1/responses", {**options, "input": [second_input], "previous_response_id": first["id"]})
    whole = post(http, "/v1/responses", {**options, "input": [first_input, *first["output"], second_input]})
    without = post(http, "/v1/responses", {**options, "input": [second_input]})

    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > without["usage"]["input_tokens"]
    assert second["usage"]["input_tokens_details"]["image_tokens"] > 0
    texts = [[part["text"] for item in answer["output"] for part in item["content"]] for answer in (second, whole)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("count", [1, 5, 8, 80])
def test_an_answer_to_an_image_is_continued(http: httpx.Client, count: int) -> None:
    """After any number of tokens, also beyond context shifts."""
    length = 8 if count <= 8 else CONTEXT - 4
    whole = post(http, CHAT, chat(7, max_tokens=length))
    continued = post(http, CHAT, chat(7, max_tokens=length, continue_from={"tokens": tokens(whole)[:count]}))

    assert continued["choices"][0]["message"] == whole["choices"][0]["message"]
    assert continued["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == length
