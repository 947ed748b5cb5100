"""POST /v1/completions: responses, streams, and prompts of all forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.errors import Overloaded
from engine.types.events import Delta, Event, Failed, Logprob, PromptScored, Started, TokenLogprob, Usage
from engine.types.request import Request
from server.app import create_app
from server.schemas.completions import Completion
from tests.server.fakes import Answer, FakeEngine, Gate, ask, entry, finished, settings
from tests.server.openai.test_chat import TIMINGS, USAGE, plain, without


def complete(engine: FakeEngine | None = None, **fields: Any) -> Answer:
    app = plain()[1] if engine is None else create_app(engine, settings())  # type: ignore[arg-type]
    return ask(app, "POST", "/v1/completions", json_body={"model": "fake", "prompt": "abc", **fields})


def name(request: Request) -> list[Event]:
    """A script that emits its own prompt."""
    return [Delta(bytes(request.prompt).decode(), request.prompt), finished(request)]


def test_response_has_every_field() -> None:
    """All of them are fixed, except id, created and fingerprint."""
    answer = complete().json

    assert answer["id"].startswith("cmpl-")
    assert {
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": USAGE,
        "service_tier": "default",
        "timings": TIMINGS,
    } == without(answer, "id", "created", "system_fingerprint")


def test_stream_is_text_finish_done() -> None:
    """The last chunk has an empty text and the finish reason."""
    events = complete(stream=True).events

    assert ["Hello", " wor", "ld", ""] == [event["choices"][0]["text"] for event in events[:-1]]
    assert [None, None, None, "stop"] == [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert {"text_completion"} == {event["object"] for event in events[:-1]}
    assert "[DONE]" == events[-1]


def test_include_usage_adds_a_usage_chunk() -> None:
    """It is the last one, without choices; usage is null in all others."""
    events = complete(stream=True, stream_options={"include_usage": True}).events[:-1]

    assert [None] * 4 + [USAGE] == [event["usage"] for event in events]
    assert [] == events[-1]["choices"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        (["a", "bc"], [(97,), (98, 99)]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
def test_a_prompt_has_four_forms(prompt: object, expected: list[tuple[int, ...]]) -> None:
    """A string, strings, token ids, lists of token ids; each prompt is one engine request."""
    engine = FakeEngine()

    answer = complete(engine, prompt=prompt)

    assert expected == [request.prompt for request in engine.requests]
    assert list(range(len(expected))) == [choice["index"] for choice in answer.json["choices"]]


def test_several_prompts_are_choices_in_order() -> None:
    """In the order of the prompts, whichever ends first; usage is the sum."""
    answer = complete(FakeEngine(name), prompt=["one", "three"]).json

    assert ["one", "three"] == [choice["text"] for choice in answer["choices"]]
    assert (8, 6, 14) == tuple(answer["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens"))
    assert "timings" not in answer


def test_streams_of_several_prompts_interleave_by_index() -> None:
    """A waiting prompt does not delay the others."""
    gate = Gate()

    def script(request: Request) -> list[Event | Gate]:
        end = finished(request)
        if request.id.endswith("-0"):
            return [Delta("slow ", (1,)), gate, Delta("end", (2,)), end]
        return [Delta("quick", (1,)), end, _Opens(gate)]  # type: ignore[list-item]

    events = complete(FakeEngine(script), prompt=["a", "b"], stream=True).events[:-1]

    texts = [(event["choices"][0]["index"], event["choices"][0]["text"]) for event in events]
    assert texts.index((1, "quick")) < texts.index((0, "end"))
    assert "slow end" == "".join(text for index, text in texts if index == 0)


class _Opens(Gate):
    """An element of a script that opens another gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    async def wait(self) -> None:
        self.gate.open()


def test_all_prompts_are_admitted_or_none() -> None:
    """If the queue is full after the first prompt, it is cancelled and the response is 429."""
    engine = FakeEngine()

    def script(request: Request) -> list[Event]:
        raise AssertionError("nothing may run")

    engine.script = script
    plain = engine.open

    def full(request: Request) -> Any:
        if request.id.endswith("-1"):
            raise Overloaded(3, 2.0)
        return plain(request)

    engine.open = full  # type: ignore[method-assign]
    answer = complete(engine, prompt=["a", "b"])

    assert 429 == answer.status
    assert set() == engine.running


def test_failing_prompt_fails_the_response() -> None:
    """The other prompts are cancelled."""

    def script(request: Request) -> list[Event]:
        return [Failed("broken")] if request.id.endswith("-1") else [Delta("x", (1,)), finished(request)]

    engine = FakeEngine(script)
    answer = complete(engine, prompt=["a", "b", "c"])

    assert 500 == answer.status
    assert set() == engine.running


