"""Forms of requests that other servers accept: HEAD, a slash at the end, a tag, an empty name, parts of other APIs."""

from __future__ import annotations

from http.client import HTTPConnection
from typing import Any

import pytest

from server.app import create_app
from tests.server.fakes import FakeEngine, ask, serve_in_thread, settings

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(), settings())  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/models", "/models/", "/api/version", "/api/tags", "/health", "/v1/capabilities"])
def test_head_is_get_without_a_body(path: str) -> None:
    with serve_in_thread(FakeEngine()) as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        answers = []
        for method in ("HEAD", "GET"):
            connection.request(method, path)
            response = connection.getresponse()
            answers.append((response.status, response.getheader("content-type"), bool(response.read())))
        connection.close()

    assert [(200, False), (200, True)] == [(status, body) for status, _, body in answers]
    assert answers[0][1] == answers[1][1]


def test_head_of_a_route_without_get_stays_an_error(app: Any) -> None:
    assert ask(app, "HEAD", CHAT).status == 405
    assert ask(app, "HEAD", "/v1/nothing").status == 404


@pytest.mark.parametrize("path", [f"{CHAT}/", "/chat/completions/"])
def test_a_slash_at_the_end_is_left_out(app: Any, path: str) -> None:
    assert ask(app, "POST", path, json_body={"messages": MESSAGES}).status == 200
    assert ask(app, "GET", "/v1/models/").status == 200


@pytest.mark.parametrize(("model", "answered"), [("fake:latest", "fake:latest"), ("", "fake"), (None, "fake")])
def test_a_name_may_have_the_default_tag_or_be_empty(app: Any, model: str | None, answered: str) -> None:
    answer = ask(app, "POST", CHAT, json_body={"model": model, "messages": MESSAGES})

    assert (answer.status, answer.json["model"]) == (200, answered)
    assert ask(app, "POST", CHAT, json_body={"model": "other:latest", "messages": MESSAGES}).status == 404


def test_a_schema_needs_no_name(app: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}

    assert ask(app, "POST", CHAT, json_body={"messages": MESSAGES, "response_format": form}).status == 200


def test_a_schema_may_stand_beside_its_type() -> None:
    """As in llama.cpp; the schema is enforced."""
    engine = FakeEngine()
    app = create_app(engine, settings())  # type: ignore[arg-type]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    forms = [{"type": "json_schema", "json_schema": {"schema": schema}}, {"type": "json_schema", "schema": schema}]
    statuses = [
        ask(app, "POST", CHAT, json_body={"messages": MESSAGES, "response_format": form}).status for form in forms
    ]

    assert [200, 200] == statuses
    assert engine.requests[0].grammar == engine.requests[1].grammar is not None


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}, "response_format.schema"),
    ],
)
def test_a_format_has_one_schema(app: Any, form: dict[str, Any], param: str) -> None:
    answer = ask(app, "POST", CHAT, json_body={"messages": MESSAGES, "response_format": form})

    assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "part",
    [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "a"}],
)
def test_parts_of_other_apis_are_text(part: dict[str, str]) -> None:
    engine = FakeEngine()
    app = create_app(engine, settings())  # type: ignore[arg-type]
    answer = ask(app, "POST", CHAT, json_body={"messages": [{"role": "assistant", "content": [part]}, *MESSAGES]})

    assert answer.status == 200
    assert engine.tokenizer.rendered[-1]["messages"][0]["content"] == "a"


@pytest.mark.parametrize("thinking", ["hm", [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]])
def test_thinking_parts_are_reasoning_of_the_assistant(thinking: object) -> None:
    """In the forms of Anthropic and Mistral."""
    part = {"type": "thinking", "thinking": thinking, "signature": "s"}
    engine = FakeEngine()
    app = create_app(engine, settings())  # type: ignore[arg-type]
    history = {"role": "assistant", "content": [part, {"type": "text", "text": "a"}]}
    answer = ask(app, "POST", CHAT, json_body={"messages": [history, *MESSAGES]})

    assert (answer.status, answer.json.get("warnings")) == (200, None)
    rendered = engine.tokenizer.rendered[-1]["messages"][0]
    assert rendered == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_thinking_without_text_is_refused(app: Any) -> None:
    history = {"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "image"}]}]}
    answer = ask(app, "POST", CHAT, json_body={"messages": [history, *MESSAGES]})

    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_value")


def test_a_refusal_is_the_text_of_the_assistant() -> None:
    engine = FakeEngine()
    app = create_app(engine, settings())  # type: ignore[arg-type]
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    answer = ask(app, "POST", CHAT, json_body={"messages": [*MESSAGES, refused, *MESSAGES]})

    assert (answer.status, engine.tokenizer.rendered[-1]["messages"][1]["content"]) == (200, "no")


LONG = "x" * 100


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 1, "max_tokens": 2}, "max_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    ],
    ids=str,
)
def test_an_error_names_the_parameter_that_was_sent(app: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = ask(app, "POST", path, json_body=body)

    assert (answer.status, answer.json["error"]["param"]) == (400, param)
