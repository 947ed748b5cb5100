"""Several choices per prompt, echoed and scored prompts, and their usage."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from engine.errors import TimeoutTooShort
from engine.types.events import Delta, Event, PrefillProgress, PromptScored, Started, Usage
from engine.types.request import Request
from server.app import create_app
from tests.server.fakes import Answer, FakeEngine, Script, ask, entry, finished, settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}
both = pytest.mark.parametrize("path", [CHAT, TEXT])


def counts(request: Request) -> list[Event]:
    """A script that emits the number of its choice, with a log-probability that grows with it."""
    choice = int(request.id.rsplit("-", 1)[-1]) if "-" in request.id[9:] else 0
    token_logprob = entry(choice, str(choice), 1)
    logprob = -1.0 / (choice + 1)
    likely = type(token_logprob)(type(token_logprob.chosen)(choice, str(choice), b"x", logprob), token_logprob.top)
    cost = Usage(len(request.prompt), 1, len(request.prompt) - 1 if choice else 0)
    scored = PromptScored(request.prompt, (None, *(entry(token, chr(token), 2) for token in request.prompt[1:])))
    return [
        Started(len(request.prompt), 0, 0),
        *([scored] if request.score_from is not None else []),
        *(
            []
            if request.max_tokens == 0
            else [Delta(str(choice), (choice,), () if request.logprobs is None else (likely,))]
        ),
        finished(request, usage=cost),
    ]


@functools.cache
def bench() -> tuple[FakeEngine, Any]:
    """One server for all tests of this file; each test sets the engine's script."""
    engine = FakeEngine()
    return engine, create_app(engine, settings())  # type: ignore[arg-type]


def post(path: str, script: Script = counts, **fields: Any) -> Answer:
    engine, app = bench()
    engine.script = script
    engine.requests.clear()
    return ask(app, "POST", path, json_body={**BODIES[path], **fields})


def requests() -> list[Request]:
    """The engine requests of the latest body."""
    return bench()[0].requests


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@both
def test_choices_are_requests_of_one_prompt(path: str) -> None:
    """Each has its own id and, if a seed is given, its own seed."""
    answer = post(path, n=3, seed=2**63 - 1).json

    assert ["0", "1", "2"] == [text_of(choice) for choice in answer["choices"]]
    assert [0, 1, 2] == [choice["index"] for choice in answer["choices"]]
    assert [2**63 - 1, -(2**63), -(2**63) + 1] == [request.sampling.seed for request in requests()]
    assert 1 == len({request.prompt for request in requests()})
    assert 3 == len({request.id for request in requests()})


@both
def test_without_seed_no_choice_has_one(path: str) -> None:
    post(path, n=2)

    assert [None, None] == [request.sampling.seed for request in requests()]


@both
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_tokens_count_once(path: str, stream: bool) -> None:
    """The first choice computes the prompt; completion tokens add up."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = post(path, n=3, **options)
    body = answer.events[-2] if stream else answer.json

    prompt = len(b"hi\n" if path == CHAT else b"hi")
    assert (prompt, 3, prompt + 3) == tuple(
        body["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    assert {"cached_tokens": 0, "cache_write_tokens": prompt} == body["usage"]["prompt_tokens_details"]
    assert "timings" not in body


def test_prompts_and_choices_multiply() -> None:
    """The choices of the first prompt come first; each prompt's tokens count once."""
    answer = post(TEXT, prompt=["a", "bc"], n=2).json

    assert [0, 1, 2, 3] == [choice["index"] for choice in answer["choices"]]
    assert (3, 4) == (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])


def test_best_of_returns_the_likeliest_choices() -> None:
    """By mean log-probability, which need not be returned."""
    answer = post(TEXT, n=2, best_of=4).json

    assert ["3", "2"] == [choice["text"] for choice in answer["choices"]]
    assert [None, None] == [choice["logprobs"] for choice in answer["choices"]]
    assert 4 == answer["usage"]["completion_tokens"]


