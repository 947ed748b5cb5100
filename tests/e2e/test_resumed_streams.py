"""A stream that ended in the middle goes on at another server: at every token, with the same deltas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.serving import serving

MESSAGES = [{"role": "user", "content": "Tell me about wine 葡萄酒 é"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SEEDED = {"seed": 5, "temperature": 1.2}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "year": {"type": "integer"}},
    "required": ["name", "year"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "pour", "parameters": SCHEMA}}
CUSTOM = {"type": "custom", "custom": {"name": "say", "format": {"type": "text"}}}
ANY_BYTES = {"temperature": 2, "seed": 5, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {"temperature": 0}),
    "seeded": (CHAT, SEEDED),
    "incomplete characters": (TEXT, ANY_BYTES),
    "penalties": (TEXT, {**SEEDED, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "dry_multiplier": 1}),
    "JSON": (
        CHAT,
        {**SEEDED, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "tool": (CHAT, {**SEEDED, "tools": [TOOL], "tool_choice": "required"}),
    "custom tool": (CHAT, {**SEEDED, "tools": [CUSTOM], "tool_choice": "required"}),
    "minimum": (TEXT, {**SEEDED, "min_tokens": 10, "allowed_token_ids": [2, 32, 33, 101, 97]}),
    "stop string": (TEXT, {**SEEDED, "stop": [" a", "e ", "th"], "min_tokens": 8, "include_stop_str_in_output": True}),
    "log-probabilities": (TEXT, {**SEEDED, "logprobs": 2}),
    "chat log-probabilities": (CHAT, {**SEEDED, "logprobs": True, "top_logprobs": 2}),
    "context shifts": (TEXT, {**ANY_BYTES, "prompt": "Wine. " * 50, "overflow": "shift", "max_tokens": 60}),
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        (tmp_path_factory.mktemp("server") / "log").open("w") as errors,
        serving(["--context", "192", "--slots", "2"], errors) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Tell me 葡"}
    return {**prompt, "stream": True, "return_token_ids": True, "max_tokens": 24, **fields}


def chunks(http: httpx.Client, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    asked = {**asked, "stream_options": {"include_usage": True}}
    answer = http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def tokens(parts: list[dict[str, Any]]) -> list[int]:
    return [token for part in parts for choice in part["choices"] for token in choice.get("token_ids", [])]


def combined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client builds from chunks: texts by field, calls without their ids, log-probabilities and the end."""
    fields: dict[str, Any] = {}
    for part in parts:
        for choice in part["choices"]:
            delta = choice.get("delta", {"text": choice.get("text")})
            for call in delta.pop("tool_calls", []):
                details = {**call, **call.get("function", {}), **call.get("custom", {})}
                for name in ("type", "name", "arguments", "input"):
                    _add(fields, f"{call['index']}.{name}", details.get(name))
            for name, value in delta.items():
                _add(fields, name, value)
            for name, values in (choice["logprobs"] or {}).items():
                fields.setdefault(f"logprobs.{name}", []).extend(values or [])
            if choice["finish_reason"]:
                fields |= {"reason": choice["finish_reason"], "stop": choice["stop_reason"]}
    return fields


def _add(fields: dict[str, Any], name: str, value: str | None) -> None:
    if value is not None:
        fields[name] = fields.get(name, "") + value


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_stream_goes_on_at_every_chunk(http: httpx.Client, kind: str) -> None:
    path, fields = REQUESTS[kind]
    asked = body(path, **fields)
    whole = chunks(http, path, asked)
    expected, usage = combined(json.loads(json.dumps(whole))), whole[-1]["usage"]

    assert usage["completion_tokens"] == len(tokens(whole)) >= 8
    assert (kind == "context shifts") == (usage.get("context_shifts", 0) > 0)
    for cut in range(2, len(whole) - 1, 7 if kind == "context shifts" else 1):
        received = whole[:cut]
        rest = chunks(http, path, {**asked, "continue_from": {"tokens": tokens(received)}})

        assert tokens(whole) == tokens(received) + tokens(rest), cut
        assert expected == combined(json.loads(json.dumps(received + rest))), cut
        for count in ("prompt_tokens", "completion_tokens"):
            assert usage[count] == rest[-1]["usage"][count]


def test_the_first_chunk_has_the_seed(http: httpx.Client) -> None:
    """So a client that sends none can go on too."""
    asked = body(CHAT)
    whole = chunks(http, CHAT, asked)
    received = whole[:5]
    again = {**asked, "seed": whole[0]["seed"], "continue_from": {"tokens": tokens(received)}}
    rest = chunks(http, CHAT, again)

    assert tokens(whole) == tokens(received) + tokens(rest)
    assert combined(json.loads(json.dumps(whole))) == combined(received + rest)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_without_a_stream_the_whole_answer_is_returned(http: httpx.Client, path: str) -> None:
    asked = {**body(path, **SEEDED), "stream": False}
    whole = http.post(path, json=asked).json()
    again = http.post(path, json={**asked, "continue_from": {"tokens": whole["choices"][0]["token_ids"][:6]}}).json()

    assert whole["choices"] == again["choices"]
    assert whole["usage"]["completion_tokens"] == again["usage"]["completion_tokens"]


def test_a_complete_answer_ends_at_once(http: httpx.Client) -> None:
    asked = body(TEXT, temperature=0, max_tokens=6)
    whole = chunks(http, TEXT, asked)
    rest = chunks(http, TEXT, {**asked, "continue_from": {"tokens": tokens(whole)}})

    assert [] == tokens(rest)
    assert {"text": "", "reason": "length", "stop": None} == combined(rest)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 1}, "it needs the 'seed'"),
        ({"n": 2}, "several choices"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"echo": True}, "'echo'"),
        ({"prompt_logprobs": 0}, "'prompt_logprobs'"),
        ({"return_progress": True}, "'return_progress'"),
        ({"stream": False, "logprobs": 0}, "log-probabilities of earlier tokens"),
        ({"max_tokens": 2}, "more tokens than the answer"),
        ({"continue_from": {"tokens": [1, 999999]}}, "there is no id 999999"),
    ],
)
def test_what_cannot_be_exact_is_refused(http: httpx.Client, fields: dict[str, Any], reason: str) -> None:
    asked = {**body(TEXT, temperature=0), "continue_from": {"tokens": [65, 66, 67]}, **fields}
    answer = http.post(TEXT, json=asked)

    assert 400 == answer.status_code
    assert reason in answer.json()["error"]["message"]
    assert "continue_from" in answer.text
