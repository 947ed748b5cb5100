"""Ollama's API: translation of requests, lines of a stream, and model names with tags."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.text.fill_in_middle import FillInMiddle
from engine.types.events import Delta, Embedded, Event, Started
from engine.types.request import Request
from server.app import create_app
from server.http.version import version
from server.schemas.ollama import OllamaErrorBody, OllamaLine
from tests.server.fakes import HERMES, Answer, FakeEngine, FakeTokenizer, ask, finished, settings

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def engine_emitting(text: str) -> Any:
    """An engine that emits this text, one character per delta."""

    def script(request: Request) -> Iterator[Event]:
        yield Started(len(request.prompt), 0, 7)
        for letter in text:
            yield Delta(letter, (ord(letter),))
        yield finished(request)

    return FakeEngine(script, tokenizer=FakeTokenizer(HERMES))


def post(engine: Any, path: str, **body: Any) -> Answer:
    return ask(create_app(engine, settings()), "POST", f"/api/{path}", json_body={"model": "fake", **body})


def lines(answer: Answer) -> list[Any]:
    """The lines of a stream."""
    return [json.loads(line) for line in answer.body.splitlines()]


def test_lines_add_up_to_the_response() -> None:
    """Streams are the default."""
    streamed = post(engine_emitting("Hello you"), "chat", messages=MESSAGES)
    whole = post(engine_emitting("Hello you"), "chat", messages=MESSAGES, stream=False).json

    assert "application/x-ndjson" == streamed.headers["content-type"]
    assert "Hello you" == "".join(line["message"]["content"] for line in lines(streamed)) == whole["message"]["content"]
    assert [False] * (len(lines(streamed)) - 1) + [True] == [line["done"] for line in lines(streamed)]
    assert ("stop", 3, True) == (whole["done_reason"], whole["eval_count"], whole["done"])


@pytest.mark.parametrize("kind", ["", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", {"messages": MESSAGES, "stream": False}),
        ("generate", {"prompt": "hi", "stream": False}),
        ("show", {}),
    ],
)
def test_a_body_needs_no_content_type(kind: str, path: str, body: dict[str, object]) -> None:
    """As in Ollama's examples with `curl -d`; a page of another origin is refused."""
    app, sent = create_app(engine_emitting("yes"), settings()), {"model": "fake", **body}
    headers = {"content-type": kind}

    assert 200 == ask(app, "POST", f"/api/{path}", json_body=sent, headers=headers).status
    assert 400 == ask(app, "POST", f"/api/{path}", body=b"model=fake", headers=headers).status
    for origin in ("null", "http://page.example"):
        assert 403 == ask(app, "POST", f"/api/{path}", json_body=sent, headers=headers | {"origin": origin}).status
    assert 415 == ask(app, "POST", f"/api/{path}", json_body=sent, headers={"content-type": "text/plain"}).status


def test_generate_has_a_response_field() -> None:
    """The prompt is rendered as system and user message."""
    engine = engine_emitting("yes")
    whole = post(engine, "generate", prompt="hi", system="be short", stream=False).json

    assert "yes" == whole["response"]
    assert "message" not in whole
    assert ["be short", "hi"] == [message["content"] for message in engine.tokenizer.rendered[-1]["messages"]]


def test_reasoning_and_calls_have_their_fields() -> None:
    """Arguments are an object."""
    answer = post(
        engine_emitting(f"<think>\nhm\n</think>\n\n{CALL}"), "chat", messages=MESSAGES, tools=[TOOL], stream=False
    ).json

    assert ("hm", "") == (answer["message"]["thinking"], answer["message"]["content"])
    assert [("add", {"a": 1})] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in answer["message"]["tool_calls"]
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_call_arguments_are_always_an_object(stream: bool) -> None:
    """A truncated call has its complete members."""
    engine = engine_emitting('<tool_call>\n{"name": "add", "arguments": {"a": 1e999, "b": "x')

    answer = lines(post(engine, "chat", messages=MESSAGES, tools=[TOOL], stream=stream))

    calls = [call for line in answer for call in line["message"].get("tool_calls", [])]
    assert [{"a": sys.float_info.max}] == [call["function"]["arguments"] for call in calls]


