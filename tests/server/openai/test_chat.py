"""POST /v1/chat/completions: responses, streams, and the engine requests of a body."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.types.events import Delta, Event, Failed, Finished, Started, Usage
from engine.types.request import Request
from server.app import create_app
from server.schemas.chat import ChatChunk, ChatCompletion
from tests.server.fakes import WORDS, Answer, FakeEngine, ask, finished, settings

BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 3,
    "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 3},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}
TIMINGS = {
    "queue_ms": 500.0,
    "cache_n": 0,
    "prompt_n": 3,
    "prompt_ms": 250.0,
    "prompt_per_token_ms": 83.333,
    "prompt_per_second": 12.0,
    "predicted_n": 3,
    "predicted_ms": 125.0,
    "predicted_per_token_ms": 41.667,
    "predicted_per_second": 24.0,
    "draft_n": 0,
    "draft_n_accepted": 0,
}


@functools.cache
def plain() -> tuple[FakeEngine, Any]:
    """A server that emits three words, for tests without a script."""
    engine = FakeEngine()
    return engine, create_app(engine, settings())  # type: ignore[arg-type]


def chat(engine: FakeEngine | None = None, **fields: Any) -> Answer:
    app = plain()[1] if engine is None else create_app(engine, settings())  # type: ignore[arg-type]
    return ask(app, "POST", "/v1/chat/completions", json_body={**BODY, **fields})


def sent(**fields: Any) -> Request:
    """The engine request of a body."""
    answer = chat(**fields)
    assert answer.status == 200, answer.body
    return plain()[0].requests[-1]


def without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name not in names}


def test_response_has_every_field() -> None:
    """All of them are fixed, except id, created and fingerprint."""
    answer = chat()

    assert 200 == answer.status
    assert "application/json" == answer.headers["content-type"]
    assert {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": USAGE,
        "service_tier": "default",
        "timings": TIMINGS,
    } == without(answer.json, "id", "created", "system_fingerprint")


def test_ids_have_openais_prefixes() -> None:
    """chatcmpl- for ids, fp_ for the fingerprint, which is constant for a server."""
    engine = FakeEngine()

    first, second = chat(engine).json, chat(engine).json

    assert first["id"].startswith("chatcmpl-")
    assert first["id"] != second["id"]
    assert first["system_fingerprint"].startswith("fp_")
    assert first["system_fingerprint"] == second["system_fingerprint"]


def test_response_has_the_requested_model_name() -> None:
    """An alias if one was requested; without a name, the main name."""
    assert "org/alias" == chat(model="org/alias").json["model"]
    assert "fake" == chat(model=None).json["model"]


def test_stream_is_role_text_finish_done() -> None:
    """The role is in the first chunk only; the finish chunk has an empty delta."""
    events = chat(stream=True).events

    assert [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " wor"},
        {"content": "ld"},
        {},
    ] == [event["choices"][0]["delta"] for event in events[:-1]]
    assert [None, None, None, None, "stop"] == [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert "[DONE]" == events[-1]


def test_all_chunks_share_id_and_model() -> None:
    """Also created, object and fingerprint; without include_usage no chunk has usage."""
    events = chat(stream=True).events[:-1]

    frames = [without(event, "choices", "timings") for event in events]
    assert [frames[0]] * len(events) == frames
    assert {"id", "created", "model", "object", "system_fingerprint", "service_tier"} == frames[0].keys()
    assert "chat.completion.chunk" == frames[0]["object"]
    assert TIMINGS == events[-1]["timings"]


def test_include_usage_adds_a_usage_chunk() -> None:
    """It is the last one, without choices; usage is null in all others."""
    events = chat(stream=True, stream_options={"include_usage": True}).events[:-1]

    assert [None] * 5 + [USAGE] == [event["usage"] for event in events]
    assert [] == events[-1]["choices"]
    assert TIMINGS == events[-1]["timings"]


def test_stream_adds_up_to_the_response() -> None:
    """Text, log-probabilities, finish reason and usage."""
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = chat(**fields).json
    chunks = chat(stream=True, stream_options={"include_usage": True}, **fields).events[:-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]

    text = "".join(choice["delta"].get("content", "") for choice in choices)
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["choices"][0]["logprobs"]["content"] == logprobs
    assert whole["usage"] == chunks[-1]["usage"]


def test_logprobs_have_the_chat_format() -> None:
    """One entry per token with bytes and top tokens; -9999 for impossible tokens."""
    logprobs = chat(logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]

    assert 3 == len(logprobs["content"])
    assert {
        "token": "Hello",
        "logprob": -0.5,
        "bytes": [72, 101, 108, 108, 111],
        "top_logprobs": [
            {"token": "<0>", "logprob": -1.0, "bytes": [120]},
            {"token": "<1>", "logprob": -9999.0, "bytes": [120]},
        ],
    } == logprobs["content"][0]
    assert logprobs["refusal"] is None


def test_logprobs_without_alternatives() -> None:
    engine = FakeEngine()

    answer = chat(engine, logprobs=True)

    assert 0 == engine.requests[0].logprobs
    assert [] == answer.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"]


@pytest.mark.parametrize("stop", ["</s>", 7, None])
def test_stop_reason_is_the_matched_stop(stop: str | int | None) -> None:
    """The stop string or token, streamed or not."""

    def script(request: Request) -> list[Event]:
        return [Started(1, 0, 0), Delta("a", (1,)), finished(request, stop=stop)]

    whole = chat(FakeEngine(script)).json["choices"][0]
    last = chat(FakeEngine(script), stream=True).events[-2]["choices"][0]

    assert stop == whole["stop_reason"]
    assert stop == last["stop_reason"]


def test_context_shifts_are_reported_in_usage() -> None:
    """Only if there were any."""

    def script(request: Request) -> list[Event]:
        return [finished(request, reason="length", usage=Usage(3, 3, 2, context_shifts=1, shifted_tokens=20))]

    answer = chat(FakeEngine(script)).json

    assert {
        **USAGE,
        "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 1},
        "context_shifts": 1,
        "shifted_tokens": 20,
    } == answer["usage"]
    assert "length" == answer["choices"][0]["finish_reason"]


def test_empty_answer_has_role_and_finish_chunk() -> None:
    events = chat(FakeEngine(lambda request: [finished(request)]), stream=True).events

    assert [{"role": "assistant", "content": ""}, {}] == [event["choices"][0]["delta"] for event in events[:-1]]


def test_metadata_is_echoed() -> None:
    """Absent if none was sent."""
    assert {"run": "7"} == chat(metadata={"run": "7"}).json["metadata"]
    assert "metadata" not in chat().json


def test_failed_request_is_a_500() -> None:
    """With the reason, instead of an empty answer."""
    answer = chat(FakeEngine(lambda request: [Failed("numbers became NaN")]))

    assert 500 == answer.status
    assert {
        "error": {
            "message": "The generation failed: numbers became NaN",
            "type": "server_error",
            "param": None,
            "code": "generation_failed",
        }
    } == answer.json


def test_every_field_reaches_the_engine() -> None:
    request = sent(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "7": 2.5},
        seed=-3,
        stop="END",
        stop_token_ids=[9],
        ignore_eos=True,
        max_completion_tokens=11,
        overflow="shift",
        keep=4,
    )

    assert (0.5, 0.9, 40, 0.1) == (
        request.sampling.temperature,
        request.sampling.top_p,
        request.sampling.top_k,
        request.sampling.min_p,
    )
    assert (0.2, -0.3, 1.1) == (
        request.sampling.frequency_penalty,
        request.sampling.presence_penalty,
        request.sampling.repetition_penalty,
    )
    assert ((5, -100.0), (7, 2.5)) == request.sampling.logit_bias
    assert (-3, ("END",), (9,), True) == (
        request.sampling.seed,
        request.stop,
        request.stop_token_ids,
        request.ignore_eos,
    )
    assert (11, "shift", 4, None) == (request.max_tokens, request.overflow, request.keep, request.logprobs)


def test_defaults_are_those_of_openai() -> None:
    """Temperature 1, no filter, no penalty, no limit but the context."""
    request = sent(temperature=None, stop=None, top_k=-1)

    assert (1.0, 0, 1.0, 0.0, None) == (
        request.sampling.temperature,
        request.sampling.top_k,
        request.sampling.top_p,
        request.sampling.min_p,
        request.max_tokens,
    )
    assert ((), (), False, None) == (request.stop, request.stop_token_ids, request.ignore_eos, request.overflow)


def test_messages_are_normalised_for_the_template() -> None:
    """Parts are joined, "developer" becomes "system", unset fields of echoed answers are removed."""
    engine = FakeEngine()

    chat(
        engine,
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "audio": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                ],
            },
            {"role": "tool", "content": "4", "tool_call_id": "call_1"},
        ],
    )

    assert [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "call_1"},
    ] == engine.tokenizer.rendered[0]["messages"]


def test_the_last_message_can_be_continued() -> None:
    """continue_final_message adds no generation prompt."""
    engine = FakeEngine()

    chat(
        engine,
        messages=[*BODY["messages"], {"role": "assistant", "content": "Once"}],
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
    )

    rendered = without(engine.tokenizer.rendered[0], "messages")
    assert {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "arguments": {"enable_thinking": False},
        "tools": (),
        "breakpoints": (),
        "uploads": (),
    } == rendered


def test_responses_match_openapi() -> None:
    """Responses and chunks validate against /openapi.json, without extra fields."""
    fields = {"logprobs": True, "top_logprobs": 1, "metadata": {"a": "b"}}
    whole = chat(**fields).json
    chunks = chat(stream=True, stream_options={"include_usage": True}, **fields).events[:-1]

    TypeAdapter(ChatCompletion).validate_python(whole, strict=True, extra="forbid")
    for chunk in chunks:
        TypeAdapter(ChatChunk).validate_python(chunk, strict=True, extra="forbid")


def test_max_tokens_beyond_the_context_is_limited_unless_it_shifts() -> None:
    assert chat(max_tokens=65).json["warnings"]
    assert "warnings" not in chat(max_tokens=64).json
    assert "warnings" not in chat(max_tokens=65, overflow="shift").json


def test_merged_delta_is_one_chunk() -> None:
    """A delta of several tokens keeps its text."""

    def script(request: Request) -> list[Event]:
        end = finished(request)
        assert isinstance(end, Finished)
        return [Delta("".join(WORDS), (0, 1, 2)), replace(end, reason="length")]

    events = chat(FakeEngine(script), stream=True).events

    assert "Hello world" == events[1]["choices"][0]["delta"]["content"]


def test_cache_and_shift_options_reach_the_engine() -> None:
    """The salt as a digest; defaults without them."""
    salted = sent(cache_salt="tenant", overflow="shift", recurrent_shift="carry")
    plain = sent(cache_salt=None, recurrent_shift=None)

    assert (hashlib.sha256(b"tenant").digest(), "carry") == (salted.salt, salted.recurrent_shift)
    assert (b"", "rebuild") == (plain.salt, plain.recurrent_shift)


def test_breakpoints_are_content_offsets() -> None:
    """The end of each marked part, in characters of the joined content."""
    engine = FakeEngine()
    parts = [
        {"type": "text", "text": "abc"},
        {"type": "text", "text": "de", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}},
        {"type": "text", "text": "f", "prompt_cache_breakpoint": {"mode": "explicit"}},
    ]

    answer = chat(engine, messages=[{"role": "system", "content": "x"}, {"role": "user", "content": parts}])

    assert 200 == answer.status
    assert "abc\nde\nf" == engine.tokenizer.rendered[0]["messages"][1]["content"]
    assert ((1, 6), (1, 8)) == engine.tokenizer.rendered[0]["breakpoints"]
    assert b"" == engine.requests[0].salt


def test_only_the_last_breakpoints_are_used() -> None:
    """Four per request, as in OpenAI's API: each costs a rendering."""
    engine = FakeEngine()
    part = {"type": "text", "text": "", "prompt_cache_breakpoint": {"mode": "explicit"}}

    assert 200 == chat(engine, messages=[{"role": "user", "content": [part] * 60}]).status
    assert ((0, 56), (0, 57), (0, 58), (0, 59)) == engine.tokenizer.rendered[0]["breakpoints"]


def test_explicit_cache_without_breakpoints_is_disabled() -> None:
    """As in OpenAI's API: a random salt, which not even the same request finds."""
    explicit = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}

    first, second, implicit = sent(**explicit), sent(**explicit), sent(prompt_cache_options={"mode": "implicit"})

    assert first.salt != second.salt
    assert b"" == implicit.salt


@pytest.mark.parametrize("arguments", ["", "no JSON", "[1]", '{"a": NaN}', "[" * 900 + "]" * 900, '{"a": 1, "a": 2}'])
def test_invalid_arguments_are_rendered_as_text(arguments: str) -> None:
    engine = FakeEngine()
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    chat(engine, messages=[*BODY["messages"], {"role": "assistant", "tool_calls": [call]}])

    assert arguments == engine.tokenizer.rendered[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
