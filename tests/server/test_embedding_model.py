"""The embedding model on the wire: model names and parameters."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.errors import Overloaded
from engine.types.events import Embedded, Event, Failed
from engine.types.request import EmbeddingJob
from engine.types.status import DraftingInfo, EmbeddingModelInfo
from server.app import create_app
from server.configuration.settings import Settings
from server.lifecycle import banner
from server.schemas.capabilities import Capabilities
from server.schemas.embeddings import EmbeddingList
from server.schemas.models import ModelList
from tests.server.embedders import count_letters
from tests.server.fakes import INFO, MEMORY, Answer, FakeEngine, ask, settings

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
NAME = "org/vectors"
MODEL = EmbeddingModelInfo(
    model=replace(INFO, name=NAME, architecture="FakeModel", context=16, slots=0, parameters=77),
    output_kind="vectors",
    dimensions=3,
    prompts=("query",),
    similarity="cosine",
    weights_bytes=1 << 20,
    workspace_bytes=1 << 10,
)
RANKER = replace(MODEL, output_kind="scores", dimensions=1)


def like(job: EmbeddingJob) -> Iterator[Event]:
    """A ranker that likes the letter b."""
    for each in job.inputs:
        yield Embedded(struct.pack("<f", each.tokens.count(ord("b")) / 4))
    *_, end = count_letters(job)
    yield end


def serve(engine: FakeEngine) -> Any:
    return create_app(engine, settings(embedding_model=NAME))  # type: ignore[arg-type]


def post(path: str, engine: FakeEngine | None = None, **fields: Any) -> Answer:
    return ask(serve(engine or FakeEngine(embedding=MODEL)), "POST", path, json_body=fields)


# For refused requests: an app takes longer to create than to call.
IDLE = FakeEngine(embedding=MODEL)
APP = serve(IDLE)


@pytest.mark.parametrize("name", [None, NAME, "fake", "text-embedding-3-small"])
def test_every_name_selects_the_embedding_model(name: str | None) -> None:
    """Clients have default names of their own. The answer names the actual model."""
    engine = FakeEngine(embedding=MODEL)
    answer = post(EMBEDDINGS, engine, input=["aab", "b"], **({} if name is None else {"model": name})).json

    assert ([], 1) == (engine.requests, len(engine.jobs))
    assert pytest.approx([2 / math.sqrt(5), 1 / math.sqrt(5), 0]) == answer["data"][0]["embedding"]
    assert [0.0, 1.0, 0.0] == answer["data"][1]["embedding"]
    assert (NAME, {"prompt_tokens": 8, "total_tokens": 8}) == (answer["model"], answer["usage"])
    TypeAdapter(EmbeddingList).validate_python(answer, strict=True, extra="forbid")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("ab", [(1, 97, 98, 2)]),
        (["a", "b"], [(1, 97, 2), (1, 98, 2)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
def test_texts_get_special_tokens_and_tokens_stay_as_they_are(given: object, read: list[tuple[int, ...]]) -> None:
    """Of all four forms of an input one job is made."""
    engine = FakeEngine(embedding=MODEL)
    post(EMBEDDINGS, engine, input=given)

    assert [read] == [[each.tokens for each in job.inputs] for job in engine.jobs]


def test_the_purpose_selects_the_prompt() -> None:
    """It is read with the text, and counted."""
    engine = FakeEngine(embedding=MODEL)
    plain, asked = (post(EMBEDDINGS, engine, input="ab", input_type=purpose).json for purpose in ("document", "query"))

    assert [0, 2] == [job.inputs[0].prompt_tokens for job in engine.jobs]
    assert [4, 6] == [answer["usage"]["prompt_tokens"] for answer in (plain, asked)]


@pytest.mark.parametrize(("most", "tokens"), [(6, 6), (-1, 16), (99, 16)])
def test_long_texts_are_truncated_on_request(most: int, tokens: int) -> None:
    """Special tokens stay; -1 is as many as the model takes."""
    engine = FakeEngine(embedding=MODEL)
    text = "a" * (14 if most == 99 else 50)
    answer = post(EMBEDDINGS, engine, input=text, truncate_prompt_tokens=most)

    assert (200, tokens) == (answer.status, answer.json["usage"]["prompt_tokens"])
    assert (1, 2) == (engine.jobs[0].inputs[0].tokens[0], engine.jobs[0].inputs[0].tokens[-1])


def test_fewer_dimensions_and_base64() -> None:
    """Cut, of length 1 again, and packed as OpenAI's client wants it."""
    cut = post(EMBEDDINGS, input="aab", dimensions=1, encoding_format="base64").json["data"][0]["embedding"]

    assert struct.pack("<f", 1.0) == base64.b64decode(cut)


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"input": "a" * 15}, "context_length_exceeded", "input", ("16 tokens", "has 17")),
        ({"input": ["a", "a" * 20]}, "context_length_exceeded", "input[1]", ("16 tokens", "has 22")),
        ({"input": [97] * 17}, "context_length_exceeded", "input", ("16 tokens", "has 17")),
        ({"input": "a", "dimensions": 4}, "invalid_value", "dimensions", ("have 3",)),
        ({"input": "a", "input_type": "poem"}, "invalid_value", "input_type", ("no such prompt",)),
        ({"input": [97], "input_type": "query"}, "invalid_value", "input_type", ("not to tokens",)),
        ({"input": "a", "truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens", ("at least 1",)),
        ({"input": "a", "pooling": "mean"}, "unsupported_parameter", "pooling", ("its pooling is fixed",)),
        ({"input": "a", "prompt_name": "query"}, "unknown_parameter", "prompt_name", ()),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], code: str, param: str, words: tuple[str, ...]) -> None:
    """With OpenAI's codes and the numbers, and nothing runs."""
    error = ask(APP, "POST", EMBEDDINGS, json_body=fields).json["error"]

    assert (code, param) == (error["code"], error["param"])
    assert all(word in error["message"] for word in words)
    assert [] == IDLE.jobs