def test_tool_results_are_matched_to_calls() -> None:
    """Ollama's results have no id: they belong to the calls in order."""
    engine = engine_emitting("fine")
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_name": "add", "content": "1"},
        {"role": "tool", "tool_name": "add", "content": "2"},
    ]

    post(engine, "chat", messages=history, tools=[TOOL], stream=False)

    rendered = engine.tokenizer.rendered[-1]["messages"]
    assert [call["id"] for call in rendered[1]["tool_calls"]] == [each["tool_call_id"] for each in rendered[2:]]


def test_options_reach_the_engine() -> None:
    engine = engine_emitting("x")
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.25,
        "typical_p": 0.5,
        "repeat_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "seed": 3,
        "stop": ["."],
        "num_predict": 9,
        "num_keep": 2,
        "repeat_last_n": 33,
        "penalize_newline": True,
        "num_ctx": 64,
        "num_gpu": 1,
    }

    post(engine, "chat", messages=MESSAGES, options=options, stream=False)

    request = engine.requests[-1]
    sampling = request.sampling
    assert (0.5, 7, 0.5, 0.25, 0.5) == (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.typical_p,
    )
    assert (1.5, 1, 0.5, 3) == (
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.seed,
    )
    assert 33 == sampling.penalty_lookback
    assert ((".",), 9, 2) == (request.stop, request.max_tokens, request.keep)


@pytest.mark.parametrize(("last", "lookback"), [(None, 64), (-1, None), (0, 0), (7, 7)])
def test_penalties_count_the_last_tokens(last: int | None, lookback: int | None) -> None:
    """64 tokens as in Ollama; -1 counts the whole context."""
    engine = engine_emitting("x")
    post(engine, "chat", messages=MESSAGES, options={"repeat_penalty": 1.5, "repeat_last_n": last}, stream=False)

    assert lookback == engine.requests[-1].sampling.penalty_lookback


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat", {"messages": MESSAGES}), ("generate", {"prompt": "hi"}), ("generate", {"prompt": "hi", "raw": True})],
)
def test_a_larger_num_predict_is_a_warning(path: str, body: dict[str, Any]) -> None:
    """With Ollama's name of the option."""
    answer = post(engine_emitting("x"), path, **body, options={"num_predict": 65}, stream=False)

    assert answer.json["warnings"] == ["'options.num_predict' is 65: the answer ends at the context of 64 tokens."]


