"""Random JSON for each generation endpoint: a valid response or a 4xx in the error envelope, never a 5xx."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.sync.client import connect

from server.app import create_app
from server.schemas import policy
from server.schemas.anthropic import MessagesRequest
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.content import Strict
from server.schemas.responses import ResponseRequest
from tests.server.fakes import HERMES, FakeEngine, FakeTokenizer, ask, serve_in_thread
from tests.server.fakes import settings as server_settings

CHAT, TEXT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TERMINAL = ("response.completed", "response.failed", "response.incomplete", "error")
EDGES: list[Any] = [-1, 0, 1, 2, 16, 17, 2**31, 2**63 - 1, -(2**63), 1e308, -0.0, 5e-324, 0.5, True, False, None]
TYPES = """message input_text output_text refusal function_call function_call_output reasoning item_reference
    compaction reasoning_text summary_text text thinking tool_use tool_result image function allowed_tools json_schema
    json_object custom auto any tool enabled disabled adaptive ephemeral explicit required user assistant system
    developer completed object f a"""
NAMES = """type role content text id call_id name arguments output summary encrypted_content status input tool_use_id
    thinking signature is_error cache_control input_schema parameters strict json_schema schema format effort
    budget_tokens mode tools refusal function 1 x"""
WORDS, KEYS = TYPES.split(), NAMES.split()
letters = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
scalars = st.sampled_from([*EDGES, "", [], {}, *WORDS, *WORDS]) | letters
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=10,
)
items = st.lists(st.dictionaries(st.sampled_from(KEYS), values, max_size=6) | values, max_size=3)
quick = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


def fields(model: type[Strict], documented: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted({*model.model_fields, *documented})), values, max_size=4)


HELLO = [{"role": "user", "content": "hi"}]
FIELDS = {
    CHAT: fields(ChatRequest, {**policy.CHAT, **policy.COMPLETIONS}),
    TEXT: fields(CompletionRequest, {**policy.CHAT, **policy.COMPLETIONS}),
    RESPONSES: fields(ResponseRequest, policy.RESPONSES),
    ANTHROPIC: fields(MessagesRequest, policy.ANTHROPIC),
}
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    ANTHROPIC: {"model": "fake", "max_tokens": 3, "messages": HELLO},
}


def blocks(content: list[Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    return {**VALID[ANTHROPIC], "messages": messages, "system": content}


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(tokenizer=FakeTokenizer(HERMES)), server_settings())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serve_in_thread(FakeEngine(tokenizer=FakeTokenizer(HERMES)), server_settings()) as port:
        yield port


def check(app: Any, path: str, body: dict[str, Any]) -> None:
    answer = ask(app, "POST", path, json_body=body)

    assert answer.status in (200, 400, 404, 429), answer.body
    if answer.status != 200:
        expected = {"message", "type"} if path == ANTHROPIC else {"message", "type", "param", "code"}
        assert expected <= answer.json["error"].keys()
        assert len(answer.body) < 1000
    elif path in (CHAT, TEXT) and not body.get("stream"):
        assert "choices" in answer.json


@pytest.mark.parametrize("path", FIELDS)
@quick
@given(data=st.data())
def test_no_fields_are_a_5xx(app: Any, path: str, data: st.DataObject) -> None:
    """Random fields beside a valid prompt."""
    check(app, path, {**VALID[path], **data.draw(FIELDS[path])})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, lambda items: {"messages": items}),
        (RESPONSES, lambda items: {"input": items}),
        (f"{RESPONSES}/input_tokens", lambda items: {"input": items}),
        (f"{RESPONSES}/compact", lambda items: {"input": items, "model": "fake"}),
        (ANTHROPIC, blocks),
    ],
)
@quick
@given(items=items)
def test_no_items_are_a_5xx(app: Any, path: str, body: Callable[[list[Any]], dict[str, Any]], items: list[Any]) -> None:
    """Random messages, items or content blocks."""
    check(app, path, body(items))


@quick
@given(st.lists(FIELDS[RESPONSES] | values, min_size=1, max_size=4))
def test_every_websocket_message_is_answered(port: int, messages: list[Any]) -> None:
    """Each gets a terminal event or an error event, in order."""
    with connect(f"ws://127.0.0.1:{port}{RESPONSES}", compression=None) as socket:
        for message in messages:
            body = {"type": "response.create", "input": "hi", **message} if isinstance(message, dict) else message
            socket.send(json.dumps(body))
            while (event := json.loads(socket.recv(20)))["type"] not in TERMINAL:
                assert event["type"].startswith("response.")
            assert event["type"] != "error" or event["status"] in (400, 404, 408)


@quick
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_no_name_of_a_response_is_a_5xx(app: Any, name: str) -> None:
    """Random paths and queries."""
    for path, method in ((name, "GET"), (name, "DELETE"), (f"{name}/cancel", "POST"), (f"{name}/input_items", "GET")):
        answer = ask(app, method, f"{RESPONSES}/{path}", query=f"limit={name}&after={name}", json_body=None)

        assert answer.status in (400, 404, 405), answer.body
