"""Structured output: all parameters for a constraint, the grammar, and errors."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from server.app import create_app
from server.generation.structure import structure
from server.schemas.chat import ChatRequest
from tests.server.fakes import Answer, FakeEngine, FakeTokenizer, ask, settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
UNREADABLE = {"type": "object", "unreadable": 1}
both = pytest.mark.parametrize("path", [CHAT, TEXT])


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(tokenizer=FakeTokenizer("<think></think>"))


@pytest.fixture(scope="module")
def app(engine: FakeEngine) -> Any:
    return create_app(engine, settings())  # type: ignore[arg-type]


def post(app: Any, path: str, fields: dict[str, Any]) -> Answer:
    return ask(app, "POST", path, json_body={**BODIES[path], **fields})


def named(schema: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    inner = {"name": "answer", **({} if schema is None else {"schema": schema}), **more}
    return {"type": "json_schema", "json_schema": inner}


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"response_format": named(SCHEMA, strict=True)}, "json_schema", json.dumps(SCHEMA)),
        ({"response_format": named(None)}, "json_object", ""),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": "x"}}, "grammar", "x"),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": "x"}, "grammar", "x"),
        ({"json_schema": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "x"}, "grammar", "x"),
        ({"ebnf": "x"}, "grammar", "x"),
    ],
)
def test_all_parameters_yield_the_same_constraint(fields: dict[str, Any], kind: str, source: str) -> None:
    """Parameters of OpenAI, vLLM, SGLang and llama.cpp."""
    found = structure(ChatRequest.model_validate({**BODIES[CHAT], **fields}))

    assert found is not None
    assert (kind, source) == (found[1].kind, found[1].source)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_text_format_is_no_constraint(fields: dict[str, Any]) -> None:
    assert structure(ChatRequest.model_validate({**BODIES[CHAT], **fields})) is None


def test_choices_are_kept_in_order() -> None:
    for fields in ({"guided_choice": ["b", "a"]}, {"structured_outputs": {"choice": ["b", "a"]}}):
        found = structure(ChatRequest.model_validate({**BODIES[CHAT], **fields}))

        assert found is not None
        assert ("choices", ("b", "a")) == (found[1].kind, found[1].choices)


def test_grammar_of_a_chat_allows_reasoning(app: Any, engine: FakeEngine) -> None:
    """A completion has no reasoning."""
    for path in (CHAT, TEXT):
        assert 200 == post(app, path, {"guided_regex": "a+"}).status

    chat, text = engine.requests[-2:]
    assert chat.grammar is not None
    assert text.grammar is not None
    assert ("think" in chat.grammar.source, "think" in text.grammar.source) == (True, False)


@both
def test_schema_without_strict_is_enforced_in_part(app: Any, engine: FakeEngine, path: str) -> None:
    """With a warning for the rest; without a warning if all of it is enforced."""
    partly = post(app, path, {"response_format": named({"type": "object", "xunreadable": 1}, strict=False)})
    whole = post(app, path, {"response_format": named(SCHEMA, strict=False)})

    assert (200, 200) == (partly.status, whole.status)
    assert "'response_format.json_schema.schema' is enforced only in part" in partly.json["warnings"][0]
    assert "warnings" not in whole.json
    assert all(request.grammar is not None for request in engine.requests[-2:])
    assert ["lenient" in str(request.grammar) for request in engine.requests[-2:]] == [True, False]


@both
@pytest.mark.parametrize(
    ("fields", "param", "code", "words"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "invalid_value",
            "'text', 'json_object' or 'json_schema'",
        ),
        ({"response_format": {"type": 1}}, "response_format.type", "invalid_value", "'json_object' or 'json_schema'"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "unsupported_value", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value", "Missing"),
        ({"response_format": "json"}, "response_format", "invalid_value", ""),
        (
            {"response_format": named(UNREADABLE)},
            "response_format.json_schema.schema",
            "invalid_value",
            "unimplemented keyword 'unreadable'",
        ),
        ({"guided_json": UNREADABLE}, "guided_json", "invalid_value", "unimplemented keyword 'unreadable'"),
        ({"guided_json": "{"}, "guided_json", "invalid_value", "not strict JSON: Expecting property name"),
        ({"guided_json": '{"type": "a", "type": "b"}'}, "guided_json", "invalid_value", "'type' is duplicate"),
        ({"guided_json": "[]"}, "guided_json", "invalid_value", "not a JSON object"),
        ({"guided_choice": []}, "guided_choice", "invalid_value", "at least 1"),
        ({"regex": ""}, "regex", "invalid_value", "at least 1"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "unknown_parameter", ""),
        ({"regex": "a", "grammar": "b"}, "grammar", "invalid_value", "'regex' is set"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "invalid_value",
            "'response_format' is set",
        ),
        ({"structural_tag": "x"}, "structural_tag", "unsupported_parameter", ""),
    ],
    ids=lambda value: str(value)[:50],
)
def test_invalid_constraint_is_named(
    app: Any, path: str, fields: dict[str, Any], param: str, code: str, words: str
) -> None:
    """400 with the field and the unsupported keyword or syntax error."""
    answer = post(app, path, fields)

    error = answer.json["error"]
    assert (400, param, code) == (answer.status, error["param"], error["code"])
    assert words in error["message"]


def test_costly_grammar_is_compiled_once(app: Any, engine: FakeEngine) -> None:
    """It is refused, strict or not: a reduced schema would take as long."""
    tried = len(engine.grammars.compiled)
    answer = post(app, CHAT, {"response_format": named({"type": "object", "endless": 1}, strict=False)})

    assert (400, "response_format.json_schema.schema") == (answer.status, answer.json["error"]["param"])
    assert "it takes too long" in answer.json["error"]["message"]
    assert 1 == len(engine.grammars.compiled) - tried


def test_compilation_leaves_worker_threads_free(app: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests find a worker thread while many grammars are compiled."""
    released = threading.Event()
    monkeypatch.setattr(engine.grammars, "compile", lambda grammar: released.wait(60) and None)

    async def crowded() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            body = {"model": settings().model_names[0], **BODIES[CHAT], "response_format": named(SCHEMA)}
            waiting = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(60)]
            await asyncio.sleep(0.2)
            try:
                plain = await asyncio.wait_for(client.post("/tokenize", json={"prompt": "hi"}), 20)
            finally:
                released.set()
            return max(plain.status_code, *[answer.status_code for answer in await asyncio.gather(*waiting)])

    assert 200 == asyncio.run(crowded())