@pytest.mark.parametrize(("path", "body"), [("chat", {"messages": MESSAGES}), ("generate", {"prompt": "hi"})])
@pytest.mark.parametrize("stream", [False, True])
def test_a_larger_num_ctx_is_a_warning(path: str, body: dict[str, Any], stream: bool) -> None:
    """The last line has it; a prompt above the server's own context is an error."""
    large = {"options": {"num_ctx": 65}, "stream": stream}
    last = lines(post(engine_emitting("x"), path, **body, **large))[-1]
    long = {"messages": [{"role": "user", "content": "x" * 65}]} if path == "chat" else {"prompt": "x" * 65}
    refused = post(engine_emitting("x"), path, **long, **large)

    assert ["'options.num_ctx' is 65: this server was started with a context of 64 tokens."] == last["warnings"]
    assert "warnings" not in lines(post(engine_emitting("x"), path, **body, options={"num_ctx": 64}))[-1]
    assert 400 == refused.status
    assert "context length is 64 tokens" in refused.json["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(stream: bool) -> None:
    """One entry a token, with the top tokens."""
    for path, body in (("chat", {"messages": MESSAGES}), ("generate", {"prompt": "hi"})):
        answer = lines(post(FakeEngine(), path, **body, logprobs=True, top_logprobs=2, stream=stream))
        entries = [entry for line in answer for entry in line.get("logprobs", [])]

        assert ["Hello", " wor", "ld"] == [entry["token"] for entry in entries]
        assert [-0.5] * 3 == [entry["logprob"] for entry in entries]
        assert [2] * 3 == [len(entry["top_logprobs"]) for entry in entries]
        assert list(b"Hello") == entries[0]["bytes"]


def test_a_raw_prompt_has_no_template() -> None:
    """Reasoning and tool calls are plain text in its answer."""
    engine = engine_emitting("<think>yes</think>")
    answer = post(engine, "generate", prompt="[INST] hi [/INST]", raw=True, logprobs=True, stream=False).json

    assert b"[INST] hi [/INST]" == bytes(engine.requests[-1].prompt)
    assert "<think>yes</think>" == answer["response"]
    assert [] == engine.tokenizer.rendered
    for field, value in (("system", "x"), ("think", True)):
        assert f"'{field}'" in post(engine, "generate", prompt="x", raw=True, **{field: value}).json["error"]


def test_a_suffix_makes_a_prompt_with_a_gap() -> None:
    """Other vocabularies are refused by name."""
    engine = engine_emitting("x")
    refused = post(engine, "generate", prompt="a", suffix="b")
    engine.tokenizer.fill_in_middle = FillInMiddle(1, 2, 3, (4,))
    answer = post(engine, "generate", prompt="a", suffix="b", stream=False)
    only_suffix = post(engine, "generate", suffix="b", stream=False)

    assert (400, True) == (refused.status, "fill-in-the-middle" in refused.json["error"])
    assert [(1, 97, 2, 98, 3), (1, 2, 98, 3)] == [request.prompt for request in engine.requests]
    assert (4,) == engine.requests[0].stop_token_ids
    assert ["x", "x"] == [each.json["response"] for each in (answer, only_suffix)]
    assert "insert" in post(engine, "show").json["capabilities"]


@pytest.mark.parametrize(("shift", "overflow"), [(None, None), (True, "shift"), (False, "length")])
def test_shift_sets_the_overflow(shift: bool | None, overflow: str | None) -> None:
    engine = engine_emitting("x")
    post(engine, "chat", messages=MESSAGES, shift=shift, stream=False)

    assert overflow == engine.requests[-1].overflow


def test_the_model_stays_loaded() -> None:
    """A request to unload it is answered with a warning."""
    for path, body in (("chat", {"messages": []}), ("generate", {})):
        answer = post(engine_emitting("x"), path, **body, keep_alive=0).json
        kept = post(engine_emitting("x"), path, **body, keep_alive="5m").json

        assert ("load", True) == (answer["done_reason"], "keep_alive" in answer["warnings"][0])
        assert "warnings" not in kept


def test_only_the_model_s_own_template_is_accepted() -> None:
    engine = engine_emitting("x")

    assert 200 == post(engine, "generate", prompt="hi", template=HERMES, stream=False).status
    assert "'template'" in post(engine, "generate", prompt="hi", template="{{ .Prompt }}").json["error"]


def test_lenient_servers_warn_of_unsupported_options() -> None:
    app = create_app(engine_emitting("x"), settings(lenient=True))
    body = {"model": "fake", "prompt": "hi", "stream": False, "options": {"mirostat": 1}}

    assert "options.mirostat" in ask(app, "POST", "/api/generate", json_body=body).json["warnings"][0]


@pytest.mark.parametrize(("asked", "kept"), [(-1, None), (0, 0), (5, 5)])
def test_num_keep(asked: int, kept: int | None) -> None:
    """-1 leaves it to the server; 0 is valid."""
    engine = engine_emitting("x")

    assert 200 == post(engine, "chat", messages=MESSAGES, options={"num_keep": asked}, stream=False).status
    assert kept == engine.requests[-1].keep


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_format_sets_a_grammar(form: Any) -> None:
    """Any JSON, or JSON of a schema."""
    engine = engine_emitting("{}")

    post(engine, "chat", messages=MESSAGES, format=form, stream=False)

    assert engine.requests[-1].grammar is not None


@pytest.mark.parametrize(("path", "body"), [("chat", {"messages": []}), ("generate", {"prompt": ""})])
def test_empty_request_loads_the_model(path: str, body: Any) -> None:
    """Clients send it to load a model."""
    engine = engine_emitting("x")

    assert ("load", True) == tuple(post(engine, path, **body).json[key] for key in ("done_reason", "done"))
    assert [] == engine.requests


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_root_answers_the_ollama_command(method: str) -> None:
    assert 200 == ask(create_app(FakeEngine(), settings()), method, "/").status


def test_model_names_may_have_a_tag() -> None:
    """`name:latest` is `name`; other models are 404 in Ollama's format."""
    assert 200 == post(engine_emitting("x"), "chat", model="fake:latest", messages=MESSAGES).status
    unknown = post(engine_emitting("x"), "chat", model="other", messages=MESSAGES)

    assert (404, str) == (unknown.status, type(unknown.json["error"]))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"tfs_z": 0.5}}, "does not support 'options.tfs_z'"),
        (
            {"messages": [{"role": "user", "content": "", "images": ["aGk="]}]},
            "fake reads text only",
        ),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"tools": [{"x": {}}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "function": {"name": "no name"}}]}, "tools[0].function.name"),
    ],
)
def test_unsupported_parameters_are_refused(body: Any, named: str) -> None:
    """No parameter that would change the answer is ignored."""
    answer = post(engine_emitting("x"), "chat", **{"messages": MESSAGES, **body})

    assert 400 == answer.status
    assert named in answer.json["error"]


