"""POST /v1/chat/completions, line by line of the wire contract."""

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
    """A server whose engine says three words, for whoever does not look at the engine."""
    engine = FakeEngine()
    return engine, create_app(engine, settings())  # type: ignore[arg-type]


def chat(engine: FakeEngine | None = None, **fields: Any) -> Answer:
    app = plain()[1] if engine is None else create_app(engine, settings())  # type: ignore[arg-type]
    return ask(app, "POST", "/v1/chat/completions", json_body={**BODY, **fields})


def sent(**fields: Any) -> Request:
    """The engine's request that the body becomes."""
    answer = chat(**fields)
    assert answer.status == 200, answer.body
    return plain()[0].requests[-1]


def without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name not in names}


def test_an_answer_in_one_piece_has_every_field_of_the_contract() -> None:
    """The whole body is fixed but for id, created and fingerprint."""
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


def test_ids_look_as_clients_expect() -> None:
    """An id starts with chatcmpl-, the fingerprint with fp_, and two answers of one server share the latter."""
    engine = FakeEngine()

    first, second = chat(engine).json, chat(engine).json

    assert first["id"].startswith("chatcmpl-")
    assert first["id"] != second["id"]
    assert first["system_fingerprint"].startswith("fp_")
    assert first["system_fingerprint"] == second["system_fingerprint"]


def test_the_model_is_echoed_under_the_name_that_was_asked_for() -> None:
    """An alias is answered as the alias, no name as the main one."""
    assert "org/alias" == chat(model="org/alias").json["model"]
    assert "fake" == chat(model=None).json["model"]


def test_a_stream_is_role_text_end_done() -> None:
    """The role comes once, in the first chunk; the finish chunk has an empty delta; then [DONE]."""
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


def test_all_chunks_of_a_stream_share_their_frame() -> None:
    """id, created, model, object and fingerprint are the same in every chunk, and no usage is there unasked."""
    events = chat(stream=True).events[:-1]

    frames = [without(event, "choices", "timings") for event in events]
    assert [frames[0]] * len(events) == frames
    assert {"id", "created", "model", "object", "system_fingerprint", "service_tier"} == frames[0].keys()
    assert "chat.completion.chunk" == frames[0]["object"]
    assert TIMINGS == events[-1]["timings"]


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for() -> None:
    """Every earlier chunk then has usage null; the last has no choices."""
    events = chat(stream=True, stream_options={"include_usage": True}).events[:-1]

    assert [None] * 5 + [USAGE] == [event["usage"] for event in events]
    assert [] == events[-1]["choices"]
    assert TIMINGS == events[-1]["timings"]


def test_the_chunks_of_a_stream_add_up_to_the_answer_in_one_piece() -> None:
    """Text, logprobs, finish reason and usage are equal either way."""
    asked = {"logprobs": True, "top_logprobs": 2}
    whole = chat(**asked).json
    chunks = chat(stream=True, stream_options={"include_usage": True}, **asked).events[:-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]

    text = "".join(choice["delta"].get("content", "") for choice in choices)
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["choices"][0]["logprobs"]["content"] == logprobs
    assert whole["usage"] == chunks[-1]["usage"]


def test_logprobs_have_the_shape_of_chat() -> None:
    """One entry a token with bytes and alternatives, and -9999 for what cannot be."""
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
    """logprobs alone asks for those of the chosen tokens."""
    engine = FakeEngine()

    answer = chat(engine, logprobs=True)

    assert 0 == engine.requests[0].logprobs
    assert [] == answer.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"]


@pytest.mark.parametrize("stop", ["</s>", 7, None])
def test_the_stop_that_ended_an_answer_is_named(stop: str | int | None) -> None:
    """stop_reason is the string or token of the request that was met, in both forms of the answer."""

    def script(request: Request) -> list[Event]:
        return [Started(1, 0, 0), Delta("a", (1,)), finished(request, stop=stop)]

    whole = chat(FakeEngine(script)).json["choices"][0]
    last = chat(FakeEngine(script), stream=True).events[-2]["choices"][0]

    assert stop == whole["stop_reason"]
    assert stop == last["stop_reason"]


def test_shifts_are_reported_when_there_were_any() -> None:
    """context_shifts and shifted_tokens appear in usage only when the context was shifted."""

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


