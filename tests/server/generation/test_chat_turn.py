"""Streamed and non-streamed answers agree, for any answer and any chunking."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.chat_format.detection import AddedVocabulary, detect_chat_format
from engine.types.events import Delta, Event, Started, Usage
from engine.types.request import Request
from server.app import create_app
from tests.server.fakes import HERMES, FakeEngine, FakeTokenizer, ask, entry, finished, settings

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "listen")
]
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "logprobs": True, "return_token_ids": True}

words = st.text(st.sampled_from('ab {}<>/"\\\n:,é'), max_size=12)
calls = st.builds(
    lambda name, arguments: f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>',
    st.sampled_from(["look", "listen"]),
    st.dictionaries(words, words | st.integers(-9, 9), max_size=2),
)
broken = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '<tool_call>{"name": "look"', "<tool_"])
texts = st.builds(
    lambda reasoning, parts: (f"<think>{reasoning}</think>" if reasoning else "") + "".join(parts),
    words,
    st.lists(words | calls | broken, max_size=4),
)
cuts = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def script_emitting(text: str, sizes: list[int], reason: str) -> Callable[[Request], list[Event]]:
    """A script that emits `text` in deltas of `sizes`, repeated."""

    def script(request: Request) -> list[Event]:
        parts: list[str] = []
        left = text
        while left:
            size = sizes[len(parts) % len(sizes)]
            parts.append(left[:size])
            left = left[size:]
        deltas = [Delta(part, (at,), (entry(at, part, 0),)) for at, part in enumerate(parts)]
        return [Started(1, 0, 0), *deltas, finished(request, reason=reason, usage=Usage(1, len(parts), 0))]

    return script


@pytest.fixture(scope="module")
def bench() -> tuple[FakeEngine, Any]:
    engine = FakeEngine(tokenizer=FakeTokenizer(HERMES))
    return engine, create_app(engine, settings())  # type: ignore[arg-type]


def accumulated(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """One choice as the official client collects it from chunks: texts are concatenated, calls by index."""
    choice: dict[str, Any] = {"calls": {}, "content": "", "reasoning_content": "", "reasoning": "", "role": ""}
    choice.update(logprobs=[], token_ids=[], finish_reason=[], ids=[])
    for part in (part for event in events for part in event["choices"] if part["index"] == index):
        delta = part["delta"]
        for name in ("role", "content", "reasoning_content", "reasoning"):
            choice[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            known = choice["calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
            known["id"] += call.get("id", "")
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
        choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
        choice["token_ids"] += part.get("token_ids", [])
        choice["finish_reason"] += [part["finish_reason"]] if part["finish_reason"] else []
    return choice


@hypothesis_settings(max_examples=60, deadline=None)
@given(text=texts, whole_cuts=cuts, stream_cuts=cuts, reason=st.sampled_from(["stop", "length"]))
def test_stream_adds_up_to_the_response(
    bench: tuple[FakeEngine, Any], text: str, whole_cuts: list[int], stream_cuts: list[int], reason: str
) -> None:
    """Text, reasoning, calls and finish reason for any chunking; log-probabilities for the same chunking."""
    engine, app = bench
    engine.script = script_emitting(text, whole_cuts, reason)
    whole = ask(app, "POST", "/v1/chat/completions", json_body=BODY).json["choices"][0]
    same_cuts = ask(app, "POST", "/v1/chat/completions", json_body={**BODY, "stream": True}).events[:-1]
    engine.script = script_emitting(text, stream_cuts, reason)
    other = ask(app, "POST", "/v1/chat/completions", json_body={**BODY, "stream": True, "n": 2}).events[:-1]

    message = whole["message"]
    expected = [{**call["function"]} for call in message.get("tool_calls", ())]
    for choice in (accumulated(same_cuts, 0), accumulated(other, 0), accumulated(other, 1)):
        assert "assistant" == choice["role"]
        assert (message["content"] or "") == choice["content"]
        assert message.get("reasoning_content", "") == choice["reasoning_content"] == choice["reasoning"]
        assert expected == [{"name": call["name"], "arguments": call["arguments"]} for call in choice["calls"].values()]
        assert all(call["id"].startswith("call_") for call in choice["calls"].values())
        assert list(range(len(expected))) == list(choice["calls"])
        assert [whole["finish_reason"]] == choice["finish_reason"]
    assert whole["logprobs"]["content"] == accumulated(same_cuts, 0)["logprobs"]
    assert whole["token_ids"] == accumulated(same_cuts, 0)["token_ids"]


@hypothesis_settings(max_examples=60, deadline=None)
@given(text=texts, sizes=cuts)
def test_content_is_null_only_with_tool_calls(bench: tuple[FakeEngine, Any], text: str, sizes: list[int]) -> None:
    """The finish reason is "tool_calls" exactly if there are calls."""
    engine, app = bench
    engine.script = script_emitting(text, sizes, "stop")

    choice = ask(app, "POST", "/v1/chat/completions", json_body=BODY).json["choices"][0]

    calls = choice["message"].get("tool_calls", [])
    assert ("tool_calls" if calls else "stop") == choice["finish_reason"]
    assert (choice["message"]["content"] is None) <= bool(calls)
    assert len(calls) == len({call["id"] for call in calls})


def test_reasoning_tokens_include_the_marker(bench: tuple[FakeEngine, Any]) -> None:
    """They are part of the completion tokens; mixed deltas are divided by characters."""
    engine, app = bench
    engine.script = lambda request: [
        Delta("<think>", (1,)),
        Delta("abc", (2, 3)),
        Delta("d</think>e", (4, 5, 6, 7)),
        Delta("f", (8,)),
        finished(request, usage=Usage(1, 8, 0)),
    ]

    answer = ask(app, "POST", "/v1/chat/completions", json_body=BODY).json
    events = ask(
        app,
        "POST",
        "/v1/chat/completions",
        json_body={**BODY, "stream": True, "stream_options": {"include_usage": True}},
    ).events

    assert ("abcd", "ef") == (
        answer["choices"][0]["message"]["reasoning_content"],
        answer["choices"][0]["message"]["content"],
    )
    for body in (answer, events[-2]):
        assert 5 == body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 8 == body["usage"]["completion_tokens"]


def test_include_reasoning_false_omits_reasoning(bench: tuple[FakeEngine, Any]) -> None:
    """Usage is unchanged."""
    engine, app = bench
    engine.script = script_emitting("<think>abc</think>ok", [4], "stop")

    shown = ask(app, "POST", "/v1/chat/completions", json_body=BODY).json
    hidden = ask(app, "POST", "/v1/chat/completions", json_body={**BODY, "include_reasoning": False}).json

    assert "abc" == shown["choices"][0]["message"]["reasoning_content"]
    assert "ok" == hidden["choices"][0]["message"]["content"]
    assert not {"reasoning_content", "reasoning"} & hidden["choices"][0]["message"].keys()
    assert shown["usage"] == hidden["usage"]


def test_reasoning_opened_by_the_template(bench: tuple[FakeEngine, Any]) -> None:
    """The answer continues the generation prompt."""
    engine = FakeEngine(
        script_emitting("abc</think>ok", [3], "stop"), tokenizer=FakeTokenizer(HERMES, opened="<think>\n")
    )

    app = create_app(engine, settings())  # type: ignore[arg-type]
    message = ask(app, "POST", "/v1/chat/completions", json_body=BODY).json["choices"][0]["message"]

    assert ("abc", "ok") == (message["reasoning_content"], message["content"])


def test_budget_without_start_token_is_refused() -> None:
    """If the opening marker is not one token, the budget is enforceable only if the template opens the reasoning."""
    tokenizer = FakeTokenizer(HERMES)
    tokenizer.chat_format = detect_chat_format(HERMES, AddedVocabulary({}, frozenset(), tokenizer.encode))
    app = create_app(FakeEngine(tokenizer=tokenizer), settings())  # type: ignore[arg-type]
    body = {**BODY, "thinking_token_budget": 5}

    refused = ask(app, "POST", "/v1/chat/completions", json_body=body)
    tokenizer.opened = "<think>"
    begun = ask(app, "POST", "/v1/chat/completions", json_body=body)

    assert (400, "thinking_token_budget") == (refused.status, refused.json["error"]["param"])
    assert 200 == begun.status