@both
def test_more_choices_than_slots_and_queue_are_refused(path: str) -> None:
    """Not a 429: a retry would not help."""
    app = create_app(FakeEngine(counts), settings(max_waiting=1))  # type: ignore[arg-type]

    fits = ask(app, "POST", path, json_body={**BODIES[path], "n": 5})
    not_ever = ask(app, "POST", path, json_body={**BODIES[path], "n": 6})

    assert (200, 400, "n") == (fits.status, not_ever.status, not_ever.json["error"]["param"])


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_prompt_comes_first_with_its_logprobs(stream: bool) -> None:
    """The first token has none; offsets count from the start of the prompt, as lm-eval expects."""
    answer = post(TEXT, prompt="abc", echo=True, logprobs=1, stream=stream)
    choices = (
        [choice for event in answer.events[:-1] for choice in event["choices"]] if stream else answer.json["choices"]
    )
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]

    def joined(name: str) -> list[Any]:
        return [value for one in logprobs for value in one[name]]

    assert "abc0" == "".join(choice["text"] for choice in choices)
    assert ["a", "b", "c", "0"] == joined("tokens")
    assert [None, -0.5, -0.5, -1.0] == joined("token_logprobs")
    assert [0, 1, 2, 3] == joined("text_offset")
    assert [None, {"<0>": -1.0, "b": -0.5}] == joined("top_logprobs")[:2]


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_echoes_its_prompt(stream: bool) -> None:
    """Token ids as text, before the answer, in every choice of every prompt, with or without log-probabilities."""
    for logprobs, scored in ((None, None), (0, None), (None, 1), (0, 1)):
        fields = {"prompt": [[97, 98], [99]], "n": 2, "echo": True, "logprobs": logprobs, "stream": stream}
        answer = post(TEXT, **fields, prompt_logprobs=scored)
        choices = (
            [part for event in answer.events[:-1] for part in event["choices"]] if stream else answer.json["choices"]
        )

        texts = ["".join(part["text"] for part in choices if part["index"] == index) for index in range(4)]
        assert ["ab0", "ab1", "c0", "c1"] == texts
        if logprobs is not None:
            tokens = [
                token
                for part in choices
                if part["index"] == 1 and part["logprobs"]
                for token in part["logprobs"]["tokens"]
            ]
            assert ["a", "b", "1"] == tokens


def test_prompt_may_be_scored_without_an_answer() -> None:
    """By max_tokens 0."""
    refused = post(TEXT, prompt="abc", max_tokens=0)
    answer = post(TEXT, prompt="abc", echo=True, logprobs=1, max_tokens=0).json["choices"][0]

    assert (0, 0) == (requests()[0].max_tokens, requests()[0].score_from)
    assert ("abc", ["a", "b", "c"]) == (answer["text"], answer["logprobs"]["tokens"])
    assert (400, "max_tokens") == (refused.status, refused.json["error"]["param"])


@both
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_have_vllms_format(path: str, stream: bool) -> None:
    """Null for the first token, then the token itself and the top tokens, with their ranks."""
    answer = post(path, prompt_logprobs=1, stream=stream)
    if stream:
        bodies = [event if path == CHAT else event["choices"][0] for event in answer.events[:-1]]
        (reply,) = [body["prompt_logprobs"] for body in bodies if "prompt_logprobs" in body]
    else:
        body = answer.json
        reply = (body if path == CHAT else body["choices"][0])["prompt_logprobs"]

    assert reply[0] is None
    assert {
        "105": {"logprob": -0.5, "rank": None, "decoded_token": "i"},
        "100": {"logprob": -1.0, "rank": 1, "decoded_token": "<0>"},
    } == reply[1]


def test_requested_tokens_are_in_place_of_the_top_tokens() -> None:
    """As in vLLM: beside the sampled token; none are requested by an empty list. Impossible tokens have -9999."""

    def script(request: Request) -> list[Event]:
        token_logprob = entry(0, "a", 1)
        labels = tuple(type(token_logprob.chosen)(token, chr(token), b"x", -math.inf) for token in request.label_tokens)
        return [
            Delta(
                "a",
                (0,),
                (type(token_logprob)(token_logprob.chosen, token_logprob.top, labels),),
            ),
            finished(request),
        ]

    chat = post(CHAT, script, logprobs=True, top_logprobs=1, logprob_token_ids=[65]).json
    text = post(TEXT, script, logprobs=1, logprob_token_ids=[65]).json
    empty = post(CHAT, script, logprobs=True, top_logprobs=1, logprob_token_ids=[]).json

    def top(answer: Any) -> list[tuple[str, float]]:
        entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return [(one["token"], one["logprob"]) for one in entries]

    assert [("a", -0.5), ("A", -9999.0)] == top(chat)
    assert {"a": -0.5, "A": -9999.0} == text["choices"][0]["logprobs"]["top_logprobs"][0]
    assert [("<0>", -9999.0)] == top(empty)


