"""Tools on the wire: definitions, choice, calls and errors."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from engine.types.events import Delta, Event
from engine.types.request import Request
from server.app import create_app
from tests.server.fakes import HERMES, Answer, FakeEngine, FakeTokenizer, ask, finished, settings

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK = {"name": "look", "description": "sees", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": LOOK}, {"type": "function", "function": {"name": "listen"}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


def script_emitting(text: str, reason: str = "stop") -> Any:
    def script(request: Request) -> list[Event]:
        return [*(Delta(letter, (at,)) for at, letter in enumerate(text)), finished(request, reason=reason)]

    return script


def chat(engine: FakeEngine | None = None, **fields: Any) -> Answer:
    app = caller() if engine is None else create_app(engine, settings())  # type: ignore[arg-type]
    return ask(app, "POST", CHAT, json_body={"messages": MESSAGES, **fields})


@functools.cache
def caller() -> Any:
    """A server with a model that always calls a tool."""
    return create_app(FakeEngine(script_emitting(CALL), tokenizer=FakeTokenizer(HERMES)), settings())  # type: ignore[arg-type]


def sent(**fields: Any) -> tuple[Request, dict[str, Any]]:
    """The engine's request and the arguments of the template."""
    engine = FakeEngine(tokenizer=FakeTokenizer(HERMES))
    answer = chat(engine, **fields)
    assert answer.status == 200, answer.body
    return engine.requests[0], engine.tokenizer.rendered[0]


def test_call_has_openais_format() -> None:
    """Content is null, arguments are JSON text, finish reason "tool_calls"."""
    choice = chat(tools=TOOLS).json["choices"][0]

    (call,) = choice["message"].pop("tool_calls")
    assert {"role": "assistant", "content": None, "refusal": None} == choice["message"]
    assert ("function", {"name": "look", "arguments": '{"at": "x"}'}) == (call["type"], call["function"])
    assert call["id"].startswith("call_")
    assert "tool_calls" == choice["finish_reason"]


