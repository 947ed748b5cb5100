"""Bad input: every row has its exact error, and after it a valid request is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.app import create_app
from server.schemas import policy
from tests.server.fakes import FakeEngine, ask, settings

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "hi"}}
JSON = "We could not parse the JSON body of your request: "


def error(message: str, param: str | None, code: str = "invalid_value") -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


def invalid(param: str, reason: str, code: str = "invalid_value") -> dict[str, Any]:
    return error(f"Invalid value for '{param}': {reason}.", param, code)


def number(param: str, reason: str) -> dict[str, Any]:
    return invalid(param, f"Input should be {reason}")


FIELDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # Numbers: range, type, no coercion.
    (CHAT, {"temperature": -0.1}, number("temperature", "greater than or equal to 0")),
    (CHAT, {"temperature": 2.1}, number("temperature", "less than or equal to 2")),
    (CHAT, {"temperature": 1e308}, number("temperature", "less than or equal to 2")),
    (CHAT, {"temperature": "0.5"}, number("temperature", "a valid number")),
    (CHAT, {"temperature": True}, number("temperature", "a valid number")),
    (CHAT, {"temperature": [1]}, number("temperature", "a valid number")),
    # Without the name of a Python class.
    (
        CHAT,
        {"messages": [{"role": "user", "content": [1, 1]}]},
        number("messages[0].content[0]", "a valid object"),
    ),
    (CHAT, {"top_p": -0.1}, number("top_p", "greater than or equal to 0")),
    (CHAT, {"top_p": 1.01}, number("top_p", "less than or equal to 1")),
    (CHAT, {"min_p": -1}, number("min_p", "greater than or equal to 0")),
    (CHAT, {"top_k": -2}, number("top_k", "greater than or equal to -1")),
    (CHAT, {"top_k": 2**31}, number("top_k", "less than or equal to 2147483647")),
    (CHAT, {"top_k": 1.0}, number("top_k", "a valid integer")),
    (CHAT, {"frequency_penalty": 2.5}, number("frequency_penalty", "less than or equal to 2")),
    (CHAT, {"presence_penalty": -2.5}, number("presence_penalty", "greater than or equal to -2")),
    (CHAT, {"repetition_penalty": 0}, number("repetition_penalty", "greater than or equal to 0.01")),
    (CHAT, {"seed": 2**63}, number("seed", "less than or equal to 9223372036854775807")),
    (CHAT, {"seed": "1"}, number("seed", "a valid integer")),
    (CHAT, {"max_tokens": 0}, number("max_tokens", "greater than or equal to 1")),
    (CHAT, {"max_tokens": -2}, number("max_tokens", "greater than or equal to 1")),
    (CHAT, {"max_tokens": 2**62}, number("max_tokens", "less than or equal to 2147483647")),
    (CHAT, {"max_tokens": True}, number("max_tokens", "a valid integer")),
    (
        CHAT,
        {"max_tokens": 5, "max_completion_tokens": 6},
        invalid("max_tokens", "it differs from 'max_completion_tokens'; give one of them"),
    ),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, number("top_logprobs", "less than or equal to 20")),
    (CHAT, {"top_logprobs": 1}, invalid("top_logprobs", "it needs 'logprobs' to be true")),
    (CHAT, {"logprobs": 1}, number("logprobs", "a valid boolean")),
    (TEXT, {"logprobs": 21}, number("logprobs", "less than or equal to 20")),
    (TEXT, {"logprobs": True}, number("logprobs", "a valid integer")),
    (CHAT, {"keep": -1}, number("keep", "greater than or equal to 0")),
    (CHAT, {"recurrent_shift": "forget"}, number("recurrent_shift", "'rebuild' or 'carry'")),
    (CHAT, {"overflow": "wrap"}, number("overflow", "'length' or 'shift'")),
    # Bias and stops.
    (CHAT, {"logit_bias": {"1": 101}}, number("logit_bias.1", "less than or equal to 100")),
    (CHAT, {"logit_bias": {"-1": 1}}, invalid("logit_bias.-1", "String should match pattern '^(0|[1-9][0-9]{0,9})$'")),
    (CHAT, {"logit_bias": {"01": 1}}, invalid("logit_bias.01", "String should match pattern '^(0|[1-9][0-9]{0,9})$'")),
    (CHAT, {"logit_bias": {"256": 1}}, invalid("logit_bias", "this model has 256 tokens, there is no id 256")),
    (CHAT, {"logit_bias": [1]}, number("logit_bias", "a valid object")),
    (CHAT, {"stop": ""}, invalid("stop", "String should have at least 1 character")),
    (CHAT, {"stop": ["x" * 257]}, invalid("stop[0]", "String should have at most 256 characters")),
    (CHAT, {"stop": ["x"] * 17}, invalid("stop", "List should have at most 16 items, not 17")),
    (CHAT, {"stop": 5}, invalid("stop", "it must be a string or a list of strings")),
    (CHAT, {"stop": ["x", 5]}, number("stop[1]", "a valid string")),
    (CHAT, {"stop_token_ids": [-1]}, number("stop_token_ids[0]", "greater than or equal to 0")),
    (CHAT, {"stop_token_ids": [300]}, invalid("stop_token_ids", "this model has 256 tokens, there is no id 300")),
    # Messages.
    (CHAT, {"messages": []}, invalid("messages", "List should have at least 1 item, not 0")),
    (CHAT, {"messages": "hi"}, number("messages", "a valid list")),
    (CHAT, {"messages": None}, number("messages", "a valid list")),
    (
        CHAT,
        {"messages": [{"role": "robot", "content": ""}]},
        number("messages[0].role", "'system', 'developer', 'user', 'assistant', 'tool' or 'function'"),
    ),
    (
        CHAT,
        {"messages": [{"content": "x"}]},
        error("Missing required parameter: 'messages[0].role'.", "messages[0].role"),
    ),
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": 5}]}, number("messages[1].content", "a valid string")),
    (
        CHAT,
        {"messages": [*MESSAGES, {"role": "user"}]},
        invalid("messages[1].content", "a message of the role 'user' needs it"),
    ),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": None}]},
        invalid("messages[0].content", "a message of the role 'tool' needs it"),
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        error("Missing required parameter: 'messages[0].content[0].text'.", "messages[0].content[0].text"),
    ),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
                    ],
                }
            ]
        },
        invalid(
            "messages[0].content[1].image_url.url",
            "it must be a data URL with base64, or an https URL",
            "invalid_image_url",
        ),
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x"}] * 2049},
        invalid("messages", "List should have at most 2048 items, not 2049"),
    ),
    (CHAT, {"messages": [{"role": "user", "content": "refuse me"}]}, invalid("messages", "the template refuses it")),
    (
        CHAT,
        {"continue_final_message": True},
        invalid("continue_final_message", "the last message is not one of the assistant"),
    ),
    (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        invalid("add_generation_prompt", "it cannot be true together with 'continue_final_message'"),
    ),
    (
        CHAT,
        {"chat_template_kwargs": {"tokenize": True}},
        invalid("chat_template_kwargs.tokenize", "this name belongs to the template itself"),
    ),
    (
        CHAT,
        {"chat_template_kwargs": {"__class__": 1}},
        invalid("chat_template_kwargs.__class__", "String should match pattern '^[A-Za-z][A-Za-z0-9_]{0,63}$'"),
    ),
    (
        CHAT,
        {"chat_template_kwargs": {"x": {}}},
        invalid("chat_template_kwargs.x", "it must be a number, a boolean, null or a short string"),
    ),
    # Prompts.
    (TEXT, {"prompt": ""}, invalid("prompt", "it has no tokens")),
    (TEXT, {"prompt": []}, invalid("prompt", "it must not be empty")),
    (TEXT, {"prompt": [[]]}, invalid("prompt", "it must not be empty")),
    (TEXT, {"prompt": ["x"] * 65}, invalid("prompt", "it may hold 64 prompts at most")),
    *(
        (
            TEXT,
            {"prompt": prompt},
            invalid("prompt", "it must be a string, a list of strings, a list of token ids, or a list of such lists"),
        )
        for prompt in (5, None, {"a": 1}, [1, "a"], ["a", 1], [-1], [True], [1.0], [[1], []], [[1], ["a"]], [2**31])
    ),
    (TEXT, {"prompt": [256]}, invalid("prompt", "this model has 256 tokens, there is no id 256")),
    # The rest.
    (CHAT, {"model": 5}, number("model", "a valid string")),
    (CHAT, {"stream": "true"}, number("stream", "a valid boolean")),
    (CHAT, {"stream_options": {}}, invalid("stream_options", "it needs 'stream' to be true")),
    (
        TEXT,
        {"stream_options": {"include_usage": True}, "stream": False},
        invalid("stream_options", "it needs 'stream' to be true"),
    ),
    (CHAT, {"stream_options": {"include_usage": 1}}, number("stream_options.include_usage", "a valid boolean")),
    (
        CHAT,
        {"stream_options": {"color": 1}},
        error("Unknown parameter: 'stream_options.color'.", "stream_options.color", "unknown_parameter"),
    ),
    (CHAT, {"user": "x" * 257}, invalid("user", "String should have at most 256 characters")),
    (CHAT, {"metadata": {"a": 1}}, number("metadata.a", "a valid string")),
    (
        CHAT,
        {"metadata": {str(n): "" for n in range(17)}},
        invalid("metadata", "Object should have at most 16 items, not more"),
    ),
    (CHAT, {"frobnicate": 1}, error("Unknown parameter: 'frobnicate'.", "frobnicate", "unknown_parameter")),
    (TEXT, {"messages": []}, error("Unknown parameter: 'messages'.", "messages", "unknown_parameter")),
]

RAW: list[tuple[bytes, dict[str, Any]]] = [
    (b"", error("The request needs a body.", None)),
    (b"{", error(JSON + "Expecting property name enclosed in double quotes (line 1, column 2).", None, "invalid_json")),
    (b'{"a": 1,\n "b": }', error(JSON + "Expecting value (line 2, column 7).", None, "invalid_json")),
    (b"[]", error("Invalid body: it must be a JSON object.", None)),
    (b"null", error("Invalid body: it must be a JSON object.", None)),
    (b"5", error("Invalid body: it must be a JSON object.", None)),
    (b'{"temperature": NaN}', error(JSON + "NaN is not a JSON number.", None, "invalid_json")),
    (b'{"temperature": -Infinity}', error(JSON + "-Infinity is not a JSON number.", None, "invalid_json")),
    (b'{"logit_bias": {"1": NaN}}', error(JSON + "NaN is not a JSON number.", None, "invalid_json")),
    (b'{"temperature": 1e999}', error(JSON + "a number is too large.", None, "invalid_json")),
    (b'{"seed": 10000000000000000000}', error(JSON + "an integer has more than 19 digits.", None, "invalid_json")),
    (b'{"seed": -%s}' % (b"9" * 400), error(JSON + "an integer has more than 19 digits.", None, "invalid_json")),
    (b'{"seed": 1, "seed": 2}', error(JSON + "the key 'seed' is duplicate.", None, "invalid_json")),
    (b'{"a": "\xff"}', error(JSON + "not UTF-8 at byte 7.", None, "invalid_json")),
    ('{"a": 1}'.encode("utf-16"), error(JSON + "not UTF-8 at byte 0.", None, "invalid_json")),
    (b'\xef\xbb\xbf{"a": 1}', error(JSON + "it starts with a byte order mark.", None, "invalid_json")),
    (b'{"user": "\\ud800"}', error(JSON + "a string contains an unpaired surrogate.", None, "invalid_json")),
    (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", error(JSON + "nested deeper than 64 levels.", None, "invalid_json")),
    (b"[" * 100_000, error(JSON + "nested deeper than 64 levels.", None, "invalid_json")),
]


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(), settings())  # type: ignore[arg-type]


# pydantic reports an error for each member of a union.
UNIONS: list[tuple[str, dict[str, Any], str]] = [
    ("/api/embed", {"model": "m", "input": 5}, "'input': Input should be a valid string or a valid list."),
    ("/api/embed", {"model": "m", "input": ["x", 5]}, "'input[1]': Input should be a valid string."),
    ("/v1/messages", {"thinking": {}}, "Missing required parameter: 'thinking.type'."),
    (
        "/v1/messages",
        {"thinking": {"type": "x"}},
        "'thinking': its 'type' should be one of 'enabled', 'adaptive', 'disabled'.",
    ),
    ("/v1/messages", {"thinking": 5}, "'thinking': Input should be a valid object."),
]


def assert_still_answers(app: Any) -> None:
    for path, body in GOOD.items():
        assert 200 == ask(app, "POST", path, json_body=body).status


@pytest.mark.parametrize(("path", "fields", "expected"), FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_a_400_that_names_it(
    app: Any, path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The exact body, without the input; the server still works."""
    answer = ask(app, "POST", path, json_body={**GOOD[path], **fields})

    assert (400, expected) == (answer.status, answer.json)
    assert_still_answers(app)


