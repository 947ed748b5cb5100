"""prediction and speculation on the wire: the request of the engine, the answer, and errors."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.types.events import Event, Started, Usage
from engine.types.request import Request, SpeculationParams
from server.app import create_app
from tests.server.fakes import Answer, FakeEngine, FakeTokenizer, ask, finished, settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": "hi"},
}
both = pytest.mark.parametrize("path", [CHAT, TEXT])


def post(path: str, engine: FakeEngine | None = None, **fields: Any) -> Answer:
    """An answer of one of the endpoints."""
    app = create_app(engine or FakeEngine(), settings())  # type: ignore[arg-type]
    return ask(app, "POST", path, json_body={**BODIES[path], **fields})


def sent(path: str, **fields: Any) -> Request:
    """The engine's request that the body becomes."""
    engine = FakeEngine()
    answer = post(path, engine, **fields)
    assert answer.status == 200, answer.body
    return engine.requests[0]


def drafting(request: Request) -> list[Event]:
    """The script of a request with drafts: five tokens of which two were said."""
    usage = Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=0, accepted_tokens=2, rejected_tokens=3)
    return [Started(2, 0, 7), finished(request, usage=usage)]


@both
def test_a_prediction_is_text_or_parts_of_one(path: str) -> None:
    """Parts are joined without a separator; empty content and null are no prediction."""
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]

    for content in ("a\nb", parts):
        assert tuple(b"a\nb") == sent(path, prediction={"type": "content", "content": content}).prediction
    for empty in (None, {"type": "content", "content": ""}, {"type": "content", "content": []}):
        assert () == sent(path, prediction=empty).prediction


def test_every_prompt_has_the_prediction() -> None:
    """Completions of several prompts are one request each."""
    engine = FakeEngine()

    post(TEXT, engine, prompt=["one", "two"], prediction={"type": "content", "content": "x"})

    assert [(120,), (120,)] == [request.prediction for request in engine.requests]


@both
def test_drafter_and_depth_reach_the_engine(path: str) -> None:
    """Each field alone, both, neither."""
    assert SpeculationParams("auto", None) == sent(path).speculation == sent(path, speculation={}).speculation
    assert SpeculationParams("none", None) == sent(path, speculation={"drafter": "none"}).speculation
    assert SpeculationParams("auto", 0) == sent(path, speculation={"drafter": None, "tokens": 0}).speculation
    assert SpeculationParams("model", 16) == sent(path, speculation={"drafter": "model", "tokens": 16}).speculation


@both
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prediction": "x"}, "prediction", "invalid_value"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "invalid_value"),
        ({"prediction": {"type": "content"}}, "prediction.content", "invalid_value"),
        ({"prediction": {"type": "content", "content": 1}}, "prediction.content", "invalid_value"),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            "prediction.content[0].type",
            "unsupported_value",
        ),
        ({"prediction": {"type": "content", "content": "x", "more": 1}}, "prediction.more", "unknown_parameter"),
        ({"speculation": "none"}, "speculation", "invalid_value"),
        ({"speculation": {"drafter": "eagle"}}, "speculation.drafter", "invalid_value"),
        ({"speculation": {"tokens": 17}}, "speculation.tokens", "invalid_value"),
        ({"speculation": {"tokens": -1}}, "speculation.tokens", "invalid_value"),
        ({"speculation": {"tokens": "4"}}, "speculation.tokens", "invalid_value"),
        ({"speculation": {"tokens": True}}, "speculation.tokens", "invalid_value"),
        ({"speculation": {"depth": 4}}, "speculation.depth", "unknown_parameter"),
    ],
)
def test_what_is_wrong_is_named(path: str, fields: dict[str, Any], param: str, code: str) -> None:
    """A 400 with the path of the field."""
    answer = post(path, **fields)

    error = answer.json["error"]
    assert (400, param, code) == (answer.status, error["param"], error["code"])


@both
def test_engine_errors_name_the_field(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is not there, and a prediction that is too long."""
    absent = FakeEngine(refusal=InvalidRequest("speculation.drafter", "this server has no drafter 'model'"))
    error = post(path, absent, speculation={"drafter": "model"}).json["error"]

    assert ("speculation.drafter", "invalid_value") == (error["param"], error["code"])
    assert "has no drafter 'model'" in error["message"]

    def predict(tokenizer: FakeTokenizer, text: str) -> list[int]:
        raise InvalidRequest("prediction", "it is too long")

    monkeypatch.setattr(FakeTokenizer, "encode_prediction", predict)
    answer = post(path, prediction={"type": "content", "content": "x"})

    assert (400, "prediction") == (answer.status, answer.json["error"]["param"])


@both
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_counts_drafts(path: str, stream: bool) -> None:
    """In the usage under OpenAI's names, in the timings under llama.cpp's, streamed or not."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = post(path, FakeEngine(drafting), **options)
    body = answer.events[-2] if stream else answer.json

    details = body["usage"]["completion_tokens_details"]
    assert (2, 3) == (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"])
    assert (5, 2) == (body["timings"]["draft_n"], body["timings"]["draft_n_accepted"])
