"""A real server with an embedding model beside the bundled one, as OpenAI's own client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoTokenizer

from engine.engine import Engine
from server.configuration.settings import Settings
from tests.engine.embedder.folders import QUERY, TEXTS, lay_out, save_embedder, states
from tests.server.fakes import serve_in_thread


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder in the layout of sentence-transformers."""
    made = save_embedder("bert", tmp_path_factory.mktemp("embedders") / "tiny-bert")
    lay_out(made, {"pooling_mode_mean_tokens": True}, "Normalize", prompts={"query": QUERY})
    return made


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    """A client of a server with both models."""
    settings = Settings(
        context=1024, slots=2, threads=1, served_names=("tiny",), drafter="none", embedding_model=str(folder)
    )
    with serve_in_thread(Engine(settings.engine_config()), settings) as port:
        address = f"http://127.0.0.1:{port}"
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as waiting:
            while waiting.get(f"{address}/ready").status_code != 200:
                pass
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client


def expected(folder: Path, text: str) -> torch.Tensor:
    """The vector by transformers alone."""
    return normalize(states(folder, AutoTokenizer.from_pretrained(folder)(text)["input_ids"]).mean(0), dim=0)


def test_vectors_are_those_of_the_folder_while_others_chat(client: openai.OpenAI, folder: Path) -> None:
    """In base64, under any name; the answers of the chat model are the same as alone."""

    def chat() -> str | None:
        reply = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "What is a cat?"}], temperature=0, max_tokens=16
        )
        return reply.choices[0].message.content

    alone = chat()
    with ThreadPoolExecutor(6) as clients:
        chats = [clients.submit(chat) for _ in range(3)]
        made = [clients.submit(client.embeddings.create, model="text-embedding-3", input=TEXTS) for _ in range(3)]

        assert {alone} == {each.result() for each in chats}
    for answer in (each.result() for each in made):
        assert "tiny-bert" == answer.model
        for text, each in zip(TEXTS, answer.data, strict=True):
            assert torch.allclose(expected(folder, text), torch.tensor(each.embedding), rtol=0, atol=1e-5)


def test_wishes_reach_it(client: openai.OpenAI, folder: Path) -> None:
    """A purpose, fewer dimensions, plain numbers, and a text that is cut."""
    asked = client.embeddings.create(
        model="tiny-bert",
        input="why? " * 20,
        dimensions=8,
        encoding_format="float",
        extra_body={"input_type": "query", "truncate_prompt_tokens": 20},
    )
    cut = (QUERY + "why? " * 20)[: 20 - 2]

    right = normalize(expected(folder, cut)[:8], dim=0)
    assert torch.allclose(right, torch.tensor(asked.data[0].embedding), rtol=0, atol=1e-5)
    assert 20 == asked.usage.prompt_tokens


def test_unsupported_requests_are_refused(client: openai.OpenAI) -> None:
    """A text that is too long, with both numbers; too many dimensions; a chat."""
    with pytest.raises(openai.BadRequestError, match="maximum context length is 48 tokens.*'input' has 102"):
        client.embeddings.create(model="tiny-bert", input="x" * 100)
    with pytest.raises(openai.BadRequestError, match="have 32"):
        client.embeddings.create(model="tiny-bert", input="x", dimensions=33)
    with pytest.raises(openai.NotFoundError, match="does not support this endpoint"):
        client.chat.completions.create(model="tiny-bert", messages=[{"role": "user", "content": "hi"}])
    assert ["tiny", "tiny-bert"] == [model.id for model in client.models.list()]