@both
def test_token_ids_are_returned_streamed_or_not(path: str) -> None:
    """Prompt ids once, ids of the answer with its text."""
    whole = post(path, return_token_ids=True).json
    events = post(path, return_token_ids=True, stream=True).events[:-1]

    prompt = list(b"hi\n" if path == CHAT else b"hi")
    reply = [(event if path == CHAT else event["choices"][0]).get("prompt_token_ids") for event in events]
    assert prompt == (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"]
    assert [prompt, *[None] * (len(events) - 1)] == reply
    assert [0] == whole["choices"][0]["token_ids"]
    assert [0] == [token for event in events for part in event["choices"] for token in part.get("token_ids", [])]


@both
def test_token_ids_include_the_end_token(path: str) -> None:
    """Every finish chunk has the field."""

    def script(request: Request) -> list[Event]:
        return [Delta("x", (1,)), finished(request, usage=Usage(2, 2, 0), tokens=(7,))]

    whole = post(path, script, return_token_ids=True).json
    events = post(path, script, return_token_ids=True, stream=True).events[:-1]
    plain = post(path, return_token_ids=True, stream=True).events[:-1]

    assert [1, 7] == whole["choices"][0]["token_ids"]
    assert whole["usage"]["completion_tokens"] == len(whole["choices"][0]["token_ids"])
    assert [[1], [7]] == [part["token_ids"] for event in events for part in event["choices"] if "token_ids" in part]
    assert [] == plain[-1]["choices"][0]["token_ids"]


@both
def test_continuous_usage_counts_emitted_tokens(path: str) -> None:
    """None before the first text, all in the finish chunk."""

    def script(request: Request) -> list[Event]:
        return [Delta("x", (1,)), Delta("y", (2,)), finished(request, usage=Usage(2, 3, 0), tokens=(7,))]

    asked = {"include_usage": True, "continuous_usage_stats": True}
    echoed = {"echo": True} if path == TEXT else {}
    events = post(path, script, stream=True, stream_options=asked, **echoed).events[:-1]

    counts = [event["usage"]["completion_tokens"] for event in events]
    assert [0, 1, 2, 3, 3] == counts


@both
def test_prefill_progress_precedes_the_answer(path: str) -> None:
    """Computed and cached tokens of the prompt."""

    def script(request: Request) -> list[Event]:
        return [Started(9, 4, 0), PrefillProgress(6, 9), PrefillProgress(9, 9), Delta("x", (1,)), finished(request)]

    events = post(path, script, stream=True, return_progress=True).events[:-1]

    reply = [event["prompt_progress"] for event in events[:2]]
    assert [(9, 4, 6), (9, 4, 9)] == [(one["total"], one["cache"], one["processed"]) for one in reply]
    assert all("prompt_progress" not in event for event in events[2:])


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_that_is_too_short_is_a_full_queue(path: str, stream: bool) -> None:
    """Before the status line, with the time by which it is too short."""
    app = create_app(FakeEngine(refusal=TimeoutTooShort(2.0, 9.5)), settings())  # type: ignore[arg-type]
    answer = ask(app, "POST", path, json_body={**BODIES[path], "timeout": 2, "stream": stream})

    error = answer.json["error"]
    assert (answer.status, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
    assert error["message"] == "The first token takes at least 9.5 s, longer than the timeout of 2 s."
    assert 8 <= int(answer.headers["retry-after"]) <= 12


@both
def test_timeout_before_the_first_token_is_a_408(path: str) -> None:
    """Clients must not retry it; with a partial answer the finish reason is "deadline"."""

    def late(request: Request) -> list[Event]:
        return [finished(request, reason="length", stop="deadline", usage=Usage(2, 0, 0))]

    def partly(request: Request) -> list[Event]:
        return [Delta("x", (1,)), finished(request, reason="length", stop="deadline", usage=Usage(2, 1, 0))]

    nothing, part = post(path, late, timeout=1), post(path, partly, timeout=1)

    error = nothing.json["error"]
    assert (408, "deadline_exceeded", "timeout") == (nothing.status, error["code"], error["param"])
    assert "false" == nothing.headers["x-should-retry"]
    choice = part.json["choices"][0]
    assert (200, "length", "deadline") == (part.status, choice["finish_reason"], choice["stop_reason"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 65}, "n"),
        (TEXT, {"n": 3, "best_of": 2}, "best_of"),
        (TEXT, {"best_of": 2, "stream": True}, "best_of"),
        (TEXT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (CHAT, {"logprob_token_ids": [300], "logprobs": True}, "logprob_token_ids"),
        (CHAT, {"allowed_token_ids": [300]}, "allowed_token_ids"),
        (CHAT, {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        (CHAT, {"priority": 1, "service_tier": "flex"}, "priority"),
        (CHAT, {"service_tier": "scale"}, "service_tier"),
        (CHAT, {"keep": 1, "n_keep": 2}, "n_keep"),
        # Half of the context, which is 64, is the most that a shift spares.
        (CHAT, {"keep": 33, "overflow": "shift"}, "keep"),
        (TEXT, {"n_keep": 33, "overflow": "shift"}, "n_keep"),
        (CHAT, {"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
        (CHAT, {"return_progress": True}, "return_progress"),
        (CHAT, {"timings_per_token": True}, "timings_per_token"),
        (CHAT, {"timeout": 0}, "timeout"),
        (TEXT, {"suffix": "x"}, "suffix"),
        (TEXT, {"tools": [{}]}, "tools"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_contradictory_parameters_are_named(path: str, fields: dict[str, Any], param: str) -> None:
    answer = post(path, **fields)

    assert (400, param) == (answer.status, answer.json["error"]["param"])


@pytest.mark.parametrize("fields", [{"keep": 32, "overflow": "shift"}, {"keep": 33}])
def test_keep_up_to_half_of_the_context_is_accepted(fields: dict[str, Any]) -> None:
    """Any number without context shifts."""
    assert 200 == post(CHAT, **fields).status
