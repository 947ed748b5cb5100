"""POST /v1/decisions: prompts, probabilities from label log-probabilities, and errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.types.events import Delta, Event, Logprob, Started, TokenLogprob
from engine.types.request import Request
from server.app import create_app
from server.schemas.decisions import Decision
from server.scoring.labels import LabelScorer
from tests.server.fakes import INFO, Answer, FakeEngine, FakeTokenizer, ask, finished, settings

PREDICATE = {"type": "predicate", "instructions": "It is black."}
ROOMY = replace(INFO, context=65536)


def believing(weights: Mapping[str, float]) -> Any:
    """A script with fixed label probabilities, 1/1000 for other labels."""

    def script(request: Request) -> Iterator[Event]:
        labels = tuple(
            Logprob(token, "", b"", math.log(weights.get(chr(token), 0.001))) for token in request.label_tokens
        )
        yield Started(len(request.prompt), 2, 7)
        yield Delta("", (0,), (TokenLogprob(Logprob(0, "", b"", -1.0), (), labels),))
        usage = replace(finished(request).usage, completion_tokens=1, cached_tokens=2)
        yield finished(request, reason="length", usage=usage)

    return script


def engine(weights: Mapping[str, float] | None = None, **fields: Any) -> FakeEngine:
    return FakeEngine(believing(weights or {}), info_value=ROOMY, **fields)


def post(using: FakeEngine | None = None, *questions: Any, **fields: Any) -> Answer:
    body = {"model": "fake", "input": "The cat is black.", "questions": list(questions or (PREDICATE,)), **fields}
    return ask(create_app(using or engine(), settings()), "POST", "/v1/decisions", json_body=body)  # type: ignore[arg-type]


# For refused requests: an app takes longer to create than to call.
IDLE = engine()
APP = create_app(IDLE, settings())  # type: ignore[arg-type]


def choice(count: int, **fields: Any) -> dict[str, Any]:
    choices = [{"value": f"v{at}"} for at in range(count)]
    return {"type": "choice", "instructions": "Which?", "choices": choices, **fields}


def read(using: FakeEngine, at: int = 0) -> str:
    """The prompt text of request number `at`."""
    return bytes(using.requests[at].prompt).decode()


def test_response_has_every_field() -> None:
    """Three kinds of questions in one request, answered in order."""
    weights = {"y": 0.6, "e": 1.0, "s": 1.0, "n": 0.2, "o": 1.0, "A": 0.1, "B": 0.3, "0": 0.25, "1": 0.25, "2": 0.5}
    score = {"type": "score", "instructions": "How dark?", "levels": [{"label": label} for label in "abc"]}
    two = choice(2, name="which", choices=[{"value": "x", "description": "a letter"}, {"value": True}])
    answer = post(engine(weights), PREDICATE, two, score).json
    usage = answer.pop("usage")

    assert {
        "model": "fake",
        "answers": [
            {"type": "predicate", "name": None, "probability": 0.75},
            {
                "type": "choice",
                "name": "which",
                "choice": True,
                "confidence": 0.3,
                "probabilities": [{"value": "x", "probability": 0.25}, {"value": True, "probability": 0.75}],
            },
            {
                "type": "score",
                "name": None,
                "score": 1.25,
                "confidence": 0.5,
                "probabilities": [
                    {"label": "a", "probability": 0.25, "value": 0},
                    {"label": "b", "probability": 0.25, "value": 1},
                    {"label": "c", "probability": 0.5, "value": 2},
                ],
            },
        ],
    } == answer
    assert {"cached_tokens", "cache_write_tokens"} == set(usage["input_tokens_details"])
    assert usage["input_tokens"] == sum(usage["input_tokens_details"].values())
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    TypeAdapter(Decision).validate_python({**answer, "usage": usage}, strict=True, extra="forbid")


def test_requests_have_one_greedy_token() -> None:
    """It is generated only to get log-probabilities."""
    using = engine()
    post(using, choice(3))
    (request,) = using.requests

    assert (1, 0, True, tuple(b"ABC")) == (
        request.max_tokens,
        request.logprobs,
        request.ignore_eos,
        request.label_tokens,
    )
    assert 0.0 == request.sampling.temperature


def test_all_prompts_begin_with_the_input() -> None:
    """Thus it is computed once; the question, its labelled options and the instruction follow."""
    using = engine()
    post(using, choice(2, choices=[{"value": "x", "description": "a letter"}, {"value": False}]), choice(3))

    start = "Read the input, then answer the question about it.\n\n<input>\nThe cat is black.\n</input>\n\n"
    assert read(using, 0) == (
        start + "Question: Which?\nA: x - a letter\nB: false\nAnswer with the letter of one option only.\n"
    )
    assert read(using, 1).startswith(start + "Question: Which?\nA: v0\nB: v1\nC: v2\n")


@pytest.mark.parametrize(("count", "requests"), [(26, 1), (27, 1 + 2), (255, 1 + 10)])
def test_many_options_have_labels_of_two_letters(count: int, requests: int) -> None:
    """One request per shared first token, not per option."""
    weights = {chr(65 + at): 1 / 26 for at in range(26)}
    using = engine(weights)
    answer = post(using, choice(count)).json["answers"][0]

    assert requests == len(using.requests)
    assert [f"v{at}" for at in range(count)] == [each["value"] for each in answer["probabilities"]]
    assert {float(f"{1 / count:.4g}")} == {each["probability"] for each in answer["probabilities"]}
    expected = 1 / 26 if count == 26 else 1 / 26**2
    assert pytest.approx(expected, rel=1e-3) == answer["confidence"]


def test_label_probability_is_the_product_of_its_tokens() -> None:
    scorer = LabelScorer((1, 2), ((7,), (8, 9), (8, 10, 11)))
    label_tokens = {(1, 2): (7, 8), (1, 2, 8): (9, 10), (1, 2, 8, 10): (11,)}

    assert label_tokens == {request.prompt: request.label_tokens for request in scorer.requests("x")}


def test_scales_of_more_than_ten_levels_have_letters() -> None:
    """Up to ten levels, the label is the level's number."""
    for count, first, kind in ((10, "0: l0", "number"), (11, "A: l0", "letter"), (27, "AA: l0", "letters")):
        using = engine()
        levels = [{"label": f"l{at}"} for at in range(count)]
        post(using, {"type": "score", "instructions": "How?", "levels": levels})

        assert f"Question: How?\n{first}\n" in read(using)
        assert f"Answer with the {kind} of one option only." in read(using)


