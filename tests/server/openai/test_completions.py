"""POST /v1/completions, line by line of the wire contract."""

from __future__ import annotations

import functools
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
from tests.server.openai.test_chat import TIMINGS, USAGE, without


@functools.cache
def plain() -> tuple[FakeEngine, Any]:
    """A server whose engine says three words, for whoever does not look at the engine."""
    engine = FakeEngine()
    return engine, create_app(engine, settings())  # type: ignore[arg-type]


def complete(engine: FakeEngine | None = None, **fields: Any) -> Answer:
    app = plain()[1] if engine is None else create_app(engine, settings())  # type: ignore[arg-type]
    return ask(app, "POST", "/v1/completions", json_body={"model": "fake", "prompt": "abc", **fields})


def name(request: Request) -> list[Event]:
    """A script that says its own prompt."""
    return [Delta(bytes(request.prompt).decode(), request.prompt), finished(request)]


def test_an_answer_in_one_piece_has_every_field_of_the_contract() -> None:
    """The whole body is fixed but for id, created and fingerprint."""
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


def test_a_stream_is_text_end_done() -> None:
    """Every chunk has the object of the answer; the last one an empty text and the reason."""
    events = complete(stream=True).events

    assert ["Hello", " wor", "ld", ""] == [event["choices"][0]["text"] for event in events[:-1]]
    assert [None, None, None, "stop"] == [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert {"text_completion"} == {event["object"] for event in events[:-1]}
    assert "[DONE]" == events[-1]


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for() -> None:
    """Every earlier chunk then has usage null; the last has no choices."""
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
    """A string, strings, token ids, lists of token ids; each prompt is a request of its own."""
    engine = FakeEngine()

    answer = complete(engine, prompt=prompt)

    assert expected == [request.prompt for request in engine.requests]
    assert list(range(len(expected))) == [choice["index"] for choice in answer.json["choices"]]


def test_several_prompts_are_choices_in_order_and_cost_together() -> None:
    """The choices follow the prompts, whoever ends first; usage is the sum."""
    answer = complete(FakeEngine(name), prompt=["one", "three"]).json

    assert ["one", "three"] == [choice["text"] for choice in answer["choices"]]
    assert (8, 6, 14) == tuple(answer["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens"))
    assert "timings" not in answer


def test_streams_of_several_prompts_interleave_by_index() -> None:
    """A prompt that waits does not hold the other back."""
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
    """A place in a script that opens another gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    async def wait(self) -> None:
        self.gate.open()


def test_all_prompts_are_admitted_or_none() -> None:
    """When the queue takes one prompt but not the next, the first is cancelled and the answer is 429."""
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


def test_one_broken_prompt_breaks_the_answer() -> None:
    """An answer is whole or an error; the other prompts are cancelled."""

    def script(request: Request) -> list[Event]:
        return [Failed("broken")] if request.id.endswith("-1") else [Delta("x", (1,)), finished(request)]

    engine = FakeEngine(script)
    answer = complete(engine, prompt=["a", "b", "c"])

    assert 500 == answer.status
    assert set() == engine.running


def test_logprobs_have_the_shape_of_completions() -> None:
    """Four lists of one length; offsets count characters; the chosen token is among the likeliest."""
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


def test_offsets_of_characters_in_several_tokens_are_their_beginnings() -> None:
    """Each byte of a character names the place of the character: in the prompt, and in the answer behind it."""
    pieces = [b"a", b"\xe4", b"\xb8", b"\x96", b" b"]
    parts = [Logprob(at, raw.decode(errors="replace"), raw, -0.5) for at, raw in enumerate(pieces)]

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


def test_offsets_go_on_through_the_chunks_of_a_stream() -> None:
    """The lists of all chunks together are those of the answer in one piece."""
    whole = complete(logprobs=1).json["choices"][0]["logprobs"]
    chunks = [event["choices"][0]["logprobs"] for event in complete(logprobs=1, stream=True).events[:-2]]

    assert whole == {key: [item for chunk in chunks for item in chunk[key]] for key in whole}


def test_token_ids_that_the_model_lacks_are_refused() -> None:
    """An id at the size of the vocabulary is answered 400 and reaches no engine."""
    engine = FakeEngine()

    answer = complete(engine, prompt=[1, 256])

    assert 400 == answer.status
    assert ("prompt", "invalid_value") == (answer.json["error"]["param"], answer.json["error"]["code"])
    assert [] == engine.requests


def test_cached_tokens_are_counted() -> None:
    """usage and timings say how much of the prompt was found in the cache."""

    def script(request: Request) -> list[Event]:
        return [finished(request, usage=Usage(3, 3, 2))]

    answer = complete(FakeEngine(script)).json

    assert {"cached_tokens": 2, "cache_write_tokens": 1} == answer["usage"]["prompt_tokens_details"]
    assert (2, 1) == (answer["timings"]["cache_n"], answer["timings"]["prompt_n"])


def test_what_is_sent_fits_the_published_types() -> None:
    """Answer and chunks validate against the shapes in /openapi.json, with nothing left over."""
    whole = complete(logprobs=1, metadata={"a": "b"}).json
    chunks = complete(logprobs=1, stream=True, stream_options={"include_usage": True}).events[:-1]

    for body in (whole, *chunks):
        TypeAdapter(Completion).validate_python(body, strict=True, extra="forbid")


def test_the_token_that_ended_a_text_has_a_log_probability() -> None:
    """It is counted, so it is listed, behind those of the text: lm-evaluation-harness drops the last entry."""

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


def test_rules_that_leave_nothing_to_say_are_the_clients_fault() -> None:
    """The same request would end the same way, so no client shall try it again."""
    engine = FakeEngine(lambda request: [Failed("no token is left", caused_by_request=True)])

    answer = complete(engine)

    assert (400, "unsatisfiable") == (answer.status, answer.json["error"]["code"])
