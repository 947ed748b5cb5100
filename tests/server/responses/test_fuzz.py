"""Random JSON for /v1/responses and /v1/messages: a valid response or a 4xx with an error envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.sync.client import connect

from server.app import create_app
from server.schemas import policy
from server.schemas.anthropic import MessagesRequest
from server.schemas.content import Strict
from server.schemas.responses import ResponseRequest
from tests.server.fakes import HERMES, FakeEngine, FakeTokenizer, ask, serve_in_thread
from tests.server.fakes import settings as server_settings

TERMINAL = ("response.completed", "response.failed", "response.incomplete", "error")
EDGES: list[Any] = [-1, 0, 1, 17, 2**31, 2**63 - 1, 1e308, 0.5, True, False, None, "", [], {}]
TYPES = """message input_text output_text refusal function_call function_call_output reasoning item_reference
    compaction reasoning_text summary_text text thinking tool_use tool_result image function allowed_tools json_schema
    json_object custom auto any tool enabled disabled adaptive ephemeral explicit user assistant system developer
    completed object f"""
NAMES = """type role content text id call_id name arguments output summary encrypted_content status input tool_use_id
    thinking signature is_error cache_control input_schema parameters strict schema format effort budget_tokens mode
    tools refusal"""
WORDS, KEYS = TYPES.split(), NAMES.split()
scalars = st.sampled_from([*EDGES, *WORDS, *WORDS]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=10,
)
quick = settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(tokenizer=FakeTokenizer(HERMES)), server_settings())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serve_in_thread(FakeEngine(tokenizer=FakeTokenizer(HERMES)), server_settings()) as port:
        yield port


def fields(model: type[Strict], documented: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted({*model.model_fields, *documented})), values, max_size=4)


def check(app: Any, path: str, body: dict[str, Any]) -> None:
    answer = ask(app, "POST", path, json_body=body)

    assert answer.status in (200, 400, 404, 429), answer.body
    if answer.status != 200:
        assert {"message", "type"} <= answer.json["error"].keys()
        assert len(answer.body) < 1000


@quick
@given(fields(ResponseRequest, policy.RESPONSES))
def test_no_response_is_a_5xx(app: Any, body: dict[str, Any]) -> None:
    """Random fields beside a valid input."""
    check(app, "/v1/responses", {"input": "hi", **body})


@quick
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), values, max_size=6) | values, max_size=3))
def test_no_items_are_a_5xx(app: Any, items: list[Any]) -> None:
    """Random items."""
    check(app, "/v1/responses", {"input": items})
    check(app, "/v1/responses/input_tokens", {"input": items})
    check(app, "/v1/responses/compact", {"input": items, "model": "fake"})


@quick
@given(st.lists(fields(ResponseRequest, policy.RESPONSES) | values, min_size=1, max_size=4))
def test_every_websocket_message_is_answered(port: int, messages: list[Any]) -> None:
    """Each gets a terminal event or an error event, in order."""
    with connect(f"ws://127.0.0.1:{port}/v1/responses", compression=None) as socket:
        for message in messages:
            body = {"type": "response.create", "input": "hi", **message} if isinstance(message, dict) else message
            socket.send(json.dumps(body))
            while (event := json.loads(socket.recv(20)))["type"] not in TERMINAL:
                assert event["type"].startswith("response.")
            assert event["type"] != "error" or event["status"] in (400, 404, 408)


@quick
@given(fields(MessagesRequest, policy.ANTHROPIC))
def test_no_message_is_a_5xx(app: Any, body: dict[str, Any]) -> None:
    """Random fields beside a valid conversation."""
    check(
        app, "/v1/messages", {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}], **body}
    )


@quick
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), values, max_size=6) | values, max_size=3))
def test_no_blocks_are_a_5xx(app: Any, blocks: list[Any]) -> None:
    """Random content blocks."""
    messages = [{"role": "user", "content": blocks}, {"role": "assistant", "content": blocks}]
    check(app, "/v1/messages", {"model": "fake", "max_tokens": 3, "messages": messages, "system": blocks})


@quick
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_no_name_of_a_response_is_a_5xx(app: Any, name: str) -> None:
    """Random paths and queries."""
    for path, method in ((name, "GET"), (name, "DELETE"), (f"{name}/cancel", "POST"), (f"{name}/input_items", "GET")):
        answer = ask(app, method, f"/v1/responses/{path}", query=f"limit={name}&after={name}", json_body=None)

        assert answer.status in (400, 404, 405), answer.body