# The lowest version that each client accepts, by its source.
MINIMUM_VERSIONS = {
    "microsoft/vscode: extensions/copilot/src/extension/byok/vscode-node/ollamaProvider.ts": (0, 6, 4),
    "a desktop application for agents: MINIMUM_OLLAMA_VERSION of its AgentsBetaTab": (0, 14, 2),
}


@pytest.mark.parametrize("client", MINIMUM_VERSIONS)
def test_clients_accept_the_version(client: str) -> None:
    """It is the one of Ollama's API; the server's own is another field."""
    answer = ask(create_app(FakeEngine(), settings()), "GET", "/api/version").json

    # Ollama's 0.14.3 generates images, which this server refuses.
    assert (0, 14, 3) > tuple(map(int, answer["version"].split("."))) >= MINIMUM_VERSIONS[client]
    assert answer["cellar_version"] == version()


def test_model_is_listed_and_shown() -> None:
    app = create_app(engine_emitting("x"), settings())

    names = {
        path: [model["model"] for model in ask(app, "GET", f"/api/{path}").json["models"]] for path in ("tags", "ps")
    }
    card = post(engine_emitting("x"), "show").json

    assert {"tags": ["fake", "org/alias"], "ps": ["fake", "org/alias"]} == names
    assert {"completion", "tools", "thinking", "embedding"} == set(card["capabilities"])
    assert 64 == card["model_info"]["fake.context_length"]
    # Copilot's name of the model.
    assert card["model_info"]["general.basename"] == "model"


def test_the_name_of_a_file_is_without_its_ending() -> None:
    engine = engine_emitting("x")
    engine.info_value = replace(engine.info_value, name="folder/Model.Q4_1.gguf")

    assert post(engine, "show").json["model_info"]["general.basename"] == "Model.Q4_1"


def test_embed() -> None:
    """Vectors of length 1; older clients send one text."""

    def script(request: Request) -> Iterator[Event]:
        yield Started(len(request.prompt), 0, 7)
        yield Embedded(struct.pack("<2f", 3.0, 4.0))
        yield finished(request)

    many = post(FakeEngine(script), "embed", input=["one", "two"]).json
    one = post(FakeEngine(script), "embeddings", prompt="one").json

    assert [[pytest.approx(0.6), pytest.approx(0.8)]] * 2 == many["embeddings"]
    assert [pytest.approx(0.6), pytest.approx(0.8)] == one["embedding"]
    assert 6 == many["prompt_eval_count"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("embed", {"input": ""}, "'input'"),
        ("embed", {"input": ["a", ""]}, "'input[1]'"),
        ("embeddings", {"prompt": ""}, "'prompt'"),
    ],
)
def test_empty_input_is_named_as_in_the_request(path: str, body: Any, named: str) -> None:
    """The older path has a prompt."""
    answer = post(engine_emitting("x"), path, **body)

    assert (400, f"Invalid value for {named}: it has no tokens.") == (answer.status, answer.json["error"])


def test_no_input_has_no_embeddings() -> None:
    answer = post(engine_emitting("x"), "embed", input=[])

    assert (answer.status, answer.json["embeddings"]) == (200, [])


def test_responses_match_openapi() -> None:
    """Responses, lines and errors validate against /openapi.json, without extra fields."""
    text = f"<think>\nhm\n</think>\n\nyes{CALL}"

    def check(shape: Any, value: Any) -> None:
        TypeAdapter(shape).validate_python(value, strict=True, extra="forbid")

    check(OllamaLine, post(engine_emitting(text), "chat", messages=MESSAGES, tools=[TOOL], stream=False).json)
    for line in lines(post(engine_emitting(text), "chat", messages=MESSAGES, tools=[TOOL])):
        check(OllamaLine, line)
    for line in lines(post(engine_emitting(text), "generate", prompt="hi")):
        check(OllamaLine, line)
    check(OllamaErrorBody, post(engine_emitting("x"), "chat", messages=MESSAGES, what=1).json)
    document = ask(create_app(engine_emitting("x"), settings()), "GET", "/openapi.json").json
    for path in ("chat", "generate"):
        content = document["paths"][f"/api/{path}"]["post"]["responses"]["200"]["content"]
        assert {"application/json", "application/x-ndjson"} == content.keys()