def test_logprobs_have_the_completion_format() -> None:
    """Four lists of one length; offsets count characters; the top tokens include the sampled one."""
    logprobs = complete(logprobs=2).json["choices"][0]["logprobs"]

    assert {
        "tokens": ["Hello", " wor", "ld"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [
            {"<0>": -1.0, "<1>": -9999.0, "Hello": -0.5},
            {"<0>": -1.0, "<1>": -9999.0, " wor": -0.5},
            {"<0>": -1.0, "<1>": -9999.0, "ld": -0.5},
        ],
        "text_offset": [0, 5, 9],
    } == logprobs


def test_offsets_of_partial_characters() -> None:
    """Each byte of a character has the character's offset, in the prompt and in the answer."""
    token_bytes = [b"a", b"\xe4", b"\xb8", b"\x96", b" b"]
    parts = [Logprob(at, raw.decode(errors="replace"), raw, -0.5) for at, raw in enumerate(token_bytes)]

    def script(request: Request) -> Iterator[Event]:
        yield Started(len(request.prompt), 0, 7)
        yield PromptScored(request.prompt, (None, *(TokenLogprob(part, ()) for part in parts)))
        places = zip(parts, (0, 1, 1, 1, 2), strict=True)
        entries = tuple(TokenLogprob(part, (), text_offset=offset) for part, offset in places)
        yield Delta("a", (0,), entries[:1])
        yield Delta("\u4e16 b", (1, 2, 3, 4), entries[1:])
        yield finished(request, end_logprob=entry(5, "<end>", 1))

    app = create_app(FakeEngine(script), settings())  # type: ignore[arg-type]
    body = {"prompt": "xa\u4e16 b", "logprobs": 0, "echo": True}
    whole = ask(app, "POST", "/v1/completions", json_body=body).json["choices"][0]["logprobs"]["text_offset"]
    chunks = ask(app, "POST", "/v1/completions", json_body={**body, "stream": True}).events[:-1]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]

    assert [0, 1, 2, 2, 2, 3, 5, 6, 6, 6, 7, 9] == whole
    assert whole == [
        offset for choice in choices for offset in (choice["logprobs"] or {"text_offset": []})["text_offset"]
    ]


def test_offsets_continue_across_chunks() -> None:
    """The lists of all chunks concatenate to the lists of the response."""
    whole = complete(logprobs=1).json["choices"][0]["logprobs"]
    chunks = [event["choices"][0]["logprobs"] for event in complete(logprobs=1, stream=True).events[:-2]]

    assert whole == {key: [item for chunk in chunks for item in chunk[key]] for key in whole}


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    """The engine gets no request."""
    engine = FakeEngine()

    answer = complete(engine, prompt=[1, 256])

    assert 400 == answer.status
    assert ("prompt", "invalid_value") == (answer.json["error"]["param"], answer.json["error"]["code"])
    assert [] == engine.requests


def test_cached_tokens_are_counted() -> None:
    """In usage and timings."""

    def script(request: Request) -> list[Event]:
        return [finished(request, usage=Usage(3, 3, 2))]

    answer = complete(FakeEngine(script)).json

    assert {"cached_tokens": 2, "cache_write_tokens": 1} == answer["usage"]["prompt_tokens_details"]
    assert (2, 1) == (answer["timings"]["cache_n"], answer["timings"]["prompt_n"])


def test_responses_match_openapi() -> None:
    """Responses and chunks validate against /openapi.json, without extra fields."""
    whole = complete(logprobs=1, metadata={"a": "b"}).json
    chunks = complete(logprobs=1, stream=True, stream_options={"include_usage": True}).events[:-1]

    for body in (whole, *chunks):
        TypeAdapter(Completion).validate_python(body, strict=True, extra="forbid")


def test_end_token_has_a_log_probability() -> None:
    """After the entries of the text: lm-evaluation-harness drops the last one."""

    def script(request: Request) -> Iterator[Event]:
        yield Started(len(request.prompt), 0, 7)
        yield Delta("Hi", (0,), (entry(0, "Hi", 1),))
        yield finished(request, end_logprob=entry(5, "<end>", 1))

    app = create_app(FakeEngine(script), settings())  # type: ignore[arg-type]
    body = {"prompt": "a", "logprobs": 1}

    whole = ask(app, "POST", "/v1/completions", json_body=body).json["choices"][0]
    chunks = ask(app, "POST", "/v1/completions", json_body={**body, "stream": True}).events[:-1]
    streamed = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]

    assert (["Hi", "<end>"], [0, 2], "Hi") == (
        whole["logprobs"]["tokens"],
        whole["logprobs"]["text_offset"],
        whole["text"],
    )
    assert ["Hi", "<end>"] == streamed


def test_constraints_without_any_token_are_a_client_error() -> None:
    """Clients shall not retry: the same request would fail again."""
    engine = FakeEngine(lambda request: [Failed("no token is left", caused_by_request=True)])

    answer = complete(engine)

    assert (400, "unsatisfiable") == (answer.status, answer.json["error"]["code"])