def test_streamed_call_has_id_and_name_once() -> None:
    """Later chunks have only index and arguments."""
    events = chat(tools=TOOLS, stream=True).events[:-1]

    deltas = [call for event in events for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert {"index", "id", "type", "function"} == deltas[0].keys()
    assert (0, "function", {"name": "look", "arguments": ""}) == (
        deltas[0]["index"],
        deltas[0]["type"],
        deltas[0]["function"],
    )
    assert all(
        {"index", "function"} == delta.keys() and {"arguments"} == delta["function"].keys() for delta in deltas[1:]
    )
    assert len(deltas) > 3
    assert "tool_calls" == events[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("cut", [len("<tool_call>"), CALL.index("look") + 2, CALL.index('"at"')])
def test_truncated_call_leaves_no_markers(cut: int) -> None:
    """Streamed or not: the text before it, the call if its name is complete, finish reason "length"."""
    engine = FakeEngine(script_emitting("I see.\n" + CALL[:cut], "length"), tokenizer=FakeTokenizer(HERMES))
    (choice,) = chat(engine, tools=TOOLS).json["choices"]
    deltas = [event["choices"][0] for event in chat(engine, tools=TOOLS, stream=True).events[:-1]]
    called = [{"name": "look", "arguments": "{"}] if '"arguments": {' in CALL[:cut] else []

    assert ("I see.", "length") == (choice["message"]["content"], choice["finish_reason"])
    assert called == [call["function"] for call in choice["message"].get("tool_calls") or ()]
    assert "I see." == "".join(delta["delta"].get("content") or "" for delta in deltas)
    assert "length" == deltas[-1]["finish_reason"]


def test_functions_are_answered_by_function_call() -> None:
    """With a finish reason of that name, streamed or not."""
    whole = chat(functions=[LOOK]).json["choices"][0]
    events = chat(functions=[LOOK], stream=True).events[:-1]

    parts = [part for event in events for choice in event["choices"] if (part := choice["delta"].get("function_call"))]
    assert {"name": "look", "arguments": '{"at": "x"}'} == whole["message"]["function_call"]
    assert ("function_call", "tool_calls") == (
        whole["finish_reason"],
        "function_call" if "tool_calls" in whole["message"] else "tool_calls",
    )
    assert {"name": "look", "arguments": ""} == parts[0]
    assert '{"at": "x"}' == "".join(part["arguments"] for part in parts)
    assert "function_call" == events[-1]["choices"][0]["finish_reason"]


def test_without_tools_calls_are_text() -> None:
    """Also with tool_choice "none"; then the tools are not rendered."""
    assert CALL == chat().json["choices"][0]["message"]["content"]
    assert CALL == chat(tools=TOOLS, tool_choice="none").json["choices"][0]["message"]["content"]
    assert () == sent(tools=TOOLS, tool_choice="none")[1]["tools"]


def test_tools_reach_the_template_and_the_grammar() -> None:
    """All tools are rendered; tool choice, parallel_tool_calls and strict constrain the answer."""
    free, rendered = sent(tools=TOOLS)

    assert free.grammar is None
    assert ["look", "listen"] == [tool.name for tool in rendered["tools"]]
    assert (SCHEMA, "sees") == (json.loads(rendered["tools"][0].parameters), rendered["tools"][0].description)
    strict = {"type": "function", "function": {**LOOK, "strict": True}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
    for bound in (
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": [strict]},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}},
    ):
        assert sent(**bound)[0].grammar is not None


def test_function_without_parameters_takes_none() -> None:
    """As in OpenAI's API; an empty schema allows any."""
    empty = {"type": "function", "function": {"name": "ask", "parameters": {}}}
    listen, ask_ = sent(tools=[TOOLS[1], empty])[1]["tools"]

    assert {"type": "object", "properties": {}, "additionalProperties": False} == json.loads(listen.parameters)
    assert {"type": "object", "properties": {}} == json.loads(ask_.parameters)


def test_named_tool_is_the_only_one_in_the_grammar() -> None:
    """In both APIs."""
    named, rendered = sent(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "listen"}})
    older, _ = sent(functions=[LOOK, {"name": "listen"}], function_call={"name": "listen"})

    for request in (named, older):
        assert request.grammar is not None
        assert "listen" in request.grammar.source
        assert "look" not in request.grammar.source
    assert 2 == len(rendered["tools"])


def test_calls_of_the_history_are_rendered() -> None:
    """With parsed arguments; functions become tools, and their results get the id of the call."""
    _, rendered = sent(
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"at": "x"}'}},
            {"role": "function", "name": "look", "content": "seen"},
            {"role": "assistant", "content": "ok", "reasoning": "hm"},
        ]
    )

    assert [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
            ],
        },
        {"role": "tool", "content": "seen", "name": "look", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm"},
    ] == rendered["messages"][1:]


