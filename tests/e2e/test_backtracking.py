"""A tokenizer whose regular expression backtracks: texts that it cannot split are refused, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from engine.engine import Engine
from engine.text.regex_limit import REASON
from server.configuration.settings import Settings
from tests.engine.embedder.folders import lay_out, save_embedder
from tests.engine.kit.models import save_model
from tests.engine.kit.tokenizers import split_before
from tests.server.fakes import serve_in_thread

# Not the check of the start: no character is repeated.
EXPRESSION, TEXT = "((ab)+)+$", "ab" * 40 + "!"
CHAT = [{"role": "user", "content": TEXT}]
REQUESTS = [
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<end>" + TEXT}]}),
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/completions", {"prompt": "a", "prediction": {"type": "content", "content": TEXT}}),
    ("/v1/responses", {"input": TEXT}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 4, "messages": CHAT}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": CHAT}),
    ("/tokenize", {"content": TEXT}),
    ("/api/generate", {"model": "tiny", "prompt": TEXT}),
    ("/v1/embeddings", {"input": TEXT}),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a tiny model and a tiny embedding model with the tokenizer."""
    root = tmp_path_factory.mktemp("models")
    folder, embedder = save_model("llama", root / "tiny"), save_embedder("bert", root / "bert")
    lay_out(embedder, {"pooling_mode_mean_tokens": True})
    for each in (folder, embedder):
        split_before(each, EXPRESSION)
    settings = Settings(
        model=str(folder),
        context=96,
        slots=2,
        threads=1,
        served_names=("tiny",),
        drafter="none",
        embedding_model=str(embedder),
    )
    with serve_in_thread(Engine(settings.engine_config()), settings) as port:
        with httpx.Client(transport=httpx.HTTPTransport(retries=5), timeout=60) as waiting:
            deadline = time.monotonic() + 120
            while (ready := waiting.get(f"http://127.0.0.1:{port}/ready")).status_code != 200:
                assert time.monotonic() < deadline, ready.text
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
def test_a_text_that_the_tokenizer_cannot_split_is_a_400(address: str) -> None:
    """In every API, while another request generates; nothing of the server is lost."""
    body = {"prompt": "a", "max_tokens": 64, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=address, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        for path, request in REQUESTS:
            answer = client.post(path, json=request)
            assert (path, answer.status_code) == (path, 400), answer.text
            assert REASON in answer.text
        assert client.get("/health").status_code == 200
        assert "data: [DONE]" in list(lines)

        assert client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2}).status_code == 200