@pytest.mark.parametrize("fields", [{"input_type": "query"}, {"input_type": "document"}])
def test_some_options_need_an_embedding_model(fields: dict[str, Any]) -> None:
    """By name, and /v1/capabilities says so too."""
    served = create_app(FakeEngine(), settings())  # type: ignore[arg-type]
    (name,) = fields
    error = ask(served, "POST", EMBEDDINGS, json_body={"input": "a", **fields}).json["error"]
    reply = ask(served, "GET", "/v1/capabilities").json

    assert ("unsupported_parameter", name) == (error["code"], error["param"])
    assert "refused" == reply["endpoints"][EMBEDDINGS]["parameters"][name]["support"]
    assert "embedding_model" not in reply


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_the_embedding_model_does_not_generate(path: str, body: dict[str, Any]) -> None:
    """Its name is not a model that makes text, and the answer says which one does."""
    answer = ask(APP, "POST", path, json_body={"model": NAME, **body})

    assert (404, "model_not_found", "model") == (
        answer.status,
        *map(answer.json["error"].get, ("code", "param")),
    )
    assert "does not support this endpoint" in answer.json["error"]["message"]
    assert "'fake'" in answer.json["error"]["message"]


def test_both_models_are_listed() -> None:
    """/v1/models, /v1/models/{id}, /health and /v1/capabilities know of both."""
    listed = ask(APP, "GET", "/v1/models").json
    TypeAdapter(ModelList).validate_python(listed, strict=True, extra="forbid")
    reply = ask(APP, "GET", "/v1/capabilities").json
    TypeAdapter(Capabilities).validate_python(reply, strict=True, extra="forbid")

    assert ["fake", "org/alias", NAME] == [model["id"] for model in listed["data"]]
    assert listed["data"][2] == ask(APP, "GET", f"/v1/models/{NAME}").json
    assert (3, 16, 0) == tuple(listed["data"][2]["meta"][name] for name in ("n_embd", "n_ctx", "n_slots"))
    assert ["fake", "org/alias", NAME] == ask(APP, "GET", "/health").json["models"]
    assert [] == ask(serve(FakeEngine(phase="weights")), "GET", "/health").json["models"]
    assert {
        "id": NAME,
        "makes": "vectors",
        "context": 16,
        "vocabulary": 256,
        "dimensions": 3,
        "similarity": "cosine",
        "prompts": ["query"],
    } == reply["embedding_model"]
    support = {name: one["support"] for name, one in reply["endpoints"][EMBEDDINGS]["parameters"].items()}
    assert ("honoured", "refused") == (support["input_type"], support["pooling"])


