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


# The forms of DeepSeek and GLM, Anthropic, Qwen, OpenRouter and OpenAI.
SWITCHED_ON: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "adaptive"}},
    {"enable_thinking": True},
    {"reasoning": {"enabled": True}},
    {"reasoning": {"max_tokens": 2000}},
]
SWITCHED_OFF: list[dict[str, Any]] = [
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning_effort": "none"},
]
# Templates with a switch of each name, and with an effort only.
QWEN, DEEPSEEK, HARMONY = (
    f"<think></think>{{{{ {name} }}}}" for name in ("enable_thinking", "thinking", "reasoning_effort")
)


def rendered_arguments(template: str, path: str = CHAT, **fields: Any) -> tuple[dict[str, object], list[str]]:
    """The variables of the chat template, and the warnings."""
    tokenizer = FakeTokenizer(template)
    app = create_app(FakeEngine(tokenizer=tokenizer), settings())  # type: ignore[arg-type]
    answer = ask(app, "POST", path, json_body={**BODIES[path], **fields})
    assert 200 == answer.status, answer.json
    return tokenizer.rendered[-1]["arguments"], answer.json.get("warnings", [])


@pytest.mark.parametrize("fields", SWITCHED_ON, ids=str)
def test_reasoning_is_switched_on_by_every_name(fields: dict[str, Any]) -> None:
    assert ({"enable_thinking": True}, []) == rendered_arguments(QWEN, **fields)
    assert ({"thinking": True}, []) == rendered_arguments(DEEPSEEK, **fields)
    # The effort stays the template's own one.
    assert ({}, []) == rendered_arguments(HARMONY, **fields)


@pytest.mark.parametrize("fields", SWITCHED_OFF, ids=str)
def test_reasoning_is_switched_off_by_every_name(fields: dict[str, Any]) -> None:
    assert ({"enable_thinking": False}, []) == rendered_arguments(QWEN, **fields)
    assert ({"thinking": False}, []) == rendered_arguments(DEEPSEEK, **fields)
    assert ({"reasoning_effort": "none"}, []) == rendered_arguments(HARMONY, **fields)


@pytest.mark.parametrize("fields", [{"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}], ids=str)
def test_an_effort_is_a_switch_and_a_variable(fields: dict[str, Any]) -> None:
    assert ({"enable_thinking": True}, []) == rendered_arguments(QWEN, **fields)
    assert ({"reasoning_effort": "high"}, []) == rendered_arguments(HARMONY, **fields)


def test_variables_of_the_template_have_priority() -> None:
    explicit = {"chat_template_kwargs": {"enable_thinking": False}}

    assert {"enable_thinking": False} == rendered_arguments(QWEN, enable_thinking=True, **explicit)[0]


def test_the_other_apis_use_the_same_switch() -> None:
    """Ollama's `think`, Anthropic's `thinking` and the effort of Responses, for a template of DeepSeek."""
    for path in ("/api/chat", "/api/generate"):
        assert {"thinking": False} == rendered_arguments(DEEPSEEK, path, think=False, stream=False)[0]
    assert {"thinking": True} == rendered_arguments(DEEPSEEK, ANTHROPIC, thinking={"type": "adaptive"})[0]
    assert {"thinking": False} == rendered_arguments(DEEPSEEK, RESPONSES, reasoning={"effort": "none"})[0]


@pytest.mark.parametrize(
    ("template", "fields", "warned"),
    [
        (PLAIN, {"enable_thinking": True}, ["'enable_thinking'"]),
        (PLAIN, {"thinking": {"type": "enabled"}}, ["'thinking.type'"]),
        (PLAIN, {"thinking": {"type": "enabled", "budget_tokens": 9}}, ["'thinking.type'", "'thinking.budget_tokens'"]),
        (PLAIN, {"reasoning": {"effort": "low"}}, ["'reasoning.effort'"]),
        (PLAIN, {"reasoning": {"max_tokens": 9}}, ["'reasoning.max_tokens'"]),
        (PLAIN, {"thinking": {"type": "disabled"}, "reasoning": {"enabled": False}}, []),
        (PLAIN, {"thinking": {"type": "auto"}, "reasoning": {}, "thinking_budget": 9}, ["'thinking_budget'"]),
        (ALWAYS, {"enable_thinking": True}, []),
        (ALWAYS, {"enable_thinking": False}, ["'enable_thinking'"]),
        (QWEN, {"reasoning": {"summary": "concise"}}, ["'reasoning.summary'"]),
        (QWEN, {"thinking": {"type": "enabled", "clear_thinking": False}}, ["'thinking.clear_thinking'"]),
    ],
    ids=str,
)
def test_a_switch_without_effect_is_a_warning(template: str, fields: dict[str, Any], warned: list[str]) -> None:
    _, warnings = rendered_arguments(template, **fields)

    assert [True] * len(warned) == [name in warning for name, warning in zip(warned, warnings, strict=True)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking.type"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"enable_thinking": True, "reasoning": {"effort": "none"}}, "reasoning.effort"),
        ({"thinking_budget": 5, "reasoning": {"max_tokens": 6}}, "reasoning.max_tokens"),
        ({"thinking_token_budget": 5, "thinking_budget_tokens": 6}, "thinking_budget_tokens"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
    ],
    ids=str,
)
def test_switches_that_contradict_each_other_are_named(fields: dict[str, Any], param: str) -> None:
    answer = post(CHAT, QWEN, **fields)

    assert (400, param) == (answer.status, answer.json["error"]["param"])


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_messages_may_be_refused_where_the_template_has_none(role: str) -> None:
    """With --strict-system-role; the template gets them otherwise, and the tokenizer folds them."""
    tokenizer = FakeTokenizer()
    tokenizer.has_system_role = False
    messages = [*MESSAGES, {"role": role, "content": "Be brief."}]
    answers = [
        ask(
            create_app(FakeEngine(tokenizer=tokenizer), settings(strict_system_role=strict)),  # type: ignore[arg-type]
            "POST",
            CHAT,
            json_body={"messages": messages},
        )
        for strict in (False, True)
    ]

    assert [200, 400] == [answer.status for answer in answers]
    error = answers[1].json["error"]
    assert ("unsupported_value", "messages[1].role") == (error["code"], error["param"])
    assert "--strict-system-role" in error["message"]