@pytest.mark.parametrize(("path", "fields", "expected"), UNIONS, ids=lambda value: str(value)[:40])
def test_the_most_specific_error_of_a_union_is_reported(
    app: Any, path: str, fields: dict[str, Any], expected: str
) -> None:
    """A value of another type than all members names all types."""
    good = {"model": "fake", "max_tokens": 1, "messages": MESSAGES} if path == "/v1/messages" else {}
    answer = ask(app, "POST", path, json_body={**good, **fields})

    assert 400 == answer.status
    assert expected in str(answer.json)


@pytest.mark.parametrize(("body", "expected"), RAW, ids=lambda value: str(value)[:40])
def test_a_body_that_is_no_strict_json_is_a_400(app: Any, body: bytes, expected: dict[str, Any]) -> None:
    """Infinite numbers, duplicate keys, other encodings and depth are rejected before pydantic."""
    answer = ask(app, "POST", CHAT, body=body)

    assert (400, expected) == (answer.status, answer.json)
    assert_still_answers(app)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_first_field_that_is_missing_is_named(app: Any, path: str) -> None:
    """A chat needs messages, a completion a prompt."""
    answer = ask(app, "POST", path, json_body={})

    needed = {CHAT: "messages", TEXT: "prompt"}[path]
    assert (400, error(f"Missing required parameter: '{needed}'.", needed)) == (answer.status, answer.json)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_unknown_model_is_a_404_that_lists_the_names(app: Any, path: str) -> None:
    """The message has the served names."""
    answer = ask(app, "POST", path, json_body={**GOOD[path], "model": "gpt-9"})

    message = "The model 'gpt-9' does not exist here. This server serves 'fake', 'org/alias'."
    assert (404, error(message, "model", "model_not_found")) == (answer.status, answer.json)


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (TEXT, "prompt")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_real_400_with_both_numbers(
    app: Any, path: str, param: str, stream: bool
) -> None:
    """Also for a stream the status is 400, with both wordings that agents search for."""
    long = {CHAT: {"messages": [{"role": "user", "content": "x" * 63}]}, TEXT: {"prompt": "x" * 64}}[path]

    answer = ask(app, "POST", path, json_body={**long, "stream": stream})

    message = (
        "This model's maximum context length is 64 tokens. However, the prompt has 64, "
        "which exceeds the available context size when an answer is to follow. Please shorten the prompt."
    )
    expected = error(message, param, "context_length_exceeded")
    expected["error"].update(n_prompt_tokens=64, n_ctx=64)
    assert (400, expected) == (answer.status, answer.json)
    assert_still_answers(app)


