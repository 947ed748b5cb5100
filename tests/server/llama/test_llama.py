"""llama.cpp's own endpoints, with the requests of its editor plugins."""

from __future__ import annotations

from typing import Any

import pytest

from engine.text.fill_in_middle import FillInMiddle
from engine.types.request import Request
from engine.types.snapshot import EngineSnapshot, SequenceCounts, SlotSnapshot
from engine.types.status import Stats
from server.app import create_app
from tests.server.fakes import FakeEngine, ask, finished, settings

# From the sources of ggml-org/llama.vim (autoload/llama.vim) and ggml-org/llama.vscode (src/llama-server.ts).
# The body that is sent while one types.
TYPING = {
    "input_prefix": "a\n",
    "input_suffix": "\nz\n",
    "input_extra": [{"text": "x", "time": [1, 2], "filename": "b.c"}],
    "prompt": "mid",
    "n_predict": 5,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1500,
    "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached", "nothing"],
}
# llama.vscode names fewer fields.
TYPING_IN_VSCODE = {name: value for name, value in TYPING.items() if name != "response_fields"}
# llama.vim's body that fills the cache with other files.
WARMING = {
    "input_prefix": "",
    "input_suffix": "",
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "input_extra": [{"text": "x", "time": [1, 2], "filename": "b.c"}],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}

WARMING_IN_VSCODE = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": [{"text": "x", "time": 1, "filename": "b.c"}],
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
# llama.vscode's request to edit a text, to /v1/chat/completions.
EDITING_IN_VSCODE = {
    "messages": [{"role": "system", "content": "You are an expert coder."}, {"role": "user", "content": "x"}],
    "stream": False,
    "cache_prompt": True,
    "samplers": "edkypmxt",
    "temperature": 0.8,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "repeat_last_n": 64,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "max_tokens": -1,
    "timings_per_token": False,
}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer.fill_in_middle = FillInMiddle(1, 2, 3, (4,))
    return engine


def post(engine: FakeEngine, path: str, body: Any) -> Any:
    return ask(create_app(engine, settings()), "POST", path, json_body=body)  # type: ignore[arg-type]


def test_a_completion_has_the_fields_of_llama_cpp(engine: FakeEngine) -> None:
    answer = post(engine, "/completion", {"prompt": "hi", "n_predict": 3, "seed": -1, "logit_bias": [[5, False]]}).json

    assert ("Hello world", True, 3, 2) == tuple(
        answer[name] for name in ("content", "stop", "tokens_predicted", "tokens_evaluated")
    )
    assert ("hi", "eos", "", "fake") == tuple(
        answer[name] for name in ("prompt", "stop_type", "stopping_word", "model")
    )
    assert 3 == answer["timings"]["predicted_n"] == answer["generation_settings"]["n_predict"]
    assert 0.8 == answer["generation_settings"]["temperature"]
    [request] = engine.requests
    assert (3, None, 40, ((5, -100),)) == (
        request.max_tokens,
        request.sampling.seed,
        request.sampling.top_k,
        request.sampling.logit_bias,
    )


def test_a_stream_has_chunks_and_a_last_one_with_everything(engine: FakeEngine) -> None:
    """Without [DONE], as llama.cpp ends it."""
    chunks = post(engine, "/completion", {"prompt": "hi", "stream": True}).events

    assert ["Hello", " wor", "ld", ""] == [chunk["content"] for chunk in chunks]
    assert [1, 2, 3, 3] == [chunk["tokens_predicted"] for chunk in chunks]
    assert [False, False, False, True] == [chunk["stop"] for chunk in chunks]
    assert ("eos", "hi") == (chunks[-1]["stop_type"], chunks[-1]["prompt"])
    assert "timings" not in chunks[0]


@pytest.mark.parametrize(
    ("end", "kind", "word"),
    [({"reason": "length"}, "limit", ""), ({"stop": "."}, "word", "."), ({"stop": 4}, "eos", "")],
)
def test_the_end_is_named(engine: FakeEngine, end: dict[str, Any], kind: str, word: str) -> None:
    def script(request: Request) -> Any:
        return [finished(request, **end)]

    engine.script = script
    answer = post(engine, "/completion", {"prompt": "hi", "stop": ["."]}).json

    assert (kind, word) == (answer["stop_type"], answer["stopping_word"])


def test_several_prompts_have_an_answer_each(engine: FakeEngine) -> None:
    answers = post(engine, "/completion", {"prompt": [[65], [66, 67]], "n_probs": 2, "return_tokens": True}).json

    assert [(0, "A"), (1, "BC")] == [(answer["index"], answer["prompt"]) for answer in answers]
    assert [0, 1, 2] == answers[0]["tokens"]
    probabilities = answers[1]["completion_probabilities"]
    assert (0, "Hello", -0.5) == tuple(probabilities[0][name] for name in ("id", "token", "logprob"))
    assert [100, 101] == [other["id"] for other in probabilities[0]["top_logprobs"]]


