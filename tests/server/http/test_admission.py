"""Admission before the body is parsed."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import Overloaded
from server.app import create_app
from tests.server.fakes import FakeEngine, ask, settings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/compact": {"input": "hi"},
    "/v1/messages": {**CHAT, "model": "fake", "max_tokens": 9},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/v1/decisions": {"input": "hi"},
    "/api/chat": {**CHAT, "model": "fake"},
    "/api/generate": {"model": "fake", "prompt": "hi"},
    "/api/embed": {"model": "fake", "input": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_full_queue_refuses_before_anything_is_rendered(path: str) -> None:
    """In the error format of each API; no text is tokenized."""
    engine = FakeEngine(refusal=Overloaded(9, 3.0))
    answer = ask(create_app(engine, settings()), "POST", path, json_body=BODIES[path])  # type: ignore[arg-type]

    assert answer.status == 429
    assert "retry-after" in answer.headers
    assert "9 requests are waiting already." in str(answer.json["error"]).replace('"', "")
    assert engine.tokenizer.rendered == []
    assert engine.admissions == [""]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_refused_body_is_not_parsed(path: str) -> None:
    answer = ask(create_app(FakeEngine(refusal=Overloaded(9, 3.0)), settings()), "POST", path, body=b"{")  # type: ignore[arg-type]

    assert answer.status == 429


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tokenize", {"prompt": "hi"}),
        ("/v1/chat/completions/render", CHAT),
        ("/v1/messages/count_tokens", {**CHAT, "model": "fake"}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/api/chat", {"model": "fake", "messages": []}),
        ("/api/generate", {"model": "fake"}),
    ],
)
def test_requests_without_a_generation_ignore_the_queue(path: str, body: Any) -> None:
    """Counts of tokens, and Ollama's requests to load a model."""
    engine = FakeEngine(refusal=Overloaded(9, 3.0))

    assert ask(create_app(engine, settings()), "POST", path, json_body=body).status == 200  # type: ignore[arg-type]


def test_admission_knows_the_owner() -> None:
    """The queue has a share for each owner."""
    engine = FakeEngine()
    app = create_app(engine, settings(keys=("wine:one", "cheese:two")))  # type: ignore[arg-type]
    for key in ("one", "two", "one"):
        ask(app, "POST", "/v1/chat/completions", json_body=CHAT, headers={"authorization": f"Bearer {key}"})

    assert engine.admissions == [request.owner for request in engine.requests]
    assert len(set(engine.admissions)) == 2