@pytest.mark.parametrize("name", sorted({*policy.CHAT, *policy.EXTENSIONS} - {*policy.CHAT_HINTS}))
def test_a_documented_field_is_never_ignored(app: Any, name: str) -> None:
    """A value with an effect is 400 unsupported_parameter; null and values without effect are accepted."""
    idle = {**policy.EXTENSIONS, **policy.CHAT}[name]
    asking = ask(app, "POST", CHAT, json_body={**GOOD[CHAT], name: {"something": "else"}})
    null = ask(app, "POST", CHAT, json_body={**GOOD[CHAT], name: None})

    expected = error(f"This server does not support '{name}' yet.", name, "unsupported_parameter")
    assert (400, expected) == (asking.status, asking.json)
    assert 200 == null.status
    for value in idle:
        assert 200 == ask(app, "POST", CHAT, json_body={**GOOD[CHAT], name: value}).status


@pytest.mark.parametrize("name", sorted(policy.COMPLETIONS))
def test_a_documented_field_of_completions_is_never_ignored(app: Any, name: str) -> None:
    answer = ask(app, "POST", TEXT, json_body={**GOOD[TEXT], name: 9})

    expected = error(f"This server does not support '{name}' yet.", name, "unsupported_parameter")
    assert (400, expected) == (answer.status, answer.json)
    for value in (None, *policy.COMPLETIONS[name]):
        assert 200 == ask(app, "POST", TEXT, json_body={**GOOD[TEXT], name: value}).status