FAULTS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name", "invalid_value", "another tool has this name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "invalid_value",
        "match",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value", "'function' or 'custom'"),
    ({"tools": [{"type": 5}]}, "tools[0].type", "invalid_value", "'function' or 'custom'"),
    ({"tools": [{"function": LOOK}]}, "tools[0].type", "invalid_value", "Missing required"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name", "invalid_value", "Missing required"),
    (
        {"tools": [{"type": "function", "function": {**LOOK, "more": 1}}]},
        "tools[0].function.more",
        "unknown_parameter",
        "",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters.type",
        "invalid_value",
        "must be 'object'",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value", "no 'tools'"),
    ({"tools": TOOLS, "tool_choice": "never"}, "tool_choice", "invalid_value", "'none', 'auto' or 'required'"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "smell"}}},
        "tool_choice.function.name",
        "invalid_value",
        "no tool of this name",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "smell"}}]},
            },
        },
        "tool_choice.allowed_tools.tools[0].function.name",
        "invalid_value",
        "no tool of this name",
    ),
    ({"tools": TOOLS, "functions": [LOOK]}, "functions", "invalid_value", "older name"),
    ({"function_call": {"name": "look"}}, "function_call", "invalid_value", "no 'functions'"),
    ({"functions": [LOOK], "function_call": {"name": "smell"}}, "function_call.name", "invalid_value", "no function"),
    ({"functions": [LOOK], "tool_choice": "auto"}, "tool_choice", "invalid_value", "'function_call'"),
    (
        {"messages": [*MESSAGES, {"role": "tool", "content": "x"}]},
        "messages[1].tool_call_id",
        "invalid_value",
        "Missing required",
    ),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name", "invalid_value", "Missing required"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": "x",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}],
                }
            ]
        },
        "messages[0].tool_calls",
        "invalid_value",
        "only the assistant",
    ),
    (
        {
            "tools": [
                TOOLS[0],
                {
                    "type": "function",
                    "function": {"name": "f", "strict": True, "parameters": {"type": "object", "unreadable": 1}},
                },
            ]
        },
        "tools[1].function.parameters",
        "invalid_value",
        "unimplemented keyword 'unreadable'",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code", "words"), FAULTS, ids=lambda value: str(value)[:40])
def test_tool_errors_name_the_field(fields: dict[str, Any], param: str, code: str, words: str) -> None:
    answer = chat(**fields)

    error = answer.json["error"]
    assert (400, param, code) == (answer.status, error["param"], error["code"])
    assert words in error["message"]


def test_model_without_tool_calls_refuses_tools() -> None:
    """Without tool calls in the template, tools would be ignored silently."""
    answer = chat(FakeEngine(), tools=TOOLS)

    assert (400, "tools", "unsupported_parameter") == (
        answer.status,
        answer.json["error"]["param"],
        answer.json["error"]["code"],
    )
    assert 200 == chat(FakeEngine(), tools=[], tool_choice="auto").status
    assert 200 == chat(FakeEngine(), tools=TOOLS, tool_choice="none").status


def test_tool_without_strict_is_enforced_in_part() -> None:
    """With a warning; other tools are enforced completely."""
    weird = {"type": "function", "function": {"name": "weird", "parameters": {"type": "object", "unkeepable": 1}}}

    engine = FakeEngine(tokenizer=FakeTokenizer(HERMES))
    answer = chat(engine, tools=[TOOLS[0], weird], tool_choice="required")

    (warning,) = answer.json["warnings"]
    assert "'tools[1].function.parameters' is enforced only in part" in warning
    assert engine.requests[0].grammar is not None
    assert "weird" in engine.requests[0].grammar.source
    assert "unkeepable" not in engine.requests[0].grammar.source
    assert "unkeepable" in engine.tokenizer.rendered[0]["tools"][1].parameters


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {**LOOK, "strict": True}}}),
        (CHAT, {"functions": [LOOK], "function_call": LOOK}),
        (
            CHAT,
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS[:1]}},
            },
        ),
        ("/v1/responses", {"tools": [{"type": "function", **LOOK}], "tool_choice": {"type": "function", **LOOK}}),
        (
            "/v1/messages",
            {
                "tools": [{"name": "look", "input_schema": SCHEMA}],
                "tool_choice": {"type": "tool", "name": "look", "input_schema": SCHEMA},
                "max_tokens": 60,
                "model": "fake",
            },
        ),
    ],
)
def test_tool_choice_may_be_a_complete_definition(path: str, fields: dict[str, Any]) -> None:
    """Only its name is used."""
    engine = FakeEngine(script_emitting(CALL), tokenizer=FakeTokenizer(HERMES))
    prompt = {"input": "hi"} if path == "/v1/responses" else {"messages": MESSAGES}
    app = create_app(engine, settings())  # type: ignore[arg-type]
    answer = ask(app, "POST", path, json_body={**prompt, **fields})

    assert 200 == answer.status, answer.body
    assert engine.requests[0].grammar is not None
    if path == "/v1/responses":
        assert {"type": "function", "name": "look"} == answer.json["tool_choice"]
