"""Custom tools on the wire: definitions, choice, calls and history."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseCustomToolCall

from engine.types.events import Delta, Event
from engine.types.request import Request
from server.app import create_app
from tests.server.fakes import HERMES, Answer, FakeEngine, FakeTokenizer, ask, finished, settings

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
INPUT = 'print("a")\nb'
CALL = f'<tool_call>\n{{"name": "run", "arguments": {json.dumps({"input": INPUT})}}}\n</tool_call>'
RUN = {"type": "custom", "custom": {"name": "run", "description": "runs"}}
LOOK = {"type": "function", "function": {"name": "look"}}
GRAMMAR = {"syntax": "lark", "definition": 'start: "a" LF\n%import common.LF'}


def engine() -> FakeEngine:
    """The model calls the tool `run`, one character per delta."""

    def script(request: Request) -> list[Event]:
        return [*(Delta(letter, (at,)) for at, letter in enumerate(CALL)), finished(request)]

    return FakeEngine(script, tokenizer=FakeTokenizer(HERMES))


def post(path: str, made: FakeEngine | None = None, **fields: Any) -> Answer:
    answer = ask(create_app(made or engine(), settings()), "POST", path, json_body=fields)  # type: ignore[arg-type]
    assert 200 == answer.status, answer.body
    return answer


def test_custom_call_has_its_input_as_text() -> None:
    """Streamed or not, valid for the types of the openai package."""
    whole = ChatCompletion.model_validate(post(CHAT, messages=MESSAGES, tools=[RUN, LOOK]).json).choices[0]
    events = post(CHAT, messages=MESSAGES, tools=[RUN], stream=True).events[:-1]

    (call,) = whole.message.tool_calls or ()
    assert ("custom", "run", INPUT) == (call.type, call.custom.name, call.custom.input)
    assert ("tool_calls", None) == (whole.finish_reason, whole.message.content)
    deltas = [call for event in events for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert ("custom", {"name": "run", "input": ""}) == (deltas[0]["type"], deltas[0]["custom"])
    assert INPUT == "".join(delta["custom"]["input"] for delta in deltas)
    assert all({"index", "custom"} == delta.keys() for delta in deltas[1:])


def test_response_has_a_custom_tool_call_item() -> None:
    """Streamed deltas add up to the item."""
    tool = {"type": "custom", "name": "run", "format": {"type": "grammar", **GRAMMAR}}
    whole = Response.model_validate(post(RESPONSES, input="hi", tools=[tool]).json)
    events = post(RESPONSES, input="hi", tools=[tool], stream=True).body.decode().split("\n\n")

    (item,) = whole.output
    assert isinstance(item, ResponseCustomToolCall)
    assert ("run", INPUT) == (item.name, item.input)
    input_events = [json.loads(event.partition("data: ")[2]) for event in events if "custom_tool_call_input" in event]
    assert INPUT == "".join(event["delta"] for event in input_events[:-1])
    assert ("response.custom_tool_call_input.done", INPUT) == (input_events[-1]["type"], input_events[-1]["input"])
    assert tool["format"] == whole.tools[0].to_dict()["format"]


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_input_format_is_part_of_the_grammar(syntax: str) -> None:
    """It is also rendered for the model."""
    made = engine()
    input_format = {"type": "grammar", "grammar": {"syntax": syntax, "definition": GRAMMAR["definition"]}}
    post(CHAT, made, messages=MESSAGES, tools=[{"type": "custom", "custom": {"name": "run", "format": input_format}}])

    assert made.requests[0].grammar is not None
    (tool,) = made.tokenizer.rendered[0]["tools"]
    input_schema = json.loads(tool.parameters)["properties"]["input"]
    assert GRAMMAR["definition"] in (input_schema["description"] if syntax == "lark" else input_schema["pattern"])


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "run"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "run"}}]},
        },
    ],
)
def test_a_custom_tool_can_be_chosen(choice: dict[str, Any]) -> None:
    """Alone or among the allowed tools."""
    made = engine()
    post(CHAT, made, messages=MESSAGES, tools=[RUN, LOOK], tool_choice=choice)

    grammar = made.requests[0].grammar
    assert grammar is not None
    assert "run" in grammar.source
    assert "look" not in grammar.source


def test_tool_choice_distinguishes_functions_and_custom_tools() -> None:
    app = create_app(engine(), settings())  # type: ignore[arg-type]
    choice = {"type": "custom", "custom": {"name": "look"}}
    answer = ask(app, "POST", CHAT, json_body={"messages": MESSAGES, "tools": [RUN, LOOK], "tool_choice": choice})
    other = {"type": "custom", "name": "look"}
    tools = [{"type": "custom", "name": "run"}]
    response = ask(app, "POST", RESPONSES, json_body={"input": "hi", "tools": tools, "tool_choice": other})

    assert (400, "tool_choice.custom.name") == (answer.status, answer.json["error"]["param"])
    assert (400, "tool_choice.name") == (response.status, response.json["error"]["param"])


def test_custom_calls_of_the_history_are_rendered() -> None:
    """As calls of a function with one argument, in both APIs; the result is a tool message."""
    chat, response = engine(), engine()
    call = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": INPUT}}
    post(
        CHAT,
        chat,
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "out"},
        ],
    )
    post(
        RESPONSES,
        response,
        input=[
            {"role": "user", "content": "hi"},
            {"type": "custom_tool_call", "call_id": "c1", "name": "run", "input": INPUT},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "out"},
        ],
    )

    _, called, answered = chat.tokenizer.rendered[0]["messages"]
    assert {"name": "run", "arguments": {"input": INPUT}} == called["tool_calls"][0]["function"]
    assert {"role": "tool", "content": "out", "tool_call_id": "c1"} == answered
    assert chat.tokenizer.rendered[0]["messages"] == response.tokenizer.rendered[0]["messages"]


def test_unsupported_input_grammar_is_named() -> None:
    """By its path in the API of the request."""
    app = create_app(engine(), settings())  # type: ignore[arg-type]
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: %json {"type": "object"}'}
    tools = [{"type": "custom", "name": "other"}, {"type": "custom", "name": "run", "format": grammar}]
    answer = ask(app, "POST", RESPONSES, json_body={"input": "hi", "tools": tools})

    assert (400, "tools[1].format") == (answer.status, answer.json["error"]["param"])
    assert "'%json'" in answer.json["error"]["message"]