def test_an_editor_gets_the_gap_filled(engine: FakeEngine) -> None:
    answer = post(engine, "/infill", TYPING)

    assert ["content", "timings/prompt_n", "truncated", "tokens_cached"] == [*answer.json]
    assert "Hello world" == answer.json["content"]
    [request] = engine.requests
    text = [*b"\n\n--- snippet ---\n\nx", 1, *b"a\nmid", 2, *b"\nz\n", 3]
    assert (text, 5, (4,)) == ([*request.prompt], request.max_tokens, request.stop_token_ids)
    # Samplers that the request does not list are off.
    assert (1.0, 0.0, 0.99) == (request.sampling.temperature, request.sampling.min_p, request.sampling.top_p)


def test_llama_vscode_gets_the_gap_filled(engine: FakeEngine) -> None:
    answer = post(engine, "/infill", TYPING_IN_VSCODE).json

    # What it reads of an answer.
    assert ("Hello world", False) == (answer["content"], answer["truncated"])
    assert {"prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"} <= {
        *answer["timings"]
    }
    assert isinstance(answer["tokens_cached"], int)


@pytest.mark.parametrize("body", [WARMING, WARMING_IN_VSCODE], ids=["llama.vim", "llama.vscode"])
def test_other_files_are_cached_in_advance(engine: FakeEngine, body: dict[str, Any]) -> None:
    answer = post(engine, "/infill", body)

    assert (200, body is WARMING) == (answer.status, answer.json == {})
    assert [(0, True)] == [(request.max_tokens, request.prefill_only) for request in engine.requests]


def test_llama_vscode_gets_a_text_edited(engine: FakeEngine) -> None:
    answer = post(engine, "/v1/chat/completions", EDITING_IN_VSCODE).json

    assert "Hello world" == answer["choices"][0]["message"]["content"]
    assert "warnings" not in answer


@pytest.mark.parametrize(("samplers", "min_p"), [("kpmt", 0.05), ("kpt", 0.0)])
def test_samplers_have_letters(engine: FakeEngine, samplers: str, min_p: float) -> None:
    post(engine, "/completion", {"prompt": "hi", "samplers": samplers})

    assert [(0.8, 40, min_p)] == [
        (request.sampling.temperature, request.sampling.top_k, request.sampling.min_p) for request in engine.requests
    ]


def test_infill_needs_a_vocabulary_for_it() -> None:
    answer = post(FakeEngine(), "/infill", TYPING)

    assert (400, "unsupported_parameter") == (answer.status, answer.json["error"]["code"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": "x"}, "n_predict"),
        ({"n": 2}, "n"),
        ({"timings_per_token": True}, "timings_per_token"),
        ({"mirostat": 2}, "mirostat"),
        ({"nonsense": 1}, "nonsense"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_invalid_fields_are_named(engine: FakeEngine, fields: dict[str, Any], param: str) -> None:
    answer = post(engine, "/completion", {"prompt": "hi", **fields})

    assert (400, param) == (answer.status, answer.json["error"]["param"])


def test_properties_name_model_context_and_template(engine: FakeEngine) -> None:
    engine.tokenizer.template = "{{ messages }}"
    properties = ask(create_app(engine, settings()), "GET", "/props").json  # type: ignore[arg-type]

    assert (4, "fake", "{{ messages }}") == tuple(
        properties[name] for name in ("total_slots", "model_alias", "chat_template")
    )
    assert 64 == properties["default_generation_settings"]["n_ctx"]


def test_slots_have_no_texts_and_counts_of_the_own_sequences(engine: FakeEngine) -> None:
    """The engine is asked for the state as the key's organisation may see it."""
    counts = SequenceCounts(9, 0, 9, 7, 0, 0, 0, 0, 1.0)
    slots = (SlotSnapshot(0, "free"), SlotSnapshot(1, "other"), SlotSnapshot(2, "decode", counts))
    engine.state = EngineSnapshot(Stats(), 0.0, 64, (), slots, (), ())
    app = create_app(engine, settings(keys=("one", "two")))  # type: ignore[arg-type]

    listed = ask(app, "GET", "/slots", headers={"authorization": "Bearer one"}).json
    ask(app, "GET", "/slots", headers={"authorization": "Bearer two"})

    assert [False, True, True] == [slot["is_processing"] for slot in listed]
    assert [None, None, [{"n_decoded": 7}]] == [slot.get("next_token") for slot in listed]
    assert 2 == len({owner for owner, _ in engine.inspected})