def test_ollama_lists_the_embedding_model() -> None:
    """Its vectors, cut unless that is forbidden; its entry and its card."""
    made = ask(APP, "POST", "/api/embed", json_body={"model": f"{NAME}:latest", "input": ["aab", "b" * 50]}).json
    one = ask(APP, "POST", "/api/embeddings", json_body={"model": "fake", "prompt": "b"}).json
    whole = ask(APP, "POST", "/api/embed", json_body={"model": NAME, "input": "b" * 50, "truncate": False})
    IDLE.jobs.clear()

    assert (NAME, 21, [0.0, 1.0, 0.0]) == (made["model"], made["prompt_eval_count"], made["embeddings"][1])
    assert [0.0, 1.0, 0.0] == one["embedding"]
    assert 400 == whole.status
    assert "has 52" in whole.json["error"]
    for path in ("/api/tags", "/api/ps"):
        assert ["fake", "org/alias", NAME] == [one["name"] for one in ask(APP, "GET", path).json["models"]]
    card = ask(APP, "POST", "/api/show", json_body={"model": NAME}).json
    assert (["embedding"], 3) == (card["capabilities"], card["model_info"]["fake.embedding_length"])
    assert "embedding" not in ask(APP, "POST", "/api/show", json_body={"model": "fake"}).json["capabilities"]


@pytest.mark.parametrize(
    ("similarity", "scores"),
    [
        ("cosine", [3 / math.sqrt(10), 0.0]),
        ("dot", [3.0, 0.0]),
        ("euclidean", [-1.0, -math.sqrt(6)]),
        ("manhattan", [-1.0, -4.0]),
    ],
)
def test_its_name_selects_vector_similarity(similarity: Any, scores: list[float]) -> None:
    """As its files say; each text is read once, queries with their prompt."""
    engine = FakeEngine(embedding=replace(MODEL, similarity=similarity))
    # The query is (1, 0, 1), the documents (2, 0, 1) and (0, 2, 0).
    answer = post(SCORE, engine, model=NAME, text_1="a", text_2=["aaQ", "bb", "bb"]).json

    assert [(1, *b"Q:a", 2), (1, *b"aaQ", 2), (1, *b"bb", 2)] == [each.tokens for each in engine.jobs[0].inputs]
    assert pytest.approx([*scores, scores[1]]) == [one["score"] for one in answer["data"]]
    assert (NAME, 14) == (answer["model"], answer["usage"]["total_tokens"])


def test_other_names_select_the_generating_model() -> None:
    """Vectors that are near are not what answers a question: whoever wants them says so."""
    engine = FakeEngine(embedding=MODEL, info_value=replace(INFO, context=65536))
    post(RERANK, engine, query="a", documents=["b"])

    assert [] == engine.jobs
    assert engine.requests