def test_a_boolean_is_no_number(app: Any) -> None:
    """n=true is not n=1."""
    assert 400 == ask(app, "POST", CHAT, json_body={**GOOD[CHAT], "n": True}).status


def test_an_error_never_echoes_the_input(app: Any) -> None:
    """The error is short and does not contain the rejected value."""
    for value in ("SECRET" * 1000, ["SECRET"] * 1000, {"SECRET": "SECRET"}):
        for field in ("temperature", "messages", "stop_token_ids", "overflow", "prompt_cache_key"):
            answer = ask(app, "POST", CHAT, json_body={**GOOD[CHAT], field: value})

            assert 400 == answer.status
            assert b"SECRETSECRET" not in answer.body
            assert len(answer.body) < 400


def test_a_long_unknown_name_is_cut(app: Any) -> None:
    """To 64 characters."""
    answer = ask(app, "POST", CHAT, body=json.dumps({**GOOD[CHAT], "x" * 10_000: 1}).encode())

    assert ("unknown_parameter", "x" * 64) == (answer.json["error"]["code"], answer.json["error"]["param"])


def test_large_bodies_are_parsed_the_same(app: Any) -> None:
    """Bodies parsed in a worker thread follow the same rules."""
    padding = json.dumps({"user": "x" * 100_000})

    answer = ask(app, "POST", CHAT, body=padding.encode()[:-1] + b', "seed": NaN}')

    assert (400, error(JSON + "NaN is not a JSON number.", None, "invalid_json")) == (answer.status, answer.json)
