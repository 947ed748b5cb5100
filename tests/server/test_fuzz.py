"""Any JSON for any field: the answer is 200 or a 4xx in the envelope, never a fault of ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.app import create_app
from server.schemas import policy
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from tests.server.fakes import HERMES, FakeEngine, FakeTokenizer, ask
from tests.server.fakes import settings as server_settings

EDGES = [-1, 0, 1, 2, 16, 17, 2**31, 2**63 - 1, -(2**63), 1e308, -0.0, 5e-324, 0.5, True, False, None, "", "a", [], {}]
KEYS = ["role", "content", "type", "text", "1", "x", "function", "name", "json_schema", "schema", "parameters", "mode"]
WORDS = ["function", "json_schema", "json_object", "allowed_tools", "required", "explicit", "user", "assistant", "f"]
scalars = st.sampled_from([*EDGES, *WORDS]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
quick = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(tokenizer=FakeTokenizer(HERMES)), server_settings())  # type: ignore[arg-type]


def fields(model: type[ChatRequest] | type[CompletionRequest]) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted({*model.model_fields, *policy.CHAT, *policy.COMPLETIONS})
    return st.dictionaries(st.sampled_from(names), values, max_size=4)


def check(app: Any, path: str, body: dict[str, Any]) -> None:
    answer = ask(app, "POST", path, json_body=body)

    assert answer.status in (200, 400, 404)
    if answer.status != 200:
        error = answer.json["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        assert len(answer.body) < 1000
    elif not body.get("stream"):
        assert "choices" in answer.json


@quick
@given(fields(ChatRequest))
def test_no_chat_is_a_5xx(app: Any, body: dict[str, Any]) -> None:
    """Whatever the fields hold, beside messages that are fine."""
    check(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body})


@quick
@given(st.lists(values, max_size=3))
def test_no_messages_are_a_5xx(app: Any, messages: list[Any]) -> None:
    """Whatever the messages are."""
    check(app, "/v1/chat/completions", {"messages": messages})


@quick
@given(fields(CompletionRequest))
def test_no_completion_is_a_5xx(app: Any, body: dict[str, Any]) -> None:
    """Whatever the fields hold, beside a prompt that is fine."""
    check(app, "/v1/completions", {"prompt": "hi", **body})
