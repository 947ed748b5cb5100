"""Prefix cache diagnostics: the reason for computed tokens, and the first message that differs."""

from __future__ import annotations

from typing import Any

import pytest

from engine.types.events import Started, Usage
from server.app import create_app
from tests.server.fakes import FakeEngine, ask, finished, settings

TURNS = [
    {"role": "system", "content": "abc"},
    {"role": "user", "content": "def"},
    {"role": "assistant", "content": "-"},
    {"role": "user", "content": "ghi"},
]
# The fake tokenizer writes a byte a token, and a line a message.
LENGTH = len("abc\ndef\n-\nghi\n")


def diagnose(known: int, cached: int, *, parted: bool = False, **fields: Any) -> Any:
    """The diagnostics of an answer, which are the same streamed or not."""
    cost = Usage(LENGTH, 3, cached, matched_tokens=known, diverged=parted)
    engine = FakeEngine(lambda request: [Started(LENGTH, cached, 7), finished(request, usage=cost)])
    app = create_app(engine, settings())  # type: ignore[arg-type]
    body = {"messages": TURNS, "return_cache_diagnostics": True, **fields}
    whole = ask(app, "POST", "/v1/chat/completions", json_body=body).json
    events = ask(app, "POST", "/v1/chat/completions", json_body={**body, "stream": True}).events
    events_with_diagnostics = [
        event for event in events if isinstance(event, dict) and "prompt_cache_diagnostics" in event
    ]

    assert ([[]], [whole["prompt_cache_diagnostics"]]) == (
        [event["choices"] for event in events_with_diagnostics],
        [event["prompt_cache_diagnostics"] for event in events_with_diagnostics],
    )
    return whole["prompt_cache_diagnostics"]


@pytest.mark.parametrize(
    ("known", "cached", "parted", "fields", "reason", "token", "message"),
    [
        (LENGTH - 1, LENGTH - 1, False, {}, None, None, None),
        (0, LENGTH - 1, False, {}, None, None, None),
        (0, 0, False, {}, "unknown", 0, 0),
        (6, 6, True, {}, "diverged", 6, 1),
        (6, 6, False, {}, "ended", 6, 1),
        (9, 6, True, {}, "unreachable", 9, 2),
        (LENGTH - 1, 6, False, {}, "unreachable", None, None),
        # It waited for another request, which went on differently.
        (4, 11, False, {}, "diverged", 11, 3),
        (0, 0, False, {"cache_prompt": False}, "bypassed", None, None),
        (0, 0, False, {"prompt_cache_options": {"mode": "explicit"}}, "bypassed", None, None),
        (6, 6, False, {"prompt_logprobs": 0}, "scored", None, None),
    ],
)
def test_each_cache_miss_has_a_reason(
    known: int,
    cached: int,
    parted: bool,
    fields: dict[str, Any],
    reason: str | None,
    token: int | None,
    message: int | None,
) -> None:
    """None if all of the prompt was cached that can be."""
    assert {
        "cached_tokens": cached,
        "missed_tokens": LENGTH - cached,
        "reason": reason,
        "first_divergent_token": token,
        "first_divergent_message": message,
    } == diagnose(known, cached, parted=parted, **fields)


@pytest.mark.parametrize(("token", "message"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2), (10, 3), (12, 3)])
def test_tokens_belong_to_messages(token: int, message: int) -> None:
    """From the start of a message's text to the start of the next one's."""
    assert message == diagnose(token, token, parted=True)["first_divergent_message"]
