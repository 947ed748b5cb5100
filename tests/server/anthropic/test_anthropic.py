"""/v1/messages: translation of requests, content blocks and events, and Anthropic's error format."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from engine.types.events import Delta, Event, Failed, Started, Usage
from engine.types.request import Request
from server.anthropic.blocks import ContentBlocks
from server.app import create_app
from server.schemas.anthropic_answer import AnsweredMessage, AnthropicErrorBody, AnthropicEvent, TokenCount
from tests.server.fakes import HERMES, Answer, FakeEngine, FakeTokenizer, ask, finished, settings

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}


def engine_emitting(text: str, **changes: Any) -> FakeEngine:
    """An engine that emits this text, one character per delta."""

    def script(request: Request) -> Iterator[Event]:
        yield Started(len(request.prompt), 1, 7)
        for letter in text:
            yield Delta(letter, (1,))
        yield finished(request, **changes)

    return FakeEngine(script, tokenizer=FakeTokenizer(HERMES))


def post(engine: FakeEngine, path: str = "", **body: Any) -> Answer:
    app = create_app(engine, settings())  # type: ignore[arg-type]
    return ask(app, "POST", PATH + path, json_body={"model": "fake", "messages": HELLO, **body})


def accumulated(events: list[Any]) -> list[Any]:
    """The content blocks of a stream, as Anthropic's client accumulates them."""
    blocks: list[Any] = []
    partial: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert len(blocks) == event["index"]
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert len(blocks) - 1 == event["index"]
            block, delta = blocks[event["index"]], event["delta"]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] = delta["signature"]
                case "input_json_delta":
                    partial[event["index"]] = partial.get(event["index"], "") + delta["partial_json"]
    for index, text in partial.items():
        blocks[index]["input"] = json.loads(text)
    return blocks


def conversation(engine: FakeEngine) -> list[Any]:
    """The rendered messages of the last request."""
    return list(engine.tokenizer.rendered[-1]["messages"])


