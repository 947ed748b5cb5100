"""Parameters without effect for a model are accepted, with a warning if the response format has a field for it."""

from __future__ import annotations

from typing import Any

import pytest

from server.app import create_app
from tests.server.fakes import HERMES, Answer, FakeEngine, FakeTokenizer, ask, settings

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    RESPONSES: {"input": "hi"},
    ANTHROPIC: {"messages": MESSAGES, "model": "fake", "max_tokens": 5},
    "/api/chat": {"messages": MESSAGES, "model": "fake"},
    "/api/generate": {"prompt": "hi", "model": "fake"},
}
# No reasoning; reasoning without a switch.
PLAIN, ALWAYS = "", "<think></think>"


def post(path: str, template: str = PLAIN, **fields: Any) -> Answer:
    app = create_app(FakeEngine(tokenizer=FakeTokenizer(template)), settings())  # type: ignore[arg-type]
    return ask(app, "POST", path, json_body={**BODIES[path], **fields})


@pytest.mark.parametrize(
    ("template", "fields", "warned"),
    [
        (PLAIN, {"reasoning_effort": "none"}, []),
        (PLAIN, {"reasoning_effort": "high"}, ["'reasoning_effort'"]),
        (PLAIN, {"thinking_token_budget": 0}, []),
        (PLAIN, {"thinking_token_budget": 9}, ["'thinking_token_budget'"]),
        (PLAIN, {"thinking_budget_tokens": 9}, ["'thinking_budget_tokens'"]),
        (PLAIN, {"reasoning_effort": "low", "thinking_token_budget": 9}, ["'reasoning_effort'", "'thinking_"]),
        (ALWAYS, {"reasoning_effort": "none"}, ["'reasoning_effort'"]),
        (HERMES, {"reasoning_effort": "none"}, []),
        (HERMES, {"reasoning_effort": "high", "thinking_token_budget": 9}, []),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ignored_reasoning_parameters_are_accepted_with_warnings(
    template: str, fields: dict[str, Any], warned: list[str], stream: bool
) -> None:
    """No warning if the model behaves as requested anyway."""
    answer = post(CHAT, template, stream=stream, **fields)

    assert 200 == answer.status
    reported = (answer.events[0] if stream else answer.json).get("warnings", [])
    assert [True] * len(warned) == [name in warning for name, warning in zip(warned, reported, strict=True)]


def test_other_apis_accept_ignored_parameters() -> None:
    """Responses have warnings; Anthropic's and Ollama's formats have no field for them."""
    reported = [post(RESPONSES, reasoning={"effort": effort}).json.get("warnings", []) for effort in ("none", "high")]

    assert [0, 1] == [len(warnings) for warnings in reported]
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}):
        assert 200 == post(ANTHROPIC, thinking=thinking, output_config={"effort": "high"}).status
    for path in ("/api/chat", "/api/generate"):
        assert 200 == post(path, think=False).status


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("think", [True, "high"])
def test_ollama_refuses_think_without_reasoning(path: str, think: object) -> None:
    """As Ollama does, by the capabilities in /api/show."""
    refused, accepted = post(path, think=think), post(path, HERMES, think=think)

    assert (400, 200) == (refused.status, accepted.status)
    assert "'think'" in refused.json["error"]
