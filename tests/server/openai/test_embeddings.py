"""POST /v1/embeddings: responses, errors, and the queue under a long list of inputs."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.errors import Overloaded
from engine.types.events import Embedded, Event, Failed, Started
from engine.types.request import Request
from server.app import create_app
from server.schemas.embeddings import EmbeddingList
from tests.server.fakes import INFO, Answer, FakeEngine, ask, finished, settings

USAGE = {"prompt_tokens": 3, "total_tokens": 3}


def embed(request: Request) -> Iterator[Event]:
    """A vector of three numbers, the last one distinct per input."""
    yield Started(len(request.prompt), 0, 7)
    yield Embedded(struct.pack("<3f", 3.0, 4.0, float(request.prompt[0] - 97)))
    usage = replace(finished(request).usage, completion_tokens=0)
    yield finished(request, reason="length", usage=usage)


def post(engine: FakeEngine | None = None, **fields: Any) -> Answer:
    app = create_app(engine or FakeEngine(embed), settings())  # type: ignore[arg-type]
    return ask(app, "POST", "/v1/embeddings", json_body={"model": "fake", "input": "abc", **fields})


# For refused requests: an app takes longer to create than to call.
IDLE = FakeEngine(embed)
APP = create_app(IDLE, settings())  # type: ignore[arg-type]


def test_response_has_every_field() -> None:
    """A vector of length 1, and usage."""
    answer = post().json
    (vector,) = answer["data"]

    assert pytest.approx([0.6, 0.8, 0.0]) == vector.pop("embedding")
    assert {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}],
        "model": "fake",
        "usage": USAGE,
    } == answer
    TypeAdapter(EmbeddingList).validate_python(post().json, strict=True, extra="forbid")


def test_base64_is_little_endian_float32() -> None:
    """The default of OpenAI's client; both encodings have the same numbers."""
    text = post(encoding_format="base64").json["data"][0]["embedding"]

    assert post(encoding_format="float").json["data"][0]["embedding"] == list(
        struct.unpack("<3f", base64.b64decode(text))
    )


def test_dimensions_truncate_and_normalise() -> None:
    """More dimensions than the model has are an error with the model's number."""
    assert pytest.approx([1.0]) == post(dimensions=1).json["data"][0]["embedding"]

    answer = post(dimensions=4)
    assert (400, "invalid_value", "dimensions") == (answer.status, *map(answer.json["error"].get, ("code", "param")))
    assert "have 3" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [(97, 98)]),
        (["a", "bc"], [(97,), (98, 99)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
def test_an_input_has_four_forms(given: object, prompts: list[tuple[int, ...]]) -> None:
    """Each input is one engine request without generated tokens."""
    engine = FakeEngine(embed)
    answer = post(engine, input=given)

    assert prompts == [request.prompt for request in engine.requests]
    assert {"last"} == {request.pooling for request in engine.requests}
    assert list(range(len(prompts))) == [vector["index"] for vector in answer.json["data"]]
    assert sum(map(len, prompts)) == answer.json["usage"]["prompt_tokens"]


def test_mean_pooling() -> None:
    engine = FakeEngine(embed)
    post(engine, pooling="mean")

    assert ["mean"] == [request.pooling for request in engine.requests]


def test_zero_vector_is_not_normalised() -> None:
    """The response contains no NaN."""

    def nothing(request: Request) -> Iterator[Event]:
        yield Embedded(struct.pack("<2f", 0.0, 0.0))
        yield finished(request)

    assert [0.0, 0.0] == post(FakeEngine(nothing)).json["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ["a", ""]}, "invalid_value", "input[1]"),
        ({"input": [999]}, "invalid_value", "input"),
        ({"input": ["a"] * 2049}, "invalid_value", "input"),
        ({"input": "a" * 99}, "context_length_exceeded", "input"),
        ({"dimensions": 0}, "invalid_value", "dimensions"),
        ({"encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"pooling": "cls"}, "invalid_value", "pooling"),
        ({"input_type": "query"}, "unsupported_parameter", "input_type"),
        ({"input": "a" * 99, "truncate_prompt_tokens": 65}, "context_length_exceeded", "input"),
        ({"nonsense": 5}, "unknown_parameter", "nonsense"),
        ({"model": "other"}, "model_not_found", "model"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], code: str, param: str) -> None:
    """No request is run."""
    answer = ask(APP, "POST", "/v1/embeddings", json_body={"input": "abc", **fields})

    assert (code, param) == (answer.json["error"]["code"], answer.json["error"]["param"])
    assert answer.status in (400, 404)
    assert [] == IDLE.requests


@pytest.mark.parametrize(
    ("path", "fields", "prompts"),
    [
        ("/v1/embeddings", {"truncate_prompt_tokens": 5}, [5, 3]),
        ("/v1/embeddings", {"truncate_prompt_tokens": -1}, [64, 3]),
        ("/api/embed", {}, [64, 3]),
        ("/api/embed", {"truncate": True}, [64, 3]),
        ("/api/embeddings", {}, [64]),
    ],
)
def test_language_model_truncates_inputs(path: str, fields: dict[str, Any], prompts: list[int]) -> None:
    """To the requested length, or to the context."""
    engine, texts = FakeEngine(embed), ["a" * 5000, "abc"]
    given = {"prompt": texts[0]} if path == "/api/embeddings" else {"input": texts}
    app = create_app(engine, settings())  # type: ignore[arg-type]

    answer = ask(app, "POST", path, json_body={"model": "fake", **given, **fields})

    assert 200 == answer.status, answer.body
    assert prompts == [len(request.prompt) for request in engine.requests]


def test_input_beyond_the_context_is_refused() -> None:
    """`truncate` false: 400 with both numbers."""
    answer = ask(APP, "POST", "/api/embed", json_body={"model": "fake", "input": "a" * 99, "truncate": False})

    assert 400 == answer.status
    assert "64 tokens" in answer.json["error"]


class Crowded(FakeEngine):
    """An engine with a queue of `places` requests."""

    places = 2
    most = 0

    def open(self, request: Request) -> Any:
        if len(self.running) >= self.places:
            raise Overloaded(self.places, 2.0)
        self.most = max(self.most, len(self.running) + 1)
        return super().open(request)


def test_long_list_uses_few_queue_places() -> None:
    """At most one running input per slot, fewer if the queue is full."""
    for places, most in ((9, INFO.slots), (2, 2), (1, 1)):
        engine = Crowded(embed)
        engine.places = places
        answer = post(engine, input=[chr(97 + at) for at in range(20)])

        assert 200 == answer.status
        vectors = [vector["embedding"][2] for vector in answer.json["data"]]
        assert sorted(vectors) == vectors
        assert most == engine.most


def test_full_queue_is_a_429() -> None:
    """If no input of this request runs, waiting is not an option."""
    engine = Crowded(embed)
    engine.places = 0

    assert (429, "queue_full") == ((answer := post(engine, input=["a", "b"])).status, answer.json["error"]["code"])


def test_first_error_cancels_the_others() -> None:

    def script(request: Request) -> Iterator[Event]:
        yield from [Failed("no finite value")] if request.prompt == (98,) else embed(request)

    engine = FakeEngine(script)
    answer = post(engine, input=["a", "b", "c", "d", "e", "f", "g"])

    assert (500, "generation_failed") == (answer.status, answer.json["error"]["code"])
    assert set() == engine.running
