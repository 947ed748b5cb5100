"""Responses that begin with the first output tokens of a stored one, on the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

INPUT = "Tell me about wine 葡萄酒 é"
SEEDED = {"temperature": 1.2, "top_k": 40, "seed": 5, "max_output_tokens": 24}
TOOL = {
    "type": "function",
    "name": "pour",
    "parameters": {
        "type": "object",
        "properties": {"wine": {"type": "string", "maxLength": 6}},
        "required": ["wine"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def http(bundled_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=bundled_url, timeout=60) as client:
        yield client


def respond(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post("/v1/responses", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def content(response: Any) -> list[tuple[Any, ...]]:
    """The output without ids."""
    return [
        (item["type"], item["status"], [part["text"] for part in item.get("content") or ()], item.get("arguments"))
        for item in response["output"]
    ]


def text(response: Any) -> str:
    return "".join(part for _, _, parts, _ in content(response) for part in parts)


def fork(http: httpx.Client, response: Any, count: int, **fields: Any) -> Any:
    return respond(http, continue_from={"response_id": response["id"], "token_count": count}, **fields)


@pytest.mark.parametrize("sampler", [SEEDED, {"temperature": 0, "max_output_tokens": 24}])
def test_with_the_same_sampler_a_fork_is_the_original(http: httpx.Client, sampler: dict[str, Any]) -> None:
    """From the first token to the last, inside characters too."""
    whole = respond(http, input=INPUT, instructions="Be brief.", metadata={"a": "b"}, **sampler)
    tokens = whole["usage"]["output_tokens"]
    assert tokens >= 8

    for count in (0, 1, 2, 5, 6, 7, tokens - 1, tokens):
        forked = fork(http, whole, count, **sampler)

        assert content(forked) == content(whole), count
        assert forked["status"] == whole["status"]
        assert forked["usage"]["output_tokens"] == tokens
        assert forked["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert (forked["instructions"], forked["metadata"]) == ("Be brief.", {})


def test_another_seed_shares_text_and_cells_before_the_fork(http: httpx.Client) -> None:
    whole = respond(http, input=INPUT, **SEEDED)
    first = fork(http, whole, 8, **{**SEEDED, "max_output_tokens": 8})
    forks = [fork(http, whole, 8, **{**SEEDED, "seed": seed}) for seed in range(4)]

    assert first["status"] == "incomplete"
    assert all(text(forked).startswith(text(first).rstrip("\ufffd")) for forked in forks)
    assert len({text(forked) for forked in forks}) == 4
    usages = [forked["usage"] for forked in forks]
    assert all(use["input_tokens_details"]["cached_tokens"] >= use["input_tokens"] - 1 for use in usages)


def test_a_fork_can_be_forked_streamed_and_continued(http: httpx.Client) -> None:
    before = respond(http, input="Hello", **SEEDED)
    whole = respond(http, input=INPUT, previous_response_id=before["id"], **SEEDED)
    other = fork(http, whole, 6, **{**SEEDED, "seed": 9})

    assert other["previous_response_id"] == before["id"]
    assert content(fork(http, other, 10, **{**SEEDED, "seed": 9})) == content(other)
    events = http.post(
        "/v1/responses",
        json={"continue_from": {"response_id": whole["id"], "token_count": 6}, "stream": True, **SEEDED, "seed": 9},
    ).text
    assert "event: response.output_text.delta" in events
    assert text(other).splitlines()[-1] in events
    items = http.get(f"/v1/responses/{other['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    following = respond(http, input="And?", previous_response_id=other["id"], temperature=0, max_output_tokens=4)
    assert following["usage"]["input_tokens"] > other["usage"]["input_tokens"]


def test_another_message_may_follow_the_first_tokens(http: httpx.Client) -> None:
    """As if its text had been sent as items."""
    greedy = {"temperature": 0, "max_output_tokens": 12}
    whole = respond(http, input=INPUT, **greedy)
    first = fork(http, whole, 6, temperature=0, max_output_tokens=6)
    forked = fork(http, whole, 6, input="Shorter, please.", **greedy)
    sent = [
        {"role": "user", "content": INPUT},
        {"role": "assistant", "content": text(first)},
        {"role": "user", "content": "Shorter, please."},
    ]

    assert content(forked) == content(respond(http, input=sent, **greedy))
    assert forked["usage"]["input_tokens_details"]["cached_tokens"] >= whole["usage"]["input_tokens"] - 1
    items = http.get(f"/v1/responses/{forked['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [(item["role"], item["status"]) for item in items] == [
        ("user", "completed"),
        ("assistant", "incomplete"),
        ("user", "completed"),
    ]


def test_another_result_of_a_tool_may_follow_its_call(http: httpx.Client) -> None:
    whole = respond(http, input=INPUT, tools=[TOOL], tool_choice="required", temperature=0)
    call = whole["output"][-1]
    assert call["type"] == "function_call"
    tokens = whole["usage"]["output_tokens"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "poured"}
    greedy: dict[str, Any] = {"input": [result], "temperature": 0, "max_output_tokens": 8}
    forked = fork(http, whole, tokens, **greedy)

    assert content(forked) == content(
        respond(http, previous_response_id=whole["id"], tools=[TOOL], tool_choice="required", **greedy)
    )
    before_the_call = {"response_id": whole["id"], "token_count": 0}
    refused = http.post("/v1/responses", json={"continue_from": before_the_call, **greedy})
    assert refused.status_code == 400
    assert "no tool call found" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"token_count": 999}, 400, "the response has 6 output tokens"),
        ({"token_count": -1}, 400, "continue_from"),
        ({"response_id": "resp_none"}, 404, "not found"),
        ({"instructions": "Be brief."}, 400, "that of the stored response"),
        ({"previous_response_id": "resp_none"}, 400, "that of the stored response"),
        ({"max_output_tokens": 2}, 400, "has 3 tokens already"),
        ({"top_logprobs": 2}, 400, "log-probabilities of earlier tokens"),
        ({"include": ["message.output_text.logprobs"]}, 400, "log-probabilities of earlier tokens"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    http: httpx.Client, fields: dict[str, Any], status: int, reason: str
) -> None:
    whole = respond(http, input=INPUT, temperature=0, max_output_tokens=6)
    point = {"response_id": whole["id"], "token_count": 3}
    point |= {name: fields[name] for name in point if name in fields}
    rest = {name: value for name, value in fields.items() if name not in point}
    answer = http.post("/v1/responses", json={"continue_from": point, **rest})

    assert answer.status_code == status
    assert reason in answer.text


def test_a_response_that_is_not_stored_cannot_be_continued(http: httpx.Client) -> None:
    whole = respond(http, input=INPUT, store=False, max_output_tokens=4)
    point = {"response_id": whole["id"], "token_count": 1}

    assert http.post("/v1/responses", json={"continue_from": point}).status_code == 404
    assert "output_tokens" not in whole


def test_a_message_after_half_a_tool_call_is_answered_or_refused(http: httpx.Client) -> None:
    whole = respond(http, input=INPUT, tools=[TOOL], tool_choice="required", temperature=0)
    answers = [
        http.post(
            "/v1/responses",
            json={
                "continue_from": {"response_id": whole["id"], "token_count": count},
                "input": "Go on.",
                "max_output_tokens": 2,
            },
        )
        for count in range(0, whole["usage"]["output_tokens"] + 1, 4)
    ]

    assert {answer.status_code for answer in answers} <= {200, 400}
    assert answers[0].status_code == 200