def test_an_answer_without_text_still_has_its_role_and_its_end() -> None:
    """A stream of no delta is role, finish, [DONE]."""
    events = chat(FakeEngine(lambda request: [finished(request)]), stream=True).events

    assert [{"role": "assistant", "content": ""}, {}] == [event["choices"][0]["delta"] for event in events[:-1]]


def test_metadata_is_echoed() -> None:
    """metadata comes back as it was, and is absent when it was not sent."""
    assert {"run": "7"} == chat(metadata={"run": "7"}).json["metadata"]
    assert "metadata" not in chat().json


def test_a_generation_that_breaks_is_a_500() -> None:
    """A Failed event of the engine is answered 500 with the reason, not as an empty answer."""
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
    """What the body says about sampling and stopping is what the engine is told."""
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


def test_messages_reach_the_template_plain() -> None:
    """Parts become one string, developer the system role, and empty fields of an echoed answer vanish."""
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
    """continue_final_message leaves the turn open and adds no new one."""
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
    } == rendered


def test_what_is_sent_fits_the_published_types() -> None:
    """Answer and chunks validate against the shapes in /openapi.json, with nothing left over."""
    asked = {"logprobs": True, "top_logprobs": 1, "metadata": {"a": "b"}}
    whole = chat(**asked).json
    chunks = chat(stream=True, stream_options={"include_usage": True}, **asked).events[:-1]

    TypeAdapter(ChatCompletion).validate_python(whole, strict=True, extra="forbid")
    for chunk in chunks:
        TypeAdapter(ChatChunk).validate_python(chunk, strict=True, extra="forbid")


def test_a_larger_budget_than_the_context_is_refused_unless_it_shifts() -> None:
    """max_tokens beyond the context cannot be met by ending with length, but by shifting it can."""
    assert 400 == chat(max_tokens=65).status
    assert 200 == chat(max_tokens=64).status
    assert 200 == chat(max_tokens=65, overflow="shift").status


def test_a_slow_merge_of_deltas_keeps_the_text() -> None:
    """A delta of several tokens is one chunk."""

    def script(request: Request) -> list[Event]:
        end = finished(request)
        assert isinstance(end, Finished)
        return [Delta("".join(WORDS), (0, 1, 2)), replace(end, reason="length")]

    events = chat(FakeEngine(script), stream=True).events

    assert "Hello world" == events[1]["choices"][0]["delta"]["content"]


def test_how_a_prompt_is_shared_and_shifted_reaches_the_engine() -> None:
    """A salt is handed on as its digest; without one, and without a choice for states, the defaults hold."""
    salted = sent(cache_salt="tenant", overflow="shift", recurrent_shift="carry")
    plain = sent(cache_salt=None, recurrent_shift=None)

    assert (hashlib.sha256(b"tenant").digest(), "carry") == (salted.salt, salted.recurrent_shift)
    assert (b"", "rebuild") == (plain.salt, plain.recurrent_shift)


def test_breakpoints_reach_the_template_as_places() -> None:
    """Each is the end of its part, counted in letters of the content as it is joined."""
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


def test_the_latest_breakpoints_count() -> None:
    """As OpenAI has it, four of a request: each costs a rendering, and 2,000 of them took half a minute."""
    engine = FakeEngine()
    part = {"type": "text", "text": "", "prompt_cache_breakpoint": {"mode": "explicit"}}

    assert 200 == chat(engine, messages=[{"role": "user", "content": [part] * 60}]).status
    assert ((0, 56), (0, 57), (0, 58), (0, 59)) == engine.tokenizer.rendered[0]["breakpoints"]


def test_an_explicit_cache_without_breakpoints_is_none() -> None:
    """As OpenAI has it; nothing is found under a salt that nobody else has, not even by the same request."""
    explicit = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}

    first, second, implicit = sent(**explicit), sent(**explicit), sent(prompt_cache_options={"mode": "implicit"})

    assert first.salt != second.salt
    assert b"" == implicit.salt


@pytest.mark.parametrize("arguments", ["", "no JSON", "[1]", '{"a": NaN}', "[" * 900 + "]" * 900, '{"a": 1, "a": 2}'])
def test_arguments_that_are_no_strict_object_stay_text(arguments: str) -> None:
    """A model may have written anything, and the template gets it as it is."""
    engine = FakeEngine()
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    chat(engine, messages=[*BODY["messages"], {"role": "assistant", "tool_calls": [call]}])

    assert arguments == engine.tokenizer.rendered[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
