"""/v1/responses: translation of requests, responses, streams and the store."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.types.events import Delta, Event, Failed, Started, Usage
from engine.types.request import Request
from server.app import create_app
from server.http.errors import INVALID_VALUE, ApiError
from server.responses.archive import WORKER_LOST, Archive
from server.responses.translation import renamed_error
from server.schemas.response_items import ResponseBody, ResponseDeleted, ResponseInputTokens
from server.store.store import LEASE_SECONDS, Record, ResponseStore
from tests.server import wire
from tests.server.fakes import (
    HERMES,
    Answer,
    FakeEngine,
    FakeTokenizer,
    Gate,
    ask,
    call,
    finished,
    serve_in_thread,
    settings,
)
from tests.server.wire import connected

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
BACKGROUND = {"input": "hi", "background": True}


def generating(*texts: str) -> FakeEngine:
    """An engine that generates `texts` letter by letter, one for each request."""
    left = iter(texts)

    def script(request: Request) -> Iterator[Event]:
        yield Started(len(request.prompt), 0, 7)
        for letter in next(left):
            yield Delta(letter, (1,))
        yield finished(request)

    return FakeEngine(script, tokenizer=FakeTokenizer(HERMES))


def make(engine: FakeEngine, **changes: Any) -> Any:
    """An app of this engine with a context for conversations."""
    return create_app(engine, settings(**changes))  # type: ignore[arg-type]


def post(app: Any, path: str = "", **body: Any) -> Answer:
    """One request."""
    return ask(app, "POST", PATH + path, json_body=body)


def get(app: Any, path: str) -> Answer:
    """One reading."""
    path, _, query = path.partition("?")
    return ask(app, "GET", f"{PATH}/{path}", query=query)


def rendered(engine: FakeEngine) -> list[Any]:
    """Roles and texts of the last prompt."""
    return [(message["role"], message["content"]) for message in engine.tokenizer.rendered[-1]["messages"]]


def test_an_answer_has_the_shape_of_openais() -> None:
    """Every field: text, usage and the request's settings."""
    body = post(make(generating("Hello")), input="hi", metadata={"a": "b"}, top_p=0.5, model="fake").json

    response = Response.model_validate(body)
    assert ("completed", "Hello", "fake") == (response.status, response.output_text, response.model)
    assert (0.5, 1.0, {"a": "b"}) == (response.top_p, response.temperature, response.metadata)
    assert (0.0, 0.0) == (body["presence_penalty"], body["frequency_penalty"])
    assert response.usage is not None
    assert (3, 3, 6) == (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens)
    assert body["id"].startswith("resp_")
    assert body["output"][0]["id"].startswith("msg_")


def test_a_stream_ends_in_the_answer_in_one_piece() -> None:
    """Sequence numbers from 0, no [DONE], and the same text."""
    answer = post(make(generating("Hello")), input="hi", stream=True)

    reply = answer.named_events
    assert "text/event-stream; charset=utf-8" == answer.headers["content-type"]
    assert list(range(len(reply))) == [event["sequence_number"] for event in reply]
    assert ("response.created", "response.completed") == (reply[0]["type"], reply[-1]["type"])
    assert "Hello" == "".join(event["delta"] for event in reply if event["type"].endswith("text.delta"))
    assert "Hello" == reply[-1]["response"]["output"][0]["content"][0]["text"]
    assert b"[DONE]" not in answer.body


