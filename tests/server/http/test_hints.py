"""Hints of other APIs are left out with a warning, also without --lenient."""

from __future__ import annotations

from typing import Any

import pytest

from server.app import create_app
from tests.server.fakes import FakeEngine, ask, settings

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
PART = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [USER]}, TEXT: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(), settings())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"store": True}, "store"),
        (CHAT, {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"cache_control": {"type": "ephemeral"}}, "cache_control"),
        (CHAT, {"background_options": {}}, "background_options"),
        (CHAT, {"mirostat": 0, "mirostat_tau": 3}, "mirostat_tau"),
        (TEXT, {"mirostat": 0, "mirostat_tau": 3}, "mirostat_tau"),
        (CHAT, {"messages": [{**USER, "content": [PART]}]}, "messages[0].content[0].cache_control"),
        (CHAT, {"messages": [{**USER, "cache_control": {}}]}, "messages[0].cache_control"),
        (RESPONSES, {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        *(
            (CHAT, {"messages": [{**USER, name: value}]}, f"messages[0].{name}")
            for name, value in (
                ("id", "msg_1"),
                ("timestamp", 17),
                ("reasoning_details", [{}]),
                ("provider_specific_fields", {}),
                ("prefix", True),
                ("annotations", [{}]),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_hint_is_a_warning(app: Any, path: str, fields: dict[str, Any], named: str, stream: bool) -> None:
    """In the answer, or in the first chunk or event of a stream."""
    answer = ask(app, "POST", path, json_body={**BODIES[path], **fields, "stream": stream})
    assert answer.status == 200, answer.body
    if path == RESPONSES:
        body = answer.named_events[0]["response"] if stream else answer.json
    else:
        body = answer.events[0] if stream else answer.json

    [warning] = body["warnings"]
    assert f"'{named}'" in warning


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, {"mirostat": 2}),
        (CHAT, {"store_it": True}),
        (CHAT, {"messages": [{**USER, "audio": {"id": "a"}}]}),
        ("/v1/messages/count_tokens", {"model": "fake", "store": True}),
    ],
    ids=str,
)
def test_fields_with_an_effect_stay_errors(app: Any, path: str, field: dict[str, Any]) -> None:
    """Other samplers, unknown fields of the body, content; and routes whose answers have no warnings."""
    assert ask(app, "POST", path, json_body={**BODIES[CHAT], **field}).status == 400