def test_response_has_every_field() -> None:
    """Cached tokens are not part of the input tokens."""
    cost = Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=1)
    body = post(engine_emitting("Hello", usage=cost), max_tokens=9).json

    assert [{"type": "text", "text": "Hello", "citations": None}] == body["content"]
    assert ("message", "assistant", "fake", "end_turn", None) == (
        body["type"],
        body["role"],
        body["model"],
        body["stop_reason"],
        body["stop_sequence"],
    )
    usage = {"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1, "output_tokens": 5}
    assert usage == body["usage"]
    assert body["id"].startswith("msg_")


def test_stream_has_anthropics_event_order() -> None:
    """From message_start to message_stop; thinking, text and a call, each with its end."""
    text = f"<think>\nhm\n</think>\n\nyes{CALL}"
    events = post(engine_emitting(text), max_tokens=9, tools=[TOOL], stream=True).named_events

    kinds = [event["type"] for event in events]
    assert ["message_start", "ping", "content_block_start"] == kinds[:3]
    assert ["content_block_stop", "message_delta", "message_stop"] == kinds[-3:]
    assert 3 == kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert ["thinking", "text", "tool_use"] == [block["type"] for block in accumulated(events)]
    assert {"stop_reason": "tool_use", "stop_sequence": None} == events[-2]["delta"]
    assert (2, 1) == (
        events[0]["message"]["usage"]["input_tokens"],
        events[0]["message"]["usage"]["cache_read_input_tokens"],
    )


def test_stream_adds_up_to_the_response() -> None:
    text = f"<think>\nhm\n</think>\n\nyes{CALL}"
    fields = {"max_tokens": 9, "tools": [TOOL]}
    whole, events = (
        post(engine_emitting(text), **fields).json,
        post(engine_emitting(text), **fields, stream=True).named_events,
    )

    streamed = accumulated(events)
    for block in (*streamed, *whole["content"]):
        block.pop("id", None)
    assert whole["content"] == streamed
    assert {"a": 1} == streamed[2]["input"]
    assert whole["usage"] == events[-2]["usage"]
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"]


def test_responses_match_openapi() -> None:
    """Messages, events and errors validate against /openapi.json, without extra fields."""
    text = f"<think>\nhm\n</think>\n\nyes{CALL}"
    fields = {"max_tokens": 9, "tools": [TOOL]}

    def check(shape: Any, value: Any) -> None:
        TypeAdapter(shape).validate_python(value, strict=True, extra="forbid")

    check(AnsweredMessage, post(engine_emitting(text), **fields).json)
    for event in post(engine_emitting(text), **fields, stream=True).named_events:
        check(AnthropicEvent, event)
    check(AnthropicErrorBody, post(engine_emitting(text)).json)
    check(TokenCount, post(engine_emitting(text), "/count_tokens").json)


answers = st.lists(
    st.one_of(
        st.builds(TextDelta, st.text(min_size=1, max_size=3)),
        st.builds(ReasoningDelta, st.text(min_size=1, max_size=3)),
        st.just((ToolCallStart(0, "f"), ToolCallDelta(0, '{"a":'), ToolCallDelta(0, "1}"))),
    ),
    max_size=9,
)


@given(answers)
def test_blocks_and_events_agree_for_any_answer(parts: list[Any]) -> None:
    """All deltas are inside of a block, in any order of kinds."""
    flat: list[AnswerDelta] = [delta for each in parts for delta in (each if isinstance(each, tuple) else (each,))]
    blocks = ContentBlocks(lambda index: f"call_{index}")

    events: list[Any] = [*blocks.push(flat), *blocks.stop()]

    assert blocks.content == accumulated(events)
    spoken = "".join(block["text"] for block in blocks.content if block["type"] == "text")
    assert "".join(delta.text for delta in flat if isinstance(delta, TextDelta)) == spoken


def test_messages_are_translated_to_chat_messages() -> None:
    """System first, tool results as separate messages, thinking and calls with their message."""
    engine = engine_emitting("ok")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+1"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                {"type": "text", "text": "go"},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "x", "is_error": True}]},
    ]
    assert 200 == post(engine, max_tokens=9, system="be", messages=messages, tools=[TOOL]).status

    stream_events = conversation(engine)
    assert [("system", "be"), ("user", "1+1"), ("assistant", "so"), ("tool", "2"), ("user", "go")] == [
        (each["role"], each["content"]) for each in stream_events[:5]
    ]
    assert ("tool", "Error:\nx", "t2") == (
        stream_events[5]["role"],
        stream_events[5]["content"],
        stream_events[5]["tool_call_id"],
    )
    assert 6 == len(stream_events)
    assert "hm" == stream_events[2]["reasoning_content"]
    assert {"name": "add", "arguments": {"a": 1}} == stream_events[2]["tool_calls"][0]["function"]
    assert "t1" == stream_events[3]["tool_call_id"]


def test_billing_header_is_removed_from_the_prompt() -> None:
    """It differs in every request."""
    engine = engine_emitting("ok")
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc"},
        {"type": "text", "text": "be"},
    ]
    assert 200 == post(engine, max_tokens=9, system=system).status

    assert [("system", "be"), ("user", "hi")] == [(each["role"], each["content"]) for each in conversation(engine)]


def test_cache_control_sets_breakpoints() -> None:
    """Anywhere in the messages; usage then includes cache writes."""
    engine = engine_emitting("ok", usage=Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=1))
    kept = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    usage = post(
        engine,
        max_tokens=9,
        system=[{"type": "text", "text": "be", **kept}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **kept}]}],
    ).json["usage"]

    assert ((0, 2), (1, 3)) == tuple(engine.tokenizer.rendered[-1]["breakpoints"])
    assert (0, 2, 1) == (
        usage["input_tokens"],
        usage["cache_creation_input_tokens"],
        usage["cache_read_input_tokens"],
    )


def test_parameters_reach_the_engine() -> None:
    engine = engine_emitting("ok")
    answer = post(
        engine,
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 7},
        output_config={"effort": "high"},
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        metadata={"user_id": "u"},
        service_tier="standard_only",
    )

    assert 200 == answer.status
    (request,) = engine.requests
    assert (9, 0.5, 0.9, 3, ("END",)) == (
        request.max_tokens,
        request.sampling.temperature,
        request.sampling.top_p,
        request.sampling.top_k,
        request.stop,
    )
    assert request.grammar is not None
    assert request.reasoning_limit is not None
    assert 7 == request.reasoning_limit.budget
    arguments = engine.tokenizer.rendered[-1]["arguments"]
    assert (True, "high") == (arguments["enable_thinking"], arguments["reasoning_effort"])


