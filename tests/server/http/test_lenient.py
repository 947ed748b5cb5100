"""--lenient: unsupported fields are left out with a warning instead of an error."""

from __future__ import annotations

from typing import Any

import pytest

from server.app import create_app
from tests.server.fakes import Answer, FakeEngine, ask, settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi", "haste": 1}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}
both = pytest.mark.parametrize("path", [CHAT, TEXT])


@pytest.fixture(scope="module")
def lenient() -> Any:
    return create_app(FakeEngine(), settings(lenient=True))  # type: ignore[arg-type]


def post(app: Any, path: str, **fields: Any) -> Answer:
    return ask(app, "POST", path, json_body={**BODIES[path], **fields})


@both
def test_unsupported_fields_become_warnings(lenient: Any, path: str) -> None:
    """Documented and unknown fields, in the response and in the first chunk of a stream."""
    asked = {"mirostat": 2, "frobnicate": 1}
    expected = ["This server does not support 'mirostat' yet.", "Unknown parameter: 'frobnicate'."]

    whole = post(lenient, path, **asked).json
    events = post(lenient, path, stream=True, **asked).events[:-1]

    assert sorted(expected) == sorted(whole["warnings"])
    assert sorted(expected) == sorted(events[0]["warnings"])
    assert all("warnings" not in event for event in events[1:])


@both
def test_without_warnings_there_is_no_list(lenient: Any, path: str) -> None:
    assert "warnings" not in post(lenient, path, temperature=0).json
    assert "warnings" not in post(lenient, path, stream=True).events[0]


def test_nested_fields_are_left_out_too(lenient: Any) -> None:
    """By their path."""
    parts = [{"type": "text", "text": "a", "color": "red"}]
    answer = post(lenient, CHAT, messages=[*MESSAGES, {"role": "user", "content": parts}], stream_options=None)

    assert [
        "Unknown parameter: 'messages[0].haste'.",
        "Unknown parameter: 'messages[1].content[0].color'.",
    ] == answer.json["warnings"]


def test_unsupported_abilities_become_warnings(lenient: Any) -> None:
    """Tools, efforts and budgets that this model does not support."""
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"tools": [tool], "reasoning_effort": "low", "verbosity": "low", "thinking_token_budget": 5}

    answer = post(lenient, CHAT, **asked)
    strict = post(create_app(FakeEngine(), settings()), CHAT, **asked)  # type: ignore[arg-type]

    assert 200 == answer.status
    assert len(asked) == len(answer.json["warnings"])
    assert all(any(f"'{name}'" in warning for warning in answer.json["warnings"]) for name in asked)
    assert (400, "unsupported_parameter") == (strict.status, strict.json["error"]["code"])


@both
def test_wrong_values_stay_errors(lenient: Any, path: str) -> None:
    """Also beside an unsupported field."""
    for fields in ({"temperature": 9}, {"temperature": 9, "mirostat": 2}, {"mirostat": 2, "max_tokens": -2}):
        answer = post(lenient, path, **fields)

        assert 400 == answer.status
        assert answer.json["error"]["param"] in fields
        assert "mirostat" != answer.json["error"]["param"]


@both
def test_warnings_are_bounded(lenient: Any, path: str) -> None:
    answer = post(lenient, path, **{f"x{number}": 1 for number in range(5000)})

    assert (200, 32) == (answer.status, len(answer.json["warnings"]))