def test_responses_match_the_published_types() -> None:
    """Those of /openapi.json without extra fields; events and pages against the types of OpenAI's client."""
    app = make(generating(f"<think>\nhm\n</think>\n\nyes{CALL}", "a"))
    asked = {"input": "q", "tools": [TOOL], "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}}
    streamed = post(app, **asked, stream=True).named_events
    id = streamed[0]["response"]["id"]

    def check(shape: Any, value: Any) -> None:
        TypeAdapter(shape).validate_python(value, strict=True, extra="forbid")

    for event in streamed:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    check(ResponseBody, get(app, id).json)
    ResponseItemList.model_validate(get(app, f"{id}/input_items").json)
    check(ResponseInputTokens, post(app, "/input_tokens", input="q").json)
    check(ResponseDeleted, ask(app, "DELETE", f"{PATH}/{id}").json)


def test_input_items_become_a_conversation() -> None:
    """Instructions first; consecutive reasoning, text and tool calls are one message."""
    engine = generating("ok")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    assert 200 == post(make(engine), instructions="be", input=items).status

    assert [
        ("system", "be"),
        ("user", "a\nb"),
        ("assistant", "c"),
        ("tool", "2"),
        ("assistant", "d"),
        ("assistant", "e"),
    ] == rendered(engine)
    received = engine.tokenizer.rendered[-1]["messages"][2]
    assert "hm" == received["reasoning_content"]
    assert {"name": "add", "arguments": {"a": 1}} == received["tool_calls"][0]["function"]


def test_a_conversation_continues_a_response() -> None:
    """With its reasoning, its tool call and the output; instructions are not inherited."""
    engine = generating(f"<think>\nhm\n</think>\n\n{CALL}", "two")
    app = make(engine)
    first = post(app, input="1+1", instructions="be", tools=[TOOL]).json
    called = first["output"][-1]
    output = {"type": "function_call_output", "call_id": called["call_id"], "output": "2"}
    second = post(app, input=[output], previous_response_id=first["id"]).json

    assert ["reasoning", "function_call"] == [item["type"] for item in first["output"]]
    assert ("add", '{"a": 1}') == (called["name"], called["arguments"])
    assert [("user", "1+1"), ("assistant", ""), ("tool", "2")] == rendered(engine)
    received = engine.tokenizer.rendered[-1]["messages"][1]
    assert ("hm", called["call_id"]) == (received["reasoning_content"], received["tool_calls"][0]["id"])
    assert ("two", first["id"]) == (second["output"][0]["content"][0]["text"], second["previous_response_id"])
    listed = get(app, f"{second['id']}/input_items?order=asc").json
    assert ["message", "reasoning", "function_call", "function_call_output"] == [
        item["type"] for item in listed["data"]
    ]


def test_functions_of_a_namespace_are_called() -> None:
    """As Codex sends them: the call names the group, and comes back in the history."""
    group = {"type": "namespace", "name": "math", "description": "d", "tools": [TOOL]}
    for stream in (False, True):
        engine = generating(CALL, "two")
        app = make(engine)
        answer = post(app, input="1+1", tools=[group], stream=stream)
        first = answer.named_events[-1]["response"] if stream else answer.json
        called = first["output"][0]
        output = {"type": "function_call_output", "call_id": called["call_id"], "output": "2"}
        again = post(app, input=["1+1", called, output][1:], tools=[group])

        assert ("function_call", "add", "math") == (called["type"], called["name"], called["namespace"])
        assert "add" in str(engine.tokenizer.rendered[0]["tools"])
        assert [{**TOOL, "description": None}] == first["tools"][0]["tools"]
        assert (200, "two") == (again.status, again.json["output"][0]["content"][0]["text"])


def test_lenient_servers_leave_hosted_tools_out() -> None:
    """Web search and others run at OpenAI; the answer says which are missing."""
    app = make(generating("a"), lenient=True)
    answer = post(app, input="hi", tools=[TOOL, {"type": "web_search", "external_web_access": False}]).json

    assert ["Unknown parameter: 'tools[1].type'."] == answer["warnings"]
    assert ["add"] == [tool["name"] for tool in answer["tools"]]


def test_stateless_clients_send_encrypted_reasoning_back() -> None:
    """Reasoning is decoded from `encrypted_content`."""
    engine = generating("<think>\nhm\n</think>\n\nyes", "ok")
    app = make(engine)
    include = ["reasoning.encrypted_content"]
    item = post(app, input="q", store=False, include=include).json["output"][0]
    assert 200 == post(app, input=[{**item, "content": None}, {"role": "user", "content": "r"}]).status

    assert "hm" == engine.tokenizer.rendered[-1]["messages"][0]["reasoning_content"]
    foreign = post(app, input=[{**item, "content": None, "encrypted_content": "gAAAA"}])
    assert (400, "input") == (foreign.status, foreign.json["error"]["param"])


def test_items_can_be_referenced_by_id() -> None:
    """A stored item needs only its id; an unknown id is rejected."""
    engine = generating("yes", "ok")
    app = make(engine)
    first = post(app, input="q").json
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert (
        200 == post(app, input=[{"role": "user", "content": "q"}, reference, {"role": "user", "content": "r"}]).status
    )

    assert [("user", "q"), ("assistant", "yes"), ("user", "r")] == rendered(engine)
    unknown = post(app, input=[{"type": "item_reference", "id": "msg_none"}])
    assert (400, "input") == (unknown.status, unknown.json["error"]["param"])


def test_settings_reach_the_engine_request() -> None:
    """As in chats, under the names of this API."""
    engine = generating("{}")
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    answer = post(
        make(engine),
        input="q",
        text=text,
        tools=[{**TOOL, "strict": True}],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        max_output_tokens=9,
        temperature=0,
        top_k=3,
        seed=5,
        service_tier="flex",
        reasoning={"effort": "high", "summary": "auto"},
        top_logprobs=2,
    ).json

    (request,) = engine.requests
    assert (9, 0.0, 3, 5) == (
        request.max_tokens,
        request.sampling.temperature,
        request.sampling.top_k,
        request.sampling.seed,
    )
    assert ("flex", 2) == (request.tier, request.logprobs)
    assert request.grammar is not None
    assert "high" == engine.tokenizer.rendered[-1]["arguments"]["reasoning_effort"]
    assert {**text, "format": text["format"]} == answer["text"]
    assert {"effort": "high", "summary": None} == answer["reasoning"]
    assert ("flex", 2) == (answer["service_tier"], answer["top_logprobs"])


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"type": "computer_call"}]}, "unsupported_value", "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "invalid_image_url",
            "input[0].content[0].image_url",
        ),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "unsupported_value", "tools[0].type"),
        ({"input": "a", "tools": [{**TOOL, "parameters": {"type": 3}}]}, "invalid_value", "tools[0].parameters.type"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "invalid_value", "tool_choice"),
        ({"input": "a", "conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"input": "a", "prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"input": "a", "n": 2}, "unknown_parameter", "n"),
        ({"input": "a", "no_such_thing": 2}, "unknown_parameter", "no_such_thing"),
        ({"input": "a", "reasoning": {"context": "current_turn"}}, "unsupported_parameter", "reasoning.context"),
        ({"input": "a", "text": {"verbosity": "loud"}}, "invalid_value", "text.verbosity"),
        ({"input": "a" * 100}, "context_length_exceeded", "input"),
        ({"input": "a", "model": "none"}, "model_not_found", "model"),
        ({"input": "a", "previous_response_id": "resp_none"}, "previous_response_not_found", "previous_response_id"),
        ({"input": "a", "background": True, "store": False}, "invalid_value", "background"),
        ({"input": "a", "stream_options": {}}, "invalid_value", "stream_options"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_unsupported_field(body: dict[str, Any], code: str, param: str, stream: bool) -> None:
    """By the field names of this API, with an error status for streams too."""
    if stream and "stream_options" in body:
        return
    answer = post(make(generating("x")), **body, stream=stream)

    error = answer.json["error"]
    assert (code, param) == (error["code"], error["param"])
    assert 400 <= answer.status < 500


def test_a_limit_above_the_context_is_a_warning_with_the_name_of_this_api() -> None:
    answer = post(make(generating("x")), input="a", max_output_tokens=999)

    assert answer.json["warnings"] == ["'max_output_tokens' is 999: the answer ends at the context of 64 tokens."]


@pytest.mark.parametrize(
    ("chat", "response"),
    [
        ("messages[3].content", "input"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("reasoning_effort", "reasoning.effort"),
        ("tools[2].function.parameters.type", "tools[2].parameters.type"),
        ("seed", "seed"),
    ],
)
def test_chat_errors_have_the_field_names_of_responses(chat: str, response: str) -> None:
    """In `param` and in the message."""
    error = renamed_error(ApiError(INVALID_VALUE, f"Invalid value for '{chat}': no.", param=chat))

    assert (response, f"Invalid value for '{response}': no.") == (error.param, error.message)


def test_a_response_is_read_streamed_and_deleted() -> None:
    """The stored response equals the first one; its events can be streamed from any number on."""
    app = make(generating("Hello"))
    streamed = post(app, input="hi", stream=True).named_events
    id = streamed[0]["response"]["id"]

    assert streamed[-1]["response"] == get(app, id).json
    assert streamed == get(app, f"{id}?stream=true").named_events
    assert streamed[4:] == get(app, f"{id}?stream=true&starting_after=3").named_events
    assert [] == get(app, f"{id}?stream=true&starting_after=999").named_events
    assert {"id": id, "object": "response", "deleted": True} == ask(app, "DELETE", f"{PATH}/{id}").json
    for gone in (get(app, id), get(app, f"{id}?stream=true"), get(app, f"{id}/input_items")):
        assert (404, "response_not_found") == (gone.status, gone.json["error"]["code"])
    assert 404 == ask(app, "DELETE", f"{PATH}/{id}").status
    assert 404 == post(app, f"/{id}/cancel").status


def test_a_response_outlives_its_server(tmp_path: Path) -> None:
    """Another server with the same file reads it, continues it and streams its events."""
    store = str(tmp_path / "responses.sqlite")
    streamed = post(make(generating("Hello"), store=store), input="hi", stream=True).named_events
    first = streamed[-1]["response"]
    engine = generating("ok")
    app = make(engine, store=store)

    assert first == get(app, first["id"]).json
    assert streamed == get(app, f"{first['id']}?stream=true").named_events
    assert 200 == post(app, input="x", previous_response_id=first["id"]).status
    assert [("user", "hi"), ("assistant", "Hello"), ("user", "x")] == rendered(engine)


def test_a_response_belongs_to_its_key() -> None:
    """With another key it cannot be read, streamed, continued, referenced or deleted."""
    app = make(generating("a", "b", "c"), keys=("one", "two"))

    def sent(key: str, method: str, path: str = "", **body: Any) -> Answer:
        path, _, query = path.partition("?")
        headers = {"authorization": f"Bearer {key}"}
        return ask(app, method, f"{PATH}{path}", query=query, json_body=body or None, headers=headers)

    first = sent("one", "POST", input="hi").json
    id, reference = first["id"], {"type": "item_reference", "id": first["output"][0]["id"]}
    for method, path in (
        ("GET", ""),
        ("GET", "?stream=true"),
        ("GET", "/input_items"),
        ("DELETE", ""),
        ("POST", "/cancel"),
    ):
        path, _, query = path.partition("?")
        answer = sent("two", method, f"/{id}{path}?{query}")
        assert (404, "response_not_found") == (answer.status, answer.json["error"]["code"]), path
    assert 400 == sent("two", "POST", input="x", previous_response_id=id).status
    assert 400 == sent("two", "POST", input=[reference]).status
    assert 200 == sent("one", "GET", f"/{id}").status
    assert 200 == sent("one", "POST", input="x", previous_response_id=id).status
    assert 200 == sent("one", "DELETE", f"/{id}").status


def test_a_broken_store_does_not_fail_the_response(tmp_path: Path) -> None:
    """A response is complete without the store; requests that need the store are errors and compute nothing."""
    place = tmp_path / "responses.sqlite"
    engine = generating("a", "b", "c")
    app = make(engine, store=str(place))
    assert 200 == post(app, input="hi").status
    with closing(sqlite3.connect(place)) as other:
        other.execute("DROP TABLE responses")

    whole, behind = post(app, input="hi").json, post(app, **BACKGROUND)
    assert "b" == whole["output"][0]["content"][0]["text"]
    assert (503, "store_unavailable") == (behind.status, behind.json["error"]["code"])
    assert 503 == get(app, whole["id"]).status
    assert set() == engine.running


def test_store_false_stores_nothing() -> None:
    """It can be neither read nor continued."""
    app = make(generating("a"))
    id = post(app, input="hi", store=False).json["id"]

    assert 404 == get(app, id).status
    assert 400 == post(app, input="b", previous_response_id=id).status


def test_a_server_without_a_store_answers() -> None:
    """Requests that need a store are errors."""
    app = make(generating("a", "b"), store="none")
    answer = post(app, input="hi").json

    assert answer["store"] is False
    assert 404 == get(app, answer["id"]).status
    for body in ({"store": True}, {"background": True}):
        refused = post(app, input="hi", **body)
        assert (400, "unsupported_value", *body) == (
            refused.status,
            refused.json["error"]["code"],
            refused.json["error"]["param"],
        )


def test_input_items_come_in_pages() -> None:
    """In either order, after any item."""
    app = make(generating("a"))
    id = post(app, input=[{"role": "user", "content": text} for text in "vwxyz"]).json["id"]

    def texts(query: str) -> tuple[str, bool]:
        page = get(app, f"{id}/input_items?{query}").json
        assert page["first_id"] == page["data"][0]["id"]
        assert page["last_id"] == page["data"][-1]["id"]
        return "".join(item["content"][0]["text"] for item in page["data"]), page["has_more"]

    assert ("zyxwv", False) == texts("")
    assert ("vw", True) == texts("order=asc&limit=2")
    last = get(app, f"{id}/input_items?order=asc&limit=2").json["last_id"]
    assert ("xyz", False) == texts(f"order=asc&after={last}")
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("after=none", "after"), ("order=x", "order")):
        refused = get(app, f"{id}/input_items?{query}")
        assert (400, param) == (refused.status, refused.json["error"]["param"])


def test_cache_diagnostics_compare_with_an_earlier_response() -> None:
    """A hit if the prompt continues the earlier one, else the reason and the position of the first difference."""
    cost = Usage(prompt_tokens=9, completion_tokens=1, cached_tokens=2)
    engine = FakeEngine(
        lambda request: [Delta("a", (1,)), finished(request, usage=cost)], tokenizer=FakeTokenizer(HERMES)
    )
    app = make(engine)
    first = post(app, input="hi").json

    def explained(compared: str = first["id"], **body: Any) -> Any:
        options = {"comparison_response_id": compared}
        answer = post(app, **{"input": "hi", **body}, prompt_cache_options=options).json
        assert compared == answer["prompt_cache_options"]["comparison_response_id"]
        Response.model_validate(answer)
        return answer["prompt_cache_diagnostics"]

    assert {"type": "cache_hit"} == explained(input="x", previous_response_id=first["id"])
    missed = {"type": "cache_miss", "cache_missed_tokens": 2, "comparison_reusable_tokens": 1}
    assert {**missed, "reason": "input_changed"} == explained(input="ho")
    assert {**missed, "reason": "tools_changed"} == explained(input="ho", tools=[TOOL])
    assert {"type": "comparison_response_not_found"} == explained("resp_none")
    cost = Usage(prompt_tokens=9, completion_tokens=1, cached_tokens=0)
    assert {"type": "unavailable"} == explained()
    assert "prompt_cache_diagnostics" not in first


def test_tokens_are_counted() -> None:
    """As many as in the prompt of the same request, history included."""
    app = make(generating("abc"))
    first = post(app, input="hi").json

    assert {"object": "response.input_tokens", "input_tokens": 3} == post(app, "/input_tokens", input="hi").json
    both = post(app, "/input_tokens", input="x", previous_response_id=first["id"], instructions="be").json
    assert len("be\nhi\nabc\nx\n") == both["input_tokens"]


def test_truncation_auto_drops_the_oldest_turns() -> None:
    """Instructions stay. A message above the context is still an error."""
    engine = generating("ok")
    app = make(engine)
    items = [{"role": role, "content": f"{role[0]}{at}" * 3} for at in range(9) for role in ("user", "assistant")]
    items.append({"role": "user", "content": "now"})

    assert 400 == post(app, input=items).status
    assert 200 == post(app, input=items, instructions="be", truncation="auto").status
    received = rendered(engine)
    assert [("system", "be"), ("user", "now")] == [received[0], received[-1]]
    assert "user" == received[1][0]
    assert 3 < len(received) < 12
    long = post(app, input="x" * 99, truncation="auto")
    assert (400, "context_length_exceeded", "input") == (
        long.status,
        long.json["error"]["code"],
        long.json["error"]["param"],
    )


def test_a_length_limit_leaves_the_response_incomplete() -> None:
    """The response and its last item have the reason."""
    engine = FakeEngine(lambda request: [Delta("Hel", (1,)), finished(request, reason="length")])
    body = post(make(engine), input="hi").json

    assert ("incomplete", {"reason": "max_output_tokens"}) == (body["status"], body["incomplete_details"])
    assert "incomplete" == body["output"][0]["status"]


def test_a_failed_generation() -> None:
    """An error status, or the last two events of a stream; it is not stored as a success."""
    engine = FakeEngine(lambda request: [Delta("Hel", (1,)), Failed("broken")])
    app = make(engine)
    whole, stream = post(app, input="hi"), post(app, input="hi", stream=True).named_events

    assert (500, "generation_failed") == (whole.status, whole.json["error"]["code"])
    assert ["error", "response.failed"] == [event["type"] for event in stream[-2:]]
    assert stream[-2]["code"] == stream[-2]["error"]["code"] == "generation_failed"
    assert "failed" == get(app, stream[0]["response"]["id"]).json["status"]


def test_an_unexpected_exception_has_no_details() -> None:
    def script(request: Request) -> Iterator[Event]:
        yield Delta("Hel", (1,))
        raise RuntimeError("/home/secret")

    answer = post(make(FakeEngine(script)), input="hi", stream=True)

    assert "internal_error" == answer.named_events[-2]["code"]
    assert b"secret" not in answer.body


def test_a_background_response_needs_no_client() -> None:
    """Queued, in progress, completed; its events can be streamed from any number on during the generation."""
    gate, begun = Gate(), Gate()
    engine = FakeEngine(lambda request: [begun, Started(1, 0, 1), Delta("Hel", (1,)), gate, finished(request)])
    app = make(engine)

    async def read(path: str) -> Any:
        return (await call(app, "GET", f"{PATH}/{path}")).json

    async def until(id: str, status: str) -> Any:
        while (found := await read(id))["status"] != status:
            await asyncio.sleep(0.01)
        return found

    async def work() -> None:
        made = (await call(app, "POST", PATH, json_body=BACKGROUND)).json
        id = made["id"]
        assert ("queued", True, []) == (made["status"], made["background"], made["output"])
        assert "queued" == (await read(id))["status"]
        following = asyncio.create_task(call(app, "GET", f"{PATH}/{id}", query="stream=true&starting_after=1"))
        while not begun.reached.is_set():
            await asyncio.sleep(0.01)
        begun.open()
        growing = await until(id, "in_progress")
        while not gate.reached.is_set():
            await asyncio.sleep(0.01)
        growing = await read(id)
        assert "Hel" == growing["output"][0]["content"][0]["text"]
        gate.open()
        done = await until(id, "completed")
        reply = (await following).named_events
        assert list(range(2, 2 + len(reply))) == [event["sequence_number"] for event in reply]
        assert ("response.in_progress", "response.completed") == (reply[0]["type"], reply[-1]["type"])
        assert done == reply[-1]["response"]

    asyncio.run(work())


def test_a_background_response_can_be_cancelled() -> None:
    """The generation stops, its text so far stays, and other responses can continue it."""
    gate = Gate()

    def script(request: Request) -> list[Event | Gate]:
        spoken: list[Event | Gate] = [Started(1, 0, 1), Delta("Hel", (1,))]
        return [*spoken, gate, finished(request)] if len(engine.requests) == 1 else [finished(request)]

    engine = FakeEngine(script)
    app = make(engine)

    async def work() -> None:
        id = (await call(app, "POST", PATH, json_body=BACKGROUND)).json["id"]
        while not gate.reached.is_set():
            await asyncio.sleep(0.01)
        for _ in range(2):
            cancelled = (await call(app, "POST", f"{PATH}/{id}/cancel")).json
            assert ("cancelled", "Hel") == (cancelled["status"], cancelled["output"][0]["content"][0]["text"])
        assert set() == engine.running
        assert "cancelled" == (await call(app, "GET", f"{PATH}/{id}")).json["status"]
        on = await call(app, "POST", PATH, json_body={"input": "x", "previous_response_id": id})
        assert 200 == on.status

    asyncio.run(work())


def test_a_response_in_the_foreground_cannot_be_cancelled() -> None:
    """A disconnect cancels it."""
    app = make(generating("a"))
    id = post(app, input="x").json["id"]

    assert 400 == post(app, f"/{id}/cancel").status


def test_background_responses_are_limited() -> None:
    """To half of the queue; one more is a 429 with the predicted wait, and foreground requests are served."""
    gate = Gate()
    engine = FakeEngine(lambda request: [gate, finished(request)])
    engine.numbers = replace(engine.numbers, free_place_seconds=20.0)
    app = make(engine, max_waiting=4)

    async def work() -> None:
        ids = [(await call(app, "POST", PATH, json_body=BACKGROUND)).json["id"] for _ in range(2)]
        refused = await call(app, "POST", PATH, json_body=BACKGROUND)
        assert (429, "queue_full") == (refused.status, refused.json["error"]["code"])
        assert 20 <= int(refused.headers["retry-after"]) <= 30
        front = asyncio.create_task(call(app, "POST", PATH, json_body={"input": "hi"}))
        while len(engine.running) < 3:
            await asyncio.sleep(0.01)
        gate.open()
        assert "completed" == (await front).json["status"]
        for id in ids:
            await call(app, "DELETE", f"{PATH}/{id}")
        assert 200 == (await call(app, "POST", PATH, json_body=BACKGROUND)).status

    asyncio.run(work())


def test_a_disconnect_aborts_the_response() -> None:
    """Streamed or not, its generation stops and nothing is stored; background responses continue."""
    gate = Gate()
    engine = FakeEngine(lambda request: [Started(1, 0, 1), Delta("x", (1,)), gate, finished(request)])
    with serve_in_thread(engine) as port:
        for body in ({"input": "hi"}, {"input": "hi", "stream": True}):
            gate.reached.clear()
            with connected(port) as client:
                client.sendall(wire.post(PATH, body))
                assert gate.reached.wait(20)
            assert engine.left.wait(20)
            engine.left.clear()
            assert set() == engine.running
        gate.reached.clear()
        with connected(port) as client:
            client.sendall(wire.post(PATH, BACKGROUND))
            assert gate.reached.wait(20)
        with connected(port) as client:
            client.sendall(wire.get("/health", "Connection: close"))
            assert 200 == wire.status(wire.read_all(client))
        assert 1 == len(engine.running)
        gate.open()
        assert engine.left.wait(20)


def test_a_response_of_a_dead_server_has_failed() -> None:
    """After the end of its lease, not before."""
    now = [1000.0]
    store = ResponseStore(clock=lambda: now[0])
    body: Any = {"id": "resp_x", "status": "in_progress", "output": [], "error": None}

    async def work() -> tuple[Any, Any]:
        await store.put(Record("resp_x", None, False, json.dumps(body).encode(), b"[]"))
        before = await Archive(store).response("resp_x")
        now[0] += LEASE_SECONDS + 1
        return before, await Archive(store).response("resp_x")

    before, after = asyncio.run(work())
    store.close()
    assert ("in_progress", "failed") == (before["status"], after["status"])
    assert WORKER_LOST == after["error"]["message"]