def test_thinking_can_be_disabled_or_omitted() -> None:
    """Disabled in the template; with display "omitted" it is generated and not returned."""
    engine = engine_emitting("<think>\nhm\n</think>\n\nyes")
    assert 200 == post(engine, max_tokens=9, thinking={"type": "disabled"}).status
    assert engine.tokenizer.rendered[-1]["arguments"]["enable_thinking"] is False

    content = post(engine, max_tokens=9, thinking={"type": "adaptive", "display": "omitted"}).json["content"]
    assert engine.tokenizer.rendered[-1]["arguments"]["enable_thinking"] is True
    assert ["text"] == [block["type"] for block in content]


def test_assistant_prefill_is_continued() -> None:
    engine = engine_emitting("ok")
    messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
    assert 200 == post(engine, max_tokens=9, messages=messages).status

    assert engine.tokenizer.rendered[-1]["continue_final_message"] is True


@pytest.mark.parametrize(
    ("changes", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"reason": "length"}, "max_tokens", None),
        ({"stop": "END"}, "stop_sequence", "END"),
        ({"stop": 7}, "end_turn", None),
    ],
    ids=str,
)
def test_stop_reasons(changes: dict[str, Any], reason: str, sequence: str | None) -> None:
    """Streamed or not."""
    body = post(engine_emitting("a", **changes), max_tokens=9).json
    delta = post(engine_emitting("a", **changes), max_tokens=9, stream=True).named_events[-2]["delta"]

    assert (reason, sequence) == (body["stop_reason"], body["stop_sequence"])
    assert {"stop_reason": reason, "stop_sequence": sequence} == delta


def test_max_tokens_is_limited_to_the_context() -> None:
    """The field is required, and clients request far more than small models support."""
    engine = engine_emitting("a")
    assert 200 == post(engine, max_tokens=32000).status

    assert 64 == engine.requests[0].max_tokens


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("{", {}),
        ('{"a', {}),
        ('{"a": "Par', {}),
        ('{"a": "Paris", "b": [1, "x', {"a": "Paris", "b": [1]}),
        ('{"a": {"b": 1}', {"a": {"b": 1}}),
    ],
)
def test_truncated_call_keeps_complete_members(arguments: str, read: Any) -> None:
    """As Anthropic's client parses a truncated stream."""
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}'
    body = post(engine_emitting(text, reason="length"), max_tokens=9, tools=[TOOL]).json

    assert ("max_tokens", read) == (body["stop_reason"], body["content"][0]["input"])


def test_number_overflow_is_the_largest_float() -> None:
    text = CALL.replace('{"a": 1}', '{"a": [1e999, -1e999]}')

    (block,) = post(engine_emitting(text), max_tokens=9, tools=[TOOL]).json["content"]

    assert [sys.float_info.max, -sys.float_info.max] == block["input"]["a"]


def test_tokens_are_counted() -> None:
    """The prompt of the same messages. Clients may send a whole message request, with fields of the generation."""
    expected = {"input_tokens": len("be\nhi\n")}

    assert expected == post(engine_emitting(""), "/count_tokens", system="be").json
    whole = {"max_tokens": 9, "temperature": 1, "stream": True, "stop_sequences": ["x"]}
    assert expected == post(engine_emitting(""), "/count_tokens", system="be", **whole).json


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 9, "messages": []}, "messages"),
        ({}, "max_tokens"),
        ({"max_tokens": 9, "model": "none"}, "none"),
        ({"max_tokens": 9, "tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"max_tokens": 9, "tools": [{**TOOL, "input_schema": {"type": 3}}]}, "tools[0].input_schema"),
        ({"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"max_tokens": 9, "container": "c"}, "container"),
        ({"max_tokens": 9, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"max_tokens": 9, "messages": [{"role": "user", "content": "x" * 99}]}, "exceeds the available context size"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_format(body: dict[str, Any], words: str, stream: bool) -> None:
    """With Anthropic's field names, before a stream begins."""
    answer = post(engine_emitting("a"), **body, stream=stream)

    assert 400 <= answer.status < 500
    assert "error" == answer.json["type"]
    assert answer.json["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert words in answer.json["error"]["message"]


def test_error_in_a_stream_is_its_last_event() -> None:
    engine = FakeEngine(lambda request: [Started(1, 0, 0), Delta("Hel", (1,)), Failed("broken")])
    last = post(engine, max_tokens=9, stream=True).named_events[-1]

    assert ("error", "api_error") == (last["type"], last["error"]["type"])
    assert "broken" in last["error"]["message"]