@pytest.mark.parametrize("fields", [{}, {"model": NAME}])
def test_a_reranker_is_the_default_for_ranking(fields: dict[str, Any]) -> None:
    """It was made for pairs; vectors come from the model then."""
    engine = FakeEngine(embedding=RANKER, embeds=like, info_value=replace(INFO, context=65536))
    ranked = post(RERANK, engine, query="q", documents=["x", "bb", "b"], **fields).json
    post(RERANK, engine, model="fake", query="q", documents=["b"])
    post(EMBEDDINGS, engine, input="a")

    assert [(1, 0.5), (2, 0.25), (0, 0.0)] == [(one["index"], one["relevance_score"]) for one in ranked["results"]]
    assert [(1, *b"q", 2, *b"x", 2), (1, *b"q", 2, *b"bb", 2), (1, *b"q", 2, *b"b", 2)] == [
        each.tokens for each in engine.jobs[0].inputs
    ]
    assert (NAME, 1) == (ranked["model"], len(engine.jobs))
    assert {"last", None} == {request.pooling for request in engine.requests}


@pytest.mark.parametrize("model", [MODEL, RANKER])
def test_compared_texts_can_be_truncated(model: EmbeddingModelInfo) -> None:
    """Else it is a 400 that names its side of the pair; the model itself is asked about all of a text."""
    engine = FakeEngine(embedding=model, embeds=count_letters if model is MODEL else like)
    pair = {"model": NAME, "text_1": "a", "text_2": "b" * 40}
    whole, cut = post(SCORE, engine, **pair), post(SCORE, engine, truncate_prompt_tokens=-1, **pair)
    asked = post(SCORE, engine, **{**pair, "model": "fake"}, truncate_prompt_tokens=-1)

    assert ("context_length_exceeded", "text_2") == (whole.json["error"]["code"], whole.json["error"]["param"])
    assert 200 == cut.status
    assert 16 == len(engine.jobs[-1].inputs[-1].tokens)
    assert "unsupported_parameter" == asked.json["error"]["code"]


@pytest.mark.parametrize("path", [SCORE, RERANK])
def test_it_takes_no_instruction(path: str) -> None:
    """Which is a sentence to a model that follows them."""
    pair = {"text_1": "a", "text_2": "b"} if path == SCORE else {"query": "a", "documents": ["b"]}
    error = ask(APP, "POST", path, json_body={"model": NAME, "instruction": "Be kind", **pair}).json["error"]

    assert ("unsupported_parameter", "instruction") == (error["code"], error["param"])


def broken(job: EmbeddingJob) -> Iterator[Event]:
    """A job that ends badly."""
    yield Failed("no finite value")


@pytest.mark.parametrize(
    ("engine", "status", "code"),
    [
        (FakeEngine(embedding=MODEL, embeds=broken), 500, "generation_failed"),
        (FakeEngine(embedding=MODEL, refusal=Overloaded(3, 2.0)), 429, "queue_full"),
        (FakeEngine(embedding=MODEL, phase="weights"), 503, "model_loading"),
        (FakeEngine(embedding=MODEL, phase="draining"), 503, "server_draining"),
    ],
)
def test_errors_have_the_common_format(engine: FakeEngine, status: int, code: str) -> None:
    """Failures of the job and of the engine."""
    answer = post(EMBEDDINGS, engine, input="a")

    assert (status, code) == (answer.status, answer.json["error"]["code"])


def test_the_settings_name_it() -> None:
    """By its folder or hub id, which is not that of the model."""
    assert Settings().embedding_name is None
    assert (
        NAME
        == Settings(embedding_model=NAME).embedding_name
        == Settings(embedding_model=NAME).engine_config().embedding_model
    )
    with pytest.raises(ValueError, match="--served-model-name"):
        Settings(model=NAME, embedding_model=NAME).check()
    assert ("chat",) == Settings(model=NAME, embedding_model=NAME, served_names=("chat",)).model_names


def test_the_start_up_screen_shows_the_embedding_model() -> None:
    """Its outputs, the maximum length of texts, and its memory."""
    text = banner(INFO, MEMORY, DraftingInfo(), Settings(), "http://127.0.0.1:8000", MODEL)

    assert "FakeModel, 77 parameters, float32" in text
    assert "vectors of 3 numbers, 16 tokens a text, weights 1.0 MiB + work 1.0 KiB" in text
