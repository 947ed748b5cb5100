"""POST /v1/responses/compact: the summary of a conversation, and requests that continue from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import CompactedResponse
from pydantic import TypeAdapter

from engine.types.events import Delta, Event, Started
from engine.types.request import Request
from server.app import create_app
from server.responses.messages import SUMMARY_PROMPT
from server.schemas.response_items import Compaction
from tests.server.fakes import HERMES, INFO, Answer, FakeEngine, FakeTokenizer, ask, finished, settings

PATH = "/v1/responses"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The word is slate."},
    {"role": "assistant", "content": "OK."},
    {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "3"},
]


def generating(*texts: str, context: int = 4096) -> FakeEngine:
    """An engine that generates `texts`, one for each request."""
    left = iter(texts)

    def script(request: Request) -> list[Event]:
        return [Started(len(request.prompt), 0, 7), Delta(next(left), (1,)), finished(request)]

    return FakeEngine(script, tokenizer=FakeTokenizer(HERMES), info_value=replace(INFO, context=context))


def post(app: Any, path: str = "", **body: Any) -> Answer:
    """One request."""
    return ask(app, "POST", PATH + path, json_body=body)


def talk(engine: FakeEngine) -> list[tuple[str, str]]:
    """Roles and texts of the last prompt."""
    return [(message["role"], message["content"]) for message in engine.tokenizer.rendered[-1]["messages"]]


def test_the_summary_replaces_the_conversation() -> None:
    """System messages stay; the other items become the request for the summary and its answer."""
    engine = generating("<think>\nhm\n</think>\n\nThe word: slate.", "slate")
    app = create_app(engine, settings())  # type: ignore[arg-type]

    answer = post(app, "/compact", model="fake", input=TALK, prompt_cache_key="x").json
    asked = talk(engine)
    post(app, input=[*answer["output"], {"role": "user", "content": "Which word?"}])

    assert ["message", "compaction"] == [item["type"] for item in answer["output"]]
    # openai's type allows only items of the model here.
    summary = CompactedResponse.model_validate({**answer, "output": answer["output"][1:]})
    assert "response.compaction" == summary.object
    TypeAdapter(Compaction).validate_python(answer, strict=True, extra="forbid")
    assert ("user", SUMMARY_PROMPT) == asked[-1]
    assert ("tool", "3") in asked
    expected = [
        ("system", "Be brief."),
        ("user", SUMMARY_PROMPT),
        ("assistant", "The word: slate."),
        ("user", "Which word?"),
    ]
    assert expected == talk(engine)


def test_the_summary_is_greedy_and_limited() -> None:
    """A quarter of the context at most, at temperature 0."""
    engine = generating("short")
    post(create_app(engine, settings()), "/compact", model="fake", input="hi")  # type: ignore[arg-type]

    [request] = engine.requests
    assert (1024, 0.0) == (request.max_tokens, request.sampling.temperature)


def test_a_stored_conversation_is_compacted_by_its_id() -> None:
    """With its history; nothing of the compaction is stored."""
    engine = generating("four", "two and two are four", "yes")
    app = create_app(engine, settings())  # type: ignore[arg-type]
    kept = post(app, input="2 + 2?").json["id"]

    answer = post(app, "/compact", model="fake", previous_response_id=kept, instructions="Write French.").json

    roles = [role for role, _ in talk(engine)]
    assert ["system", "user", "assistant", "user"] == roles
    assert ["compaction"] == [item["type"] for item in answer["output"]]
    assert 404 == ask(app, "GET", f"{PATH}/{answer['id']}").status
    again = post(app, input=[*answer["output"], {"role": "user", "content": "x"}]).json["id"]
    items = ask(app, "GET", f"{PATH}/{again}/input_items").json["data"]
    assert {"message", "compaction"} == {item["type"] for item in items}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "hi"}, "model"),
        ({"model": "fake"}, "input"),
        ({"model": "other", "input": "hi"}, "model"),
        ({"model": "fake", "input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "input"),
        ({"model": "fake", "input": "hi", "tools": []}, "tools"),
        ({"model": "fake", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"model": "fake", "input": "x" * 5000}, "input"),
    ],
    ids=str,
)
def test_compaction_errors_name_the_field(body: dict[str, Any], param: str) -> None:
    """An error of the usual shape, before anything runs."""
    engine = generating()
    answer = post(create_app(engine, settings()), "/compact", **body)  # type: ignore[arg-type]

    assert (True, param) == (answer.status in (400, 404), answer.json["error"]["param"])
    assert [] == engine.requests


def test_an_empty_summary_is_an_error() -> None:
    """A conversation is never replaced by nothing."""
    answer = post(create_app(generating(" \n"), settings()), "/compact", model="fake", input="hi")  # type: ignore[arg-type]

    assert (500, "generation_failed") == (answer.status, answer.json["error"]["code"])


def test_outputs_answer_calls_of_their_conversation() -> None:
    """As at OpenAI: after an earlier response, an output without its tool call is rejected."""
    app = create_app(generating("a", "b"), settings())  # type: ignore[arg-type]
    kept = post(app, input="hi").json["id"]
    output = {"type": "function_call_output", "call_id": "call_1", "output": "3"}

    refused = post(app, previous_response_id=kept, input=[output])
    taken = post(app, previous_response_id=kept, input=TALK[3:])

    assert (400, "input") == (refused.status, refused.json["error"]["param"])
    assert "call_1" in refused.json["error"]["message"]
    assert 200 == taken.status