def test_reasoning_is_skipped() -> None:
    """Open reasoning is closed; reasoning that the model would begin is opened and closed in the prompt."""
    for opened, skipped in (("<think>", [255]), ("", [254, 255]), ("<think></think>", [])):
        using = engine(tokenizer=FakeTokenizer("{{enable_thinking}}<think></think>", opened))
        post(using)
        rendered = f"{using.tokenizer.rendered[0]['messages'][0]['content']}\n".encode()

        assert [*rendered, *skipped] == list(using.requests[0].prompt)
        assert {"enable_thinking": False} == using.tokenizer.rendered[0]["arguments"]


def test_items_are_rendered_as_a_transcript() -> None:
    """Messages, calls and results in order; texts and JSON data."""
    text, output_text = {"type": "input_text", "text": "Hi"}, {"type": "output_text", "text": "Yes"}
    items = [
        {"role": "system", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [text, {"type": "input_json", "data": {"a": [1]}}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "files"}]},
        {"role": "assistant", "content": [output_text, {"type": "refusal", "refusal": "no"}]},
    ]
    using = engine()
    post(using, input=items)

    expected = (
        '[system]\nBe kind.\n\n[user]\nHi\n{"a":[1]}\n\n[call of look]\n{}\n\n[answer of look]\nseen\n\n'
        "[call of run]\nls\n\n[answer of run]\nfiles\n\n[assistant]\nYes\nno"
    )
    assert f"<input>\n{expected}\n</input>" in read(using)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"questions": []}, "invalid_value", "questions"),
        ({"questions": [PREDICATE] * 401}, "invalid_value", "questions"),
        ({"questions": [{"type": "guess", "instructions": "x"}]}, "invalid_value", "questions[0]"),
        ({"questions": [choice(1)]}, "invalid_value", "questions[0].choices"),
        ({"questions": [choice(256)]}, "invalid_value", "questions[0].choices"),
        ({"questions": [choice(2, choices=[{"value": "a"}] * 2)]}, "invalid_value", "questions[0].choices"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": "x" * 70000}, "context_length_exceeded", "input"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "invalid_value",
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "x"}]},
            "invalid_value",
            "input[0].arguments",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "unsupported_value",
            "input[0].content[0]",
        ),
        ({"nonsense": 1}, "unknown_parameter", "nonsense"),
        ({"model": "other"}, "model_not_found", "model"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], code: str, param: str) -> None:
    """No request is run."""
    answer = ask(APP, "POST", "/v1/decisions", json_body={"input": "x", "questions": [PREDICATE], **fields})

    assert (code, param) == (answer.json["error"]["code"], answer.json["error"]["param"])
    assert [] == IDLE.requests
