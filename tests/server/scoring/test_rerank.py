"""POST /rerank and /score: prompts, and the formats of Jina, Cohere and vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.types.events import Delta, Event, Logprob, TokenLogprob
from engine.types.request import Request
from server.app import create_app
from server.schemas.scoring import Ranking, ScoreList
from tests.server.fakes import INFO, Answer, FakeEngine, ask, finished, settings


def judge(request: Request) -> Iterator[Event]:
    """A script in which the probability of "yes" grows with the occurrences of "good" in the prompt."""
    good = bytes(request.prompt).count(b"good")
    likely = {ord("y"): (1 + good) / 10, ord("n"): 0.1}
    labels = tuple(Logprob(token, "", b"", math.log(likely.get(token, 1.0))) for token in request.label_tokens)
    yield Delta("", (0,), (TokenLogprob(Logprob(0, "", b"", -1.0), (), labels),))
    yield finished(request, usage=replace(finished(request).usage, completion_tokens=1))


# For tests that do not look into the engine: to make an app takes longer than to ask it.
APP = create_app(FakeEngine(judge, info_value=replace(INFO, context=65536)), settings())  # type: ignore[arg-type]


def post(path: str, using: FakeEngine | None = None, **fields: Any) -> Answer:
    app = create_app(using, settings()) if using else APP  # type: ignore[arg-type]
    return ask(app, "POST", path, json_body={"model": "fake", **fields})


DOCUMENTS = ["bad", {"text": "good good"}, "good"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_relevance(path: str) -> None:
    """With index, text and the probability of "yes" against "no"."""
    answer = post(path, query="q", documents=DOCUMENTS).json

    assert [(1, "good good", 0.75), (2, "good", 0.6667), (0, "bad", 0.5)] == [
        (each["index"], each["document"]["text"], each["relevance_score"]) for each in answer["results"]
    ]
    assert "fake" == answer["model"]
    assert answer["usage"]["total_tokens"] > answer["usage"]["prompt_tokens"] > 0
    TypeAdapter(Ranking).validate_python(answer, strict=True, extra="forbid")


def test_top_n_without_documents() -> None:
    answer = post("/rerank", query="q", documents=DOCUMENTS, top_n=1, return_documents=False).json

    assert [{"index": 1, "relevance_score": 0.75}] == answer["results"]


def test_texts_are_ranked_as_by_tei() -> None:
    """A list of indices and scores; without a model's name, as its clients send it."""
    body = {"query": "q", "texts": ["bad", "good good"], "truncate": True}
    plain = ask(APP, "POST", "/rerank", json_body=body).json
    raw = ask(APP, "POST", "/rerank", json_body={**body, "raw_scores": True, "return_text": True}).json

    assert [{"index": 1, "score": 0.75}, {"index": 0, "score": 0.5}] == plain
    assert [(1, "good good"), (0, "bad")] == [(each["index"], each["text"]) for each in raw]
    assert [math.log(3), 0.0] == pytest.approx([each["score"] for each in raw])


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
def test_documents_are_truncated_as_by_cohere(path: str) -> None:
    """To a number of tokens each; a byte is a token here."""
    engine = FakeEngine(judge, info_value=replace(INFO, context=65536))
    post(path, engine, query="q", documents=["good good", "ok"], max_tokens_per_doc=4)

    prompts = [bytes(request.prompt).decode() for request in engine.requests]
    for document in ("good", "ok"):
        assert any(f"<Document>: {document}\n" in prompt for prompt in prompts)
    assert not any("good good" in prompt for prompt in prompts)


def test_query_precedes_the_document() -> None:
    """Thus it is computed once for all documents; the instruction is configurable."""
    engine = FakeEngine(judge, info_value=replace(INFO, context=65536))
    post("/rerank", engine, query="why?", documents=["because"], instruction="Find reasons")

    text = bytes(engine.requests[0].prompt).decode()
    assert "<Instruct>: Find reasons\n<Query>: why?\n<Document>: because\n" in text


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [
        ("q", "good", [0.6667]),
        ("q", ["good", "bad"], [0.6667, 0.5]),
        (["q", "good"], ["good", "good"], [0.6667, 0.75]),
    ],
)
def test_pairs_are_scored_in_order(path: str, first: object, second: object, scores: list[float]) -> None:
    """One to one, one to many, many to many; by either pair of field names."""
    answer = post(path, text_1=first, text_2=second).json

    assert scores == [each["score"] for each in answer["data"]]
    assert list(range(len(scores))) == [each["index"] for each in answer["data"]]
    assert answer["data"] == post(path, queries=first, documents=second).json["data"]
    TypeAdapter(ScoreList).validate_python(answer, strict=True, extra="forbid")


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/rerank", {"query": "q", "documents": []}, "invalid_value", "documents"),
        ("/rerank", {"documents": ["a"]}, "invalid_value", "query"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "invalid_value", "top_n"),
        ("/rerank", {"query": "q", "documents": ["a" * 70000]}, "context_length_exceeded", "documents"),
        ("/rerank", {"query": "q"}, "invalid_value", "documents"),
        ("/v1/rerank", {"query": "q", "texts": ["a"]}, "invalid_value", "documents"),
        ("/rerank", {"query": "q", "texts": []}, "invalid_value", "texts"),
        ("/rerank", {"query": "q", "texts": ["a"], "documents": ["a"]}, "invalid_value", "texts"),
        ("/rerank", {"query": "q", "texts": ["a" * 70000]}, "context_length_exceeded", "texts"),
        ("/rerank", {"query": "q", "documents": ["a"], "max_tokens_per_doc": 0}, "invalid_value", "max_tokens_per_doc"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "invalid_value", "text_1"),
        ("/score", {"text_1": "a"}, "invalid_value", "text_2"),
    ],
)
def test_errors_name_the_field(path: str, fields: dict[str, Any], code: str, param: str) -> None:
    error = post(path, **fields).json["error"]

    assert (code, param) == (error["code"], error["param"])
